"""The model guesses a number until it is right; fewer guesses are better."""

import verifiers as vf
from datasets import Dataset


class Guessing(vf.MultiTurnEnv):
    async def setup_state(self, state):
        state["target"] = state["info"]["target"]
        return state

    @vf.stop
    async def is_right(self, state):
        steps = state["trajectory"]
        return bool(steps) and steps[-1]["completion"][-1]["content"] == str(state["target"])

    async def env_response(self, messages, state, **kwargs):
        hint = "higher" if int(messages[-1]["content"]) < state["target"] else "lower"
        return [{"role": "user", "content": hint}]


def load_environment():
    async def speed(state):
        return 1 / len(state["trajectory"])

    data = Dataset.from_list([{"question": "Guess.", "answer": "", "info": {"target": 7}}])
    return Guessing(dataset=data, rubric=vf.Rubric(funcs=[speed]), max_turns=4)
