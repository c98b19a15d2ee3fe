"""A custom environment with its own reward and metric: count how often a letter occurs in a word.

    uv run --extra cpu rl @ my.toml --orchestrator.env.id examples/extend/count_letters.py

An environment is a module with `load_environment(**args)` that returns a verifiers environment; `env.args` are its
keyword arguments. Functions of the rubric with a weight are rewards. Functions with weight 0 are metrics: they are
reported as `metrics/<name>` and change no gradient.
"""

import random
from typing import Any

import verifiers as vf
from datasets import Dataset


def load_environment(num_examples: int = 1000, num_eval_examples: int = 100, seed: int = 0) -> vf.SingleTurnEnv:
    """Make the environment from random words; the same seed gives the same words."""
    words = random.Random(seed)
    examples = [_example(words) for _ in range(num_examples + num_eval_examples)]
    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(examples[num_eval_examples:]),
        eval_dataset=Dataset.from_list(examples[:num_eval_examples]),
        rubric=vf.Rubric(funcs=[closeness, is_number], weights=[1.0, 0.0]),
    )


def closeness(completion: list[dict[str, Any]], answer: str, **_: Any) -> float:
    """Reward: 1 for the right count, less for each letter that it is off, 0 for no number."""
    number = _number(completion)
    return 0.0 if number is None else 1.0 / (1 + abs(number - int(answer)))


def is_number(completion: list[dict[str, Any]], **_: Any) -> float:
    """Metric: whether the reply is a number at all."""
    return float(_number(completion) is not None)


def _number(completion: list[dict[str, Any]]) -> int | None:
    reply = str(completion[-1]["content"]).strip()
    return int(reply) if reply.isascii() and reply.isdigit() and len(reply) < 4 else None


def _example(words: random.Random) -> dict[str, Any]:
    word = "".join(words.choices("abc", k=words.randint(3, 8)))
    question = f"How often does the letter a occur in {word}? Reply with a number."
    return {"prompt": [{"role": "user", "content": question}], "answer": str(word.count("a"))}
