"""Two agents, both played by the policy: the larger number wins."""

import verifiers.v1 as vf

__all__ = ["SelfPlayEnv", "SelfPlayTaskset"]


class SelfPlayTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    pass


class SelfPlayTaskset(vf.Taskset[SelfPlayTask, vf.TasksetConfig]):
    def load(self):
        return [SelfPlayTask(vf.TaskData(idx=0), self.config.task)]


class SelfPlayConfig(vf.EnvConfig):
    first: vf.AgentConfig = vf.AgentConfig()
    second: vf.AgentConfig = vf.AgentConfig()


class SelfPlayEnv(vf.Env[SelfPlayConfig]):
    async def run(self, task, agents):
        async with agents.first.interaction(task) as first, agents.second.interaction(task) as second:
            said = await first.turn("A number?")
            await second.turn(f"More than {said.last_reply}?")

    async def finalize(self, task, episode):
        numbers = {trace.agent.name: int(trace.last_reply) for trace in episode.traces}
        for trace in episode.traces:
            trace.record_reward("won", float(numbers[trace.agent.name] == max(numbers.values())))
