"""Data sets of prompts, and the parts of a completion: messages are dictionaries or objects of verifiers."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .answers import final_part

if TYPE_CHECKING:
    from datasets import Dataset

ERROR = "error: "
"""How the result of a failed call starts."""


def make_dataset(questions: Iterable[tuple[str, str]], system_prompt: str, first: int = 0) -> "Dataset":
    """Make a data set of questions and the answers that samples/ shows.

    `info["number"]` counts the rows from `first`. It leads to what graders need and rows should not contain.
    """
    from datasets import Dataset

    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    rows = [
        {"prompt": [*system, {"role": "user", "content": question}], "answer": answer, "info": {"number": number}}
        for number, (question, answer) in enumerate(questions, first)
    ]
    return Dataset.from_list(rows)


def final_reply(completion: Any) -> str:
    """Return the text of the last message after its reasoning; "" if it is not the model's or calls a tool."""
    last = completion[-1] if completion else {}
    if field_of(last, "role") != "assistant" or field_of(last, "tool_calls"):
        return ""
    text = field_of(last, "content")
    return final_part(text) if isinstance(text, str) else ""


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
