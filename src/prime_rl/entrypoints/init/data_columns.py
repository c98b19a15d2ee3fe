"""Chooses prompt, answer and grader of a table by the names of its columns and by their values."""

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from prime_rl.core.errors import ConfigError
from prime_rl.entrypoints.init.data_files import Row
from prime_rl.rollouts.rendering import messages as chats

Prompt = str | list[dict[str, str]]

GRADERS = ("exact", "contains", "number", "math", "letter")
LETTERS = "ABCDE"
READINGS = ("letter", "0", "1", "text")
"""What a right answer may be of its choice: letter, name or label, a number that counts from 0 or 1, or the text."""
MAX_LABELS = 10
_LONG_CHARS = 200
"""Answers that are longer on average cannot be compared by a rule."""

_PROMPTS = (
    "question prompt problem instruction instructions query userprompt input ctx text sentence title document article "
    "content body review source task user frage pregunta"
)
_ANSWERS = (
    "answer answervalue finalanswer correctanswer answerkey groundtruth gold goldanswer bestanswer expectedanswer "
    "expected target solution label output completion response reply reference result correct answers correctoption "
    "cop chosen translation summary category class assistant sentiment antwort respuesta"
)
_TEXTS = "message comment post tweet description abstract request dialogue transcript"
_LABELS = "intent topic department priority"
"""Columns that are taken if no other one is recognised."""
_PLAIN_PROMPTS = "question problem prompt"
_PLAIN_ANSWERS = "answer answervalue finalanswer correctanswer groundtruth goldanswer expectedanswer"
"""Columns that are preferred to the last reply of a conversation, unless the project is for `sft`."""
_CONTEXTS = "context passage input background support premise"
_CHOICES = "choices options choice option endings answerchoices mcchoices"
_CHATS = "messages conversations conversation chat dialogue dialog turns"
_PLURALS = ("answers", "text", "aliases")
_NUMBER = re.compile(r"[-+]?[$€£]?(?=\.?\d)(\d+|\d{1,3}(,\d{3})+)?(\.\d+)?(e[-+]?\d{1,2})?%?")
_LETTERED = re.compile(r"(?:option|choice|answer|opt|op|ans|sol|ending)?([a-e]|[0-5])")


@dataclass(frozen=True)
class Choice:
    """How rows become examples.

    Attributes:
        convert: makes prompt and answer of a row; raises ValueError with the reason if it has none.
        prompt, answer: what they are made of, for the user.
        has_choices: the answers are of choices.
    """

    convert: Callable[[Row], tuple[Prompt, str]]
    prompt: str
    answer: str
    has_choices: bool = False


def flatten(row: Mapping[Any, Any]) -> Row:
    """Return a row with `a.b` for the keys of inner objects, and conversations and choices instead of their texts."""
    flat: Row = {}
    for key, value in row.items():
        if isinstance(value, Mapping) and value:
            flat |= {f"{key}.{name}": inner for name, inner in flatten(value).items()}
        else:
            flat[str(key)] = _list(str(key), value)
    return flat


def _list(column: str, value: Any) -> Any:
    """Return the list that a text is as JSON or Python, if it is a conversation or the column has lists of texts."""
    if not isinstance(value, str) or value[:1] + value[-1:] != "[]" or len(value) > 1_000_000:
        return value
    with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
        found = _literal(value)
        kinds = (str, int, float) if _last(column) in _CHOICES.split() else str
        is_plural = _last(column) in (*_CHOICES.split(), *_PLURALS)
        if is_chat(found) or (found and is_plural and all(isinstance(one, kinds) for one in found)):
            return found
    return value


