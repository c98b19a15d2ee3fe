"""Your agent: a model that calls tools for several turns before it replies. Change the tools and the reward.

A random model on a CPU calls no tools. There it shows that data, tools, rewards and training work together.
"""

import ast
import json
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import verifiers as vf
from datasets import Dataset

_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def load_environment(data_path: str, max_turns: int = 4) -> vf.Environment:
    """Make the environment of a file with one JSON object per line: a question and an answer."""
    with Path(data_path).open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    data = Dataset.from_list([_example(row) for row in rows])
    return vf.ToolEnv(tools=[calculate], max_turns=max_turns, dataset=data, rubric=vf.Rubric([correct]))


def calculate(expression: str) -> str:
    """Calculate a sum, difference, product or quotient of numbers.

    Args:
        expression: such as "(3 + 4) * 5".
    """
    return f"{_evaluate(ast.parse(expression[:200], mode='eval').body):g}"


def correct(completion: Any, answer: str) -> float:
    """1 if the last message is the answer, after all calls."""
    return float((completion[-1]["content"] or "").strip() == answer)


def _evaluate(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return float(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return float(_OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right)))
    raise ValueError("only numbers, + - * / and parentheses")


def _example(row: dict[str, Any]) -> dict[str, Any]:
    question = row["question"]  # text, or the messages of a conversation
    prompt = [{"role": "user", "content": question}] if isinstance(question, str) else question
    return {"prompt": prompt, "answer": row["answer"]}
