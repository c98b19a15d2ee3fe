"""A stateless tool."""

import verifiers as vf
from datasets import Dataset


def shout(word: str) -> str:
    """Return the word in capital letters."""
    return word.upper()


def load_environment():
    async def right(completion, answer):
        return float(completion[-1]["content"] == answer)

    data = Dataset.from_list([{"question": "Shout abc.", "answer": "ABC"}])
    return vf.ToolEnv(dataset=data, tools=[shout], rubric=vf.Rubric(funcs=[right]), max_turns=4)
