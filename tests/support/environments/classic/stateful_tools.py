"""A tool with an argument that the model does not see: the notes of its rollout."""

import verifiers as vf
from datasets import Dataset


def remember(word: str, notes: list) -> str:
    """Remember a word."""
    notes.append(word)
    return str(len(notes))


class Notes(vf.StatefulToolEnv):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.add_tool(remember, args_to_skip=["notes"])

    async def setup_state(self, state, **kwargs):
        state["notes"] = []
        return await super().setup_state(state, **kwargs)

    def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
        return {**tool_args, "notes": state["notes"]}


def load_environment():
    def noted(state, answer):
        return float(state["notes"] == [answer])

    data = Dataset.from_list([{"question": "Remember abc.", "answer": "abc"}])
    return Notes(dataset=data, rubric=vf.Rubric(funcs=[noted]), max_turns=4)