def _literal(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return ast.literal_eval(text)


def choose_columns(
    rows: Sequence[Row],
    prompt: str | None,
    answer: str | None,
    reading: str | None = None,
    prefer_replies: bool = False,
) -> Choice:
    """Choose the columns of prompt and answer, unless they are given.

    Args:
        rows: of the data.
        prompt: column; None chooses.
        answer: column; None chooses.
        reading: what right answers are of choices, one of READINGS; None chooses.
        prefer_replies: take the last reply of a conversation even if there are columns `question` and `answer`.

    Raises:
        ConfigError: a given column does not exist, or none is recognised.
    """
    columns = list(dict.fromkeys(name for row in rows for name in row))
    for option, column in (("--prompt", prompt), ("--answer", answer)):
        if column is not None and column not in columns:
            raise ConfigError(f"{option} {column}: the data have no such column, only {_shown(columns)}")
    filled = [name for name in columns if any(not _is_empty(row.get(name)) for row in rows)]
    chats = [name for name in filled if any(is_chat(row.get(name)) for row in rows)]
    given, others = (None if answer in chats else answer), [name for name in filled if name not in (*chats, prompt)]
    answer = answer or _find(_ANSWERS, others) or _find(_LABELS, others, exact=True)
    replies = [name for name in chats if any(_split_chat(row.get(name))[1] is not None for row in rows)]
    chat = prompt if prompt in chats else _find(_CHATS + " chosen", replies) or next(iter(replies), None)
    plain = (_find(_PLAIN_PROMPTS, others, exact=True), given or _find(_PLAIN_ANSWERS, others, exact=True))
    if prompt is None and chat in replies and all(plain) and plain[0] != plain[1] and (given or not prefer_replies):
        prompt, answer = plain
    elif given is None and chat in replies and (prompt == chat or prompt is None):
        return Choice(partial(_from_chat, chat), f"the messages of {chat!r} before the last reply", "the last reply")
    if prompt is None:
        left = [name for name in filled if name != answer]
        prompt = next(iter(chats), None) or _find(_PROMPTS, left) or _find(_TEXTS, left, exact=True)
        texts = [name for name in filled if not re.search(r"(^|[\W_])(id|idx|index|number)$", name.lower())]
        if (prompt is None or answer is None) and len(texts) == 2:
            prompt = prompt or next(name for name in texts if name != answer)
            answer = answer or next(name for name in texts if name != prompt)
    if answer is None:
        answer = _find(_ANSWERS, [name for name in filled if name != prompt])
    if prompt is None or answer is None:
        missing = {"a prompt": (prompt, "--prompt"), "the right answers": (answer, "--answer")}
        names = [name for name, (found, _) in missing.items() if found is None]
        options = " and ".join(f"{option} COLUMN" for found, option in missing.values() if found is None)
        empty = f" (without values: {', '.join({*columns} - {*filled})})" if len(filled) < len(columns) else ""
        raise ConfigError(f"--data: no column looks like {' or '.join(names)}: {_shown(filled)}{empty}; pass {options}")
    if prompt in chats:
        convert = partial(_from_columns, prompt, None, answer)
        return Choice(convert, f"the messages of {prompt!r}", repr(answer))
    context = _find(_CONTEXTS, [name for name in filled if name not in (prompt, answer)], exact=True)
    made_of = f"{prompt!r}" + (f" and {context!r}" if context else "")
    if choices := _choices(filled, prompt, answer, rows):
        reading = reading or _choose_reading(rows, answer, choices)
        convert = partial(_with_choices, partial(_from_columns, prompt, context, answer), answer, choices, reading)
        how = f"counted from {reading}" if reading.isdecimal() else f"read as {reading}"
        made_of = f"{made_of} with the choices of {_shown(choices)}"
        return Choice(convert, made_of, f"the letter of {answer!r}, {how} (--choices-by changes that)", True)
    shown = f"the first of {answer!r}" if any(_takes_first(row.get(answer), answer) for row in rows) else repr(answer)
    return Choice(partial(_from_columns, prompt, context, answer), made_of, shown)


def choose_grader(answers: Sequence[str]) -> tuple[str, str]:
    """Return a grader of the environment `dataset`, and the reason."""
    labels = {*answers}
    ends = [answer.rpartition("####")[2].strip() for answer in answers]  # as in GSM8K
    if all(_NUMBER.fullmatch(text) and any(map(str.isdigit, text)) for text in ends):
        return "number", "all answers are numbers"
    if labels <= {*LETTERS}:
        return "letter", "all answers are letters of choices"
    latex = sum("\\boxed" in text or "\\frac" in text or text[:1] + text[-1:] == "$$" for text in answers)
    if 4 * latex > len(answers):
        return "math", "answers are LaTeX"
    if sum(map(len, answers)) > _LONG_CHARS * len(answers):
        return "contains", "answers are long texts that no rule can grade: write what you want into my_reward.py"
    if len(labels) == 1 < len(answers):
        return "contains", "all answers are equal, so there is little to learn"
    if len(labels) <= MAX_LABELS and len(answers) >= 2 * len(labels):
        return "exact", f"answers are {len(labels)} labels"
    if any(not re.search(r"\w", text) or text[:1] in "[{" for text in labels):
        return "exact", "answers are lists or symbols"
    return "contains", "answers are short texts"


def is_chat(value: Any) -> bool:
    """Whether a value is a list of messages with role and content, or with ShareGPT's `from` and `value`."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(one, Mapping) and {"role", "from"} & one.keys() for one in value)
    )


def _split_chat(value: Any) -> tuple[list[dict[str, str]], str | None]:
    """Return the messages before the last reply, and the reply; None if the last message is none of the assistant."""
    if not is_chat(value):
        return [], None
    messages = []
    for one in value:
        role, content = str(one.get("role") or one.get("from")), one.get("content", one.get("value"))
        if isinstance(content, list):
            content = "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
        content = _utf8(content) if isinstance(content, str) else text_of(content)
        messages.append({"role": chats.role_of(role), "content": content})
    if messages[-1]["role"] == "assistant":
        return messages[:-1], messages[-1]["content"]
    return messages, None


def _check_text(value: Any) -> None:
    """Raise ValueError for a conversation with images or tool calls, which would be lost."""
    for one in value if is_chat(value) else ():
        if isinstance(content := one.get("content"), list):
            chats.text_of(content)
        if one.get("tool_calls") or one.get("function_call"):
            raise ValueError("a message calls a tool")


def _from_chat(column: str, row: Row) -> tuple[Prompt, str]:
    _check_text(row.get(column))
    messages, reply = _split_chat(row.get(column))
    if reply is None or not reply.strip():
        raise ValueError(f"{column!r} does not end with a reply")
    return _checked(messages), reply.strip()


def _checked(messages: list[dict[str, str]]) -> Prompt:
    if any(message["role"] not in ("system", "user", "assistant") for message in messages):
        raise ValueError(f"it has messages of other roles, such as {messages[-1]['role']}")
    if not any(message["role"] == "user" and message["content"].strip() for message in messages):
        raise ValueError("no message of the user")
    return messages[0]["content"].strip() if len(messages) == 1 else messages


def _from_columns(prompt: str, context: str | None, answer: str, row: Row) -> tuple[Prompt, str]:
    value = row.get(prompt)
    _check_text(value)
    question = _checked(_split_chat(value)[0]) if is_chat(value) else text_of(value)
    if _is_empty(value) or not question:
        raise ValueError(f"no {prompt!r}")
    if not (right := text_of(row.get(answer), is_plural=_last(answer) in _PLURALS)):
        raise ValueError(f"no {answer!r}")
    if context is not None and isinstance(question, str) and (before := text_of(row.get(context))):
        parts = (question, before) if _last(context) == "input" else (before, question)
        question = "\n\n".join(parts)
    return question, right


def text_of(value: Any, is_plural: bool = False) -> str:
    """Return a value as one text; "" if it is missing. A list of several right answers gives its first."""
    if (
        isinstance(value, list)
        and value
        and (is_plural or len(value) == 1 or all(isinstance(one, str) for one in value))
    ):
        value = value[0]
    if isinstance(value, Mapping):
        value = next((value[key] for key in ("answer", "text", "value") if key in value), dict(value))
    if _is_empty(value):
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    if isinstance(value, list | dict):
        return _utf8(json.dumps(value, ensure_ascii=False, default=str))
    return _utf8(str(value).strip())


def _takes_first(value: Any, column: str) -> bool:
    is_plural = _last(column) in _PLURALS
    return isinstance(value, list) and len(value) > 1 and text_of(value, is_plural) == text_of(value[:1])


def _utf8(text: str) -> str:
    """Return a text without halves of surrogate pairs."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _is_empty(value: Any) -> bool:
    if isinstance(value, str):
        return value.strip().lower() in ("", "nan", "null", "n/a", "#n/a")
    return value is None or value != value or value in ([], {})


def _choices(columns: Sequence[str], prompt: str, answer: str, rows: Sequence[Row]) -> list[str]:
    """Return the columns with the choices: one with lists, or one for each choice."""
    lists = [name for name in columns if any(isinstance(row.get(name), list) for row in rows)]
    if name := _find(_CHOICES, [name for name in lists if name != answer and _last(name) != "label"]):
        return [name]
    others = [name for name in columns if name not in (prompt, answer)]
    lettered = [name for name in others if _LETTERED.fullmatch(_plain(name))]
    return lettered if len(lettered) >= 2 else []


def _choose_reading(rows: Sequence[Row], answer: str, columns: Sequence[str]) -> str:
    """Return the reading that fits most rows, of equal ones the first. Raises ConfigError if 0 and 1 fit equally."""
    places = [_places(text_of(row.get(answer)), columns, row) for row in rows]
    fits = {name: sum(name in found for found in places) for name in READINGS}
    best = max(fits, key=lambda name: fits[name])
    if best == "0" and fits["0"] == fits["1"]:
        raise ConfigError(
            f"--data: as many numbers of choices in {answer!r} fit a count from 0 as from 1; pass --choices-by 0 or "
            "--choices-by 1 (or text, if they are the choices)"
        )
    return best


def _places(right: str, columns: Sequence[str], row: Row) -> dict[str, int]:
    """Return the place of the right choice by each reading that gives one."""
    texts = _texts_of_choices(columns, row)
    labels = row.get(re.sub(r"[^.]*$", "label", columns[0]))
    names = list(map(text_of, labels)) if isinstance(labels, list) else list(columns) if len(columns) > 1 else []
    keys = [match[1].upper() for name in names if (match := _LETTERED.fullmatch(_plain(name)))]
    keys = keys if names and len(keys) == len(names) else [*LETTERS]
    places = {"text": next((place for place, shown in enumerate(texts) if right in shown), -1)}
    if (letter := right.strip("().: ").upper()) in keys:
        places["letter"] = keys.index(letter)
    elif right in names:
        places["letter"] = names.index(right)
    if right.isdecimal() and len(right) == 1:
        places |= {"0": int(right), "1": int(right) - 1}
    return {name: place for name, place in places.items() if 0 <= place < len(texts)}


def _texts_of_choices(columns: Sequence[str], row: Row) -> list[tuple[str, str]]:
    """Return each choice, and without its own letter if all have one, in order."""
    value = row.get(columns[0])
    texts = list(map(text_of, value if isinstance(value, list) else [row.get(name) for name in columns]))
    while texts and not texts[-1]:
        texts.pop()
    bare = [re.sub(rf"^[(\[]?{letter}[)\].:]\s*", "", text) for letter, text in zip(LETTERS, texts, strict=False)]
    if len(bare) < len(texts) or any(short in ("", text) for short, text in zip(bare, texts, strict=True)):
        bare = texts
    return list(zip(texts, bare, strict=True))


def _with_choices(
    convert: Callable[[Row], tuple[Prompt, str]], answer: str, columns: Sequence[str], reading: str, row: Row
) -> tuple[Prompt, str]:
    question, right = convert(row)
    texts = [bare for _, bare in _texts_of_choices(columns, row)]
    if not 2 <= len(texts) <= len(LETTERS) or not all(texts):
        raise ValueError(f"{len(texts)} choices; 2 to {len(LETTERS)} that are not empty are supported")
    if (index := _places(right, columns, row).get(reading)) is None:
        raise ValueError(f"{answer!r} is none of the choices: {right[:40]!r}")
    lines = [f"{letter}) {text}" for letter, text in zip(LETTERS, texts, strict=False)]
    return "\n".join([str(question), *lines]), LETTERS[index]


def _find(names: str, columns: Sequence[str], exact: bool = False) -> str | None:
    """Return the column whose name, or its last part, is the first of `names`, or at least contains one of them."""
    words = names.split()
    rules: list[Callable[[str, str], bool]] = [lambda word, name: word in (_plain(name), _last(name))]
    if not exact:
        rules.append(lambda word, name: len(word) > 4 and word in _plain(name))
    return next((name for fits in rules for word in words for name in columns if fits(word, name)), None)


def _plain(name: str) -> str:
    return re.sub(r"[\W_]", "", name.lower())


def _last(name: str) -> str:
    return _plain(name.rpartition(".")[2])


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
