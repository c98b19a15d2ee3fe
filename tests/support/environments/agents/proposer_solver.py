"""One agent proposes a task, another attempts it twice, and a judge played by the policy is not trained.

The proposer is rewarded if one of the two attempts is right.
"""

import verifiers.v1 as vf

__all__ = ["ProposerSolverEnv", "ProposerSolverTaskset"]


class ProposerSolverTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    pass


class ProposerSolverTaskset(vf.Taskset[ProposerSolverTask, vf.TasksetConfig]):
    def load(self):
        return [ProposerSolverTask(vf.TaskData(idx=0, prompt="Propose."), self.config.task)]


class ProposerSolverConfig(vf.EnvConfig):
    proposer: vf.AgentConfig = vf.AgentConfig()
    solver: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig()


class ProposerSolverEnv(vf.Env[ProposerSolverConfig]):
    async def setup(self, agents):
        agents.judge.trainable = False

    async def run(self, task, agents):
        proposed = await agents.proposer.run(task)
        posed = ProposerSolverTask(vf.TaskData(idx=0, prompt=f"Solve {proposed.last_reply}"), task.config)
        for _ in range(2):
            attempt = await agents.solver.run(posed)
            asked = ProposerSolverTask(vf.TaskData(idx=0, prompt=f"Good? {attempt.last_reply}"), task.config)
            verdict = await agents.judge.run(asked)
            attempt.record_reward("good", float(verdict.last_reply))

    async def finalize(self, task, episode):
        solved = [trace.reward for trace in episode.traces if trace.agent.name == "solver"]
        for trace in episode.traces:
            if trace.agent.name == "proposer":
                trace.record_reward("hard", float(0 < sum(solved) < 2))
