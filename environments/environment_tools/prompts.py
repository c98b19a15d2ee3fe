"""Data sets of prompts, and the parts of a completion: messages are dictionaries or objects of verifiers."""

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .answers import final_part, last_tagged

if TYPE_CHECKING:
    from datasets import Dataset

ERROR = "error: "
"""How the result of a failed call starts."""


def make_dataset(
    questions: Iterable[tuple[str, str] | tuple[str, str, Any]], system_prompt: str, first: int = 0
) -> "Dataset":
    """Make a data set of questions, the answers that samples/ shows, and what graders need besides these.

    `info["number"]` counts the rows from `first`. It leads to what graders need and rows should not contain: they have
    its hash, `info["grading"]`, so that rewards of earlier tests are not used again.
    """
    from datasets import Dataset

    rows = [
        {
            "prompt": make_prompt(question, system_prompt),
            "answer": answer,
            "info": {"number": number, **({"grading": hash_data(grading)} if grading else {})},
        }
        for number, (question, answer, *grading) in enumerate(questions, first)
    ]
    return Dataset.from_list(rows)


def hash_data(data: Any) -> str:
    """Return a short hash of plain data and data classes, without sets, whose order differs between processes."""
    return hashlib.blake2s(ascii(data).encode(), digest_size=6).hexdigest()


def make_prompt(question: str, system_prompt: str) -> list[dict[str, str]]:
    """Return the messages of a question; "" is no system message."""
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*system, {"role": "user", "content": question}]


def final_reply(completion: Any) -> str:
    """Return the text of the last message after its reasoning; "" if it is not the model's or calls a tool."""
    last = completion[-1] if completion else {}
    if field_of(last, "role") != "assistant" or field_of(last, "tool_calls"):
        return ""
    text = field_of(last, "content")
    return final_part(text) if isinstance(text, str) else ""


def final_answer(completion: Any) -> str | None:
    """Return the last <answer> of the final reply; None if there is none."""
    return last_tagged(final_reply(completion))


def has_answer(completion: Any) -> float:
    """1 if there is an answer, right or wrong."""
    return float(final_answer(completion) is not None)


def tool_results(completion: Any) -> list[str]:
    """Return the results of all tool calls, in order."""
    return [str(field_of(message, "content")) for message in completion if field_of(message, "role") == "tool"]


def describe_error(error: Exception) -> str:
    """Return one short line for the model that states why a call failed; some messages repeat its own text."""
    if isinstance(error, KeyError):
        return f"{ERROR}there is no such tool"
    return ERROR + " ".join(str(error).split())[:200]


def field_of(message: Any, name: str) -> Any:
    """Return a field of a message; None if it has none."""
    return message.get(name) if isinstance(message, dict) else getattr(message, name, None)
