"""A v1 taskset whose hook rewrites the second answer of the model; a scripted user speaks three times."""

import verifiers.v1 as vf
from talking_taskset import TalkingConfig

__all__ = ["RewritingEnv", "RewritingTaskset"]


class RewritingTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.intercept
    async def censor(self, response: vf.Response, trace: vf.Trace) -> vf.Response | None:
        if trace.num_turns != 1:
            return None
        message = response.message.model_copy(update={"content": "censored"})
        return response.model_copy(update={"message": message})


class RewritingTaskset(vf.Taskset[RewritingTask, vf.TasksetConfig]):
    def load(self):
        return [RewritingTask(vf.TaskData(idx=0), self.config.task)]


class RewritingEnv(vf.Env[TalkingConfig]):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as agent:
            for _ in range(3):
                await agent.turn("more")
