"""The longest answer of the group wins."""

import verifiers as vf
from datasets import Dataset


def longest(completions):
    lengths = [len(completion[-1]["content"]) for completion in completions]
    return [float(length == max(lengths)) for length in lengths]


def load_environment():
    data = Dataset.from_list([{"question": "Speak.", "answer": ""}])
    return vf.SingleTurnEnv(dataset=data, rubric=vf.Rubric(funcs=[longest]))
