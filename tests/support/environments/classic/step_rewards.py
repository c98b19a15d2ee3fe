"""A reward for each turn, one for the end, or advantages of its own, by argument `sets`."""

import verifiers as vf
from datasets import Dataset


class Walk(vf.MultiTurnEnv):
    def __init__(self, sets, **kwargs):
        super().__init__(**kwargs)
        self.sets = sets

    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "on"}]

    async def setup_state(self, state):
        if self.sets == "state":
            state["advantage"] = -2.0
        return state

    async def add_trajectory_step(self, state, trajectory_step):
        said = float(trajectory_step["completion"][-1]["content"])
        if self.sets == "reward" or (self.sets == "some rewards" and said > 2):
            trajectory_step["reward"] = said
        if self.sets == "advantage" and state["trajectory"]:
            trajectory_step["advantage"] = said
        await super().add_trajectory_step(state, trajectory_step)


def load_environment(sets="reward", sums=False, rubric_sets=None):
    def end(state):
        steps = state["trajectory"]
        if rubric_sets is not None:
            steps[0][rubric_sets] = 5.0
        return 10.0 + (sum(step["reward"] for step in steps) if sums else 0.0)

    data = Dataset.from_list([{"question": "Walk.", "answer": ""}])
    return Walk(sets, dataset=data, rubric=vf.Rubric(funcs=[end]), max_turns=2)
