"""Questions of one task of reasoning-gym, which generates and scores them."""

from collections.abc import Mapping
from typing import Any

import reasoning_gym
import verifiers as vf
from datasets import Dataset
from reasoning_gym.utils import SYSTEM_PROMPTS, extract_answer


def load_environment(
    task: str = "leg_counting",
    config: Mapping[str, Any] | None = None,
    num_train_examples: int = 1000,
    num_eval_examples: int = 128,
    seed: int = 0,
    system_prompt: str = "default",
) -> vf.Environment:
    """Load one task of reasoning-gym.

    Args:
        task: its name.
        config: its settings, such as the difficulty.
        num_train_examples, num_eval_examples: number of questions; those for evaluation have the next seed.
        seed: of the questions.
        system_prompt: a name of `reasoning_gym.utils.SYSTEM_PROMPTS`, or a text; "" for none.

    Raises:
        ValueError: reasoning-gym has no such task, or rejects a setting.
    """
    if task not in reasoning_gym.factory.DATASETS:
        raise ValueError(f"task = {task!r}: reasoning-gym has {', '.join(sorted(reasoning_gym.factory.DATASETS))}")
    sizes = {"train": num_train_examples, "eval": num_eval_examples}
    questions = {
        split: reasoning_gym.create_dataset(task, **{**(config or {}), "size": size, "seed": seed + number})
        for number, (split, size) in enumerate(sizes.items())
        if size > 0
    }

    def rows(split: str) -> Dataset | None:
        if split not in questions:
            return None
        return Dataset.from_list(
            [
                {"question": each["question"], "answer": str(each["answer"]), "info": {"split": split, "index": index}}
                for index, each in enumerate(questions[split])
            ]
        )

    def score(completion: Any, info: Mapping[str, Any]) -> float:
        data = questions[info["split"]]
        return float(data.score_answer(_answer(completion), data[info["index"]]))

    return vf.SingleTurnEnv(
        dataset=rows("train"),
        eval_dataset=rows("eval"),
        system_prompt=SYSTEM_PROMPTS.get(system_prompt, system_prompt) or None,
        rubric=vf.Rubric(funcs=[score, has_answer], weights=[1.0, 0.0]),
    )


def has_answer(completion: Any) -> float:
    """Return 1 if the reply has an <answer>."""
    return float(_answer(completion) is not None)


def _answer(completion: Any) -> str | None:
    answer: str | None = extract_answer(completion[-1]["content"].rpartition("</think>")[2])
    return answer
