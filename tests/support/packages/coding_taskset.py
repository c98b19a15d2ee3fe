"""A v1 taskset whose tasks put a file into the runtime of the agent, and whose reward reads one from it."""

import verifiers.v1 as vf

__all__ = ["CodingTaskset"]


class CodingTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        await runtime.write("src/numbers.txt", b"19\n23\n")

    @vf.reward
    async def right(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        try:
            return float((await runtime.read("sum.txt")).strip() == b"42")
        except FileNotFoundError:
            return 0.0


class CodingTaskset(vf.Taskset[CodingTask, vf.TasksetConfig]):
    def load(self):
        return [CodingTask(vf.TaskData(idx=0, prompt="Write the sum of src/numbers.txt to sum.txt."), self.config.task)]
