"""Your environment: its rows are prompts with right answers, and its rubric computes rewards. Change both.

docs/environments.md describes environments of several turns, tools, and what a reward function receives.
"""

import json
from pathlib import Path
from typing import Any

import verifiers as vf
from datasets import Dataset


def load_environment(data_path: str) -> vf.Environment:
    """Make the environment of a file with one JSON object per line: a question and an answer."""
    with Path(data_path).open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return vf.SingleTurnEnv(dataset=Dataset.from_list([_example(row) for row in rows]), rubric=vf.Rubric([correct]))


def correct(completion: Any, answer: str) -> float:
    """1 if the reply is the answer."""
    return float(completion[-1]["content"].strip() == answer)


def _example(row: dict[str, Any]) -> dict[str, Any]:
    question = row["question"]  # text, or the messages of a conversation
    prompt = [{"role": "user", "content": question}] if isinstance(question, str) else question
    return {"prompt": prompt, "answer": row["answer"]}
