"""A second agent is only asked if the first one bets; if it does not, it keeps half a point."""

import verifiers.v1 as vf

__all__ = ["ChallengeEnv", "ChallengeTaskset"]


class ChallengeTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    pass


class ChallengeTaskset(vf.Taskset[ChallengeTask, vf.TasksetConfig]):
    def load(self):
        return [ChallengeTask(vf.TaskData(idx=0, prompt="Bet?"), self.config.task)]


class ChallengeConfig(vf.EnvConfig):
    better: vf.AgentConfig = vf.AgentConfig()
    caller: vf.AgentConfig = vf.AgentConfig()


class ChallengeEnv(vf.Env[ChallengeConfig]):
    async def run(self, task, agents):
        bet = await agents.better.run(task)
        if bet.last_reply == "no":
            bet.record_reward("kept", 0.5)
            return
        called = await agents.caller.run(ChallengeTask(vf.TaskData(idx=0, prompt="Call?"), task.config))
        called.record_reward("won", 1.0)
