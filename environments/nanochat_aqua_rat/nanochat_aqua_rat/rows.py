"""Converts rows to examples: raw rows of AQuA-RAT, and conversations."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from .environment_tools.letters import LETTERS, stated_letter
from .environment_tools.rows import Row, text_of

_OWN_LABEL = re.compile(r"\s*\(?[A-Ea-e]\s*[).:]\s*")


def example_of(row: Row, system_prompt: str, include_rationale: bool) -> dict[str, Any]:
    """Convert a row with `question`, `options`, `correct` and optionally `rationale`, or with `messages`.

    Of `messages` the last one of the assistant is the solution, and what stands before it is the prompt. The right
    letter is the row's `correct` or `answer`, or the one that the solution states.

    Raises:
        ValueError: something is missing or malformed.
    """
    if "messages" in row:
        prompt, solution = _conversation(row["messages"])
        letter = _letter(row, solution)
        if prompt[0]["role"] == "system":
            # The argument decides, as it does for raw rows.
            prompt = prompt[1:]
        question = next((message["content"] for message in prompt if message["role"] == "user"), "")
        if not question:
            raise ValueError("'messages' has no question of the user before the assistant's answer")
        options = list(row.get("options") or [])
        rationale = str(row.get("rationale") or solution)
    else:
        question, options = text_of(row, "question"), _options(row.get("options"))
        letter = _letter(row, "")
        if LETTERS.index(letter) >= len(options):
            raise ValueError(f"'correct' is {letter}, but there are only {len(options)} options")
        lines = [f"{label}) {option}" for label, option in zip(LETTERS, options, strict=False)]
        prompt = [{"role": "user", "content": "\n".join([question, "", *lines])}]
        rationale = str(row.get("rationale") or "")
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    metadata = {"question": question, "options": options, "rationale": rationale if include_rationale else ""}
    return {"prompt": [*system, *prompt], "answer": letter, "metadata": metadata}


def _options(options: Any) -> list[str]:
    """Return the options without their own labels ("A)32" is "32")."""
    if not isinstance(options, Sequence) or isinstance(options, str) or not 2 <= len(options) <= len(LETTERS):
        raise ValueError(f"'options' is not a list of 2 to {len(LETTERS)} texts")
    texts = [text_of({"options": option}, "options") for option in options]
    labels = [_OWN_LABEL.match(text) for text in texts]
    if all(match and match.group().strip(" (").upper().startswith(LETTERS[i]) for i, match in enumerate(labels)):
        return [text[match.end() :] if match else text for text, match in zip(texts, labels, strict=True)]
    return texts


def _letter(row: Row, solution: str) -> str:
    if row.get("correct") is None and row.get("answer") is None and solution:
        stated = stated_letter(solution)
        if stated is None:
            raise ValueError("no 'correct' or 'answer', and the assistant's last message states no letter")
        return stated
    letter = text_of(row, "correct", "answer").strip("() .").upper()
    if len(letter) != 1 or letter not in LETTERS:
        raise ValueError(f"the right answer is not a letter A to E but {letter[:40]!r}")
    return letter


def _conversation(messages: Any) -> tuple[list[dict[str, str]], str]:
    """Split a conversation into the prompt and the assistant's last message."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError("'messages' is not a list of messages")
    parts: list[dict[str, str]] = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping) or message.get("role") not in ("system", "user", "assistant"):
            raise ValueError(f"message {number} is not an object with a role system, user or assistant")
        parts.append({"role": message["role"], "content": _content(message.get("content"), number)})
    if parts[-1]["role"] != "assistant":
        return parts, ""
    if len(parts) == 1:
        raise ValueError("'messages' has nothing but the assistant's answer")
    return parts[:-1], parts[-1]["content"]


def _content(content: Any, number: int) -> str:
    """Return the text of a message, whose content may be a list of parts with a `text` each."""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        if all(isinstance(text, str) for text in texts):
            return "".join(map(str, texts))
    raise ValueError(f"message {number} has no text")
