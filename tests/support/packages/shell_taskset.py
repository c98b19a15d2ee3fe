"""A v1 taskset that brings a harness of its own, which may execute what the model writes."""

import verifiers.v1 as vf

__all__ = ["ShellHarness", "ShellTaskset"]


class ShellHarness(vf.Harness[vf.HarnessConfig]):
    NEEDS_CONTAINER = False

    async def launch(self, *args, **kwargs):
        raise NotImplementedError


class ShellTaskset(vf.Taskset[vf.Task[vf.TaskData, vf.State, vf.TaskConfig], vf.TasksetConfig]):
    def load(self):
        return [vf.Task(vf.TaskData(idx=0, prompt="list the files"), self.config.task)]
