"""Rewards that are no plain functions, and values that are no floats."""

import functools

import numpy as np
import verifiers as vf
from datasets import Dataset


class Counter:
    """A callable object without `__name__`."""

    def __init__(self, letter):
        self.letter = letter

    def __call__(self, completion, **kwargs):
        return completion[-1]["content"].count(self.letter)


def at_least(completion, length):
    return len(completion[-1]["content"]) >= length


async def half(completion, **kwargs):
    return np.float32(0.5)


def load_environment():
    rubric = vf.Rubric(
        funcs=[Counter("a"), functools.partial(at_least, length=2), functools.partial(at_least, length=9), half],
        weights=[1.0, 10.0, 100.0, 1000.0],
    )
    return vf.SingleTurnEnv(dataset=Dataset.from_list([{"question": "Speak.", "answer": ""}]), rubric=rubric)
