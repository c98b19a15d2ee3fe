"""Questions with their graders, from rows of common data sets, or generated from a seed."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from random import Random
from typing import Any

from science.facts import FACTS
from science.formulas import FORMULAS
from science.units import UnknownUnitError, parse_quantity

from .environment_tools.answers import unwrap
from .environment_tools.numbers import number_of
from .environment_tools.rows import Row, text_of

KINDS = ("numbers", "choices")
LETTERS = "ABCDEFGHIJ"

_WITH_WORDS = re.compile(r"[^A-Za-z]+(?:\s[A-Za-z]{4,20}){1,3}\.?")
_DECORATION = re.compile(r"[*`$\"“”]|\\[()\[\],;:! ]")
_CHOICE = re.compile(
    r"(?:(?:the )?(?:correct |right )?(?:option|choice|answer)(?: is)?:? )?"
    r"[(\[]?([A-J])[)\]]?(?:[.:)]|\s[=\u2013\u2014-])?(?:\s+(.*))?",
    re.DOTALL | re.IGNORECASE,
)


@dataclass(frozen=True)
class Question:
    """A question, its correct answer as text, and what decides about other answers."""

    text: str
    answer: str
    is_correct: Callable[[str], bool]
    tolerance: float | None = None


def ask_number(text: str, answer: str, tolerance: float) -> Question:
    """Return a question about a quantity; another unit of the same dimension is correct too.

    Raises:
        ValueError: `answer` is not a number with a unit.
    """
    right = parse_quantity(answer)

    def is_correct(reply: str) -> bool:
        try:
            return parse_quantity(reply).is_close_to(right, tolerance)
        except UnknownUnitError:  # words may stand behind a mere number: 3200 bacteria
            number = number_of(reply) if _WITH_WORDS.fullmatch(reply.strip()) and not right.has_unit else None
            return number is not None and abs(number - Fraction(right.value)) <= Fraction(tolerance) * abs(
                Fraction(right.value)
            )
        except ValueError:
            return False

    return Question(text, answer, is_correct, tolerance)


def ask_choice(text: str, choices: Sequence[str], correct: int) -> Question:
    """Return a question with lettered choices; the answer is a letter, or the text of the choice.

    Raises:
        ValueError: too few or too many choices, or `correct` is none of them.
    """
    if not 2 <= len(choices) <= len(LETTERS) or not 0 <= correct < len(choices):
        raise ValueError(f"choice {correct} of {len(choices)} choices")
    listed = "\n".join(f"{letter}) {choice}" for letter, choice in zip(LETTERS, choices, strict=False))

    def is_correct(reply: str) -> bool:
        reply = _DECORATION.sub("", unwrap(reply)).strip()
        if match := _CHOICE.fullmatch(reply):
            named = match[2] is None or _same(match[2], choices[correct]) or match[2] == f"({choices[correct]})"
            return match[1].upper() == LETTERS[correct] and named
        return _same(reply, choices[correct])

    return Question(f"{text}\n{listed}", LETTERS[correct], is_correct)


def make_questions(seed: int, part: str, kinds: Sequence[str], tolerance: float) -> Iterator[Question]:
    """Yield questions of the kinds in turn, without end, the same for the same seed."""
    source = Random(f"science {part} {seed}")
    while True:
        for kind in kinds:
            if kind == "numbers":
                question, answer = source.choice(FORMULAS)(source)
                yield ask_number(question, answer, tolerance)
            else:
                text, right, *wrong = source.choice(FACTS)
                choices = source.sample([right, *wrong], 1 + len(wrong))
                yield ask_choice(text, choices, choices.index(right))


def read_question(row: Row, tolerance: float) -> Question:
    """Return the question of a row of any of the known forms.

    Raises:
        ValueError: the form is unknown, or the row is malformed.
    """
    text = text_of(row, "question", "Question", "problem")
    if "choices" in row or "options" in row:
        return _read_choices(row, text)
    wrong = [str(row[name]) for name in row if re.fullmatch(r"(distractor|Incorrect Answer ?)\d", name)]
    if wrong:
        right = text_of(row, "correct_answer", "Correct Answer")
        choices = Random(f"science {text}").sample([right, *wrong], 1 + len(wrong))
        return ask_choice(text, choices, choices.index(right))
    answer = text_of(row, "answer", "answer_number")
    unit = str(row.get("unit") or "")
    given = row.get("tolerance")
    if given is not None and (isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given < 1):
        raise ValueError(f"`tolerance` must be at least 0 and below 1, not {given!r:.40}")
    return ask_number(text, f"{answer} {unit}".strip(), tolerance if given is None else float(given))


def _read_choices(row: Row, text: str) -> Question:
    """Read the forms of MMLU (list, number), ARC (`text` and `label`, `answerKey`) and lists with a letter."""
    value: Any = row.get("choices", row.get("options"))
    labels: Sequence[str] = LETTERS
    if isinstance(value, dict) and {"text", "label"} <= value.keys():
        value, labels = value["text"], [str(label) for label in value["label"]]
    if not isinstance(value, list):
        raise ValueError("`choices` must be a list, or have `text` and `label`")
    choices = [str(choice) for choice in value]
    key = next((row[name] for name in ("answer", "answerKey") if row.get(name) is not None), None)
    if isinstance(key, int) and not isinstance(key, bool):
        return ask_choice(text, choices, key)
    key = str(key).strip()
    if key in labels[: len(choices)]:
        return ask_choice(text, choices, list(labels).index(key))
    if key in choices:
        return ask_choice(text, choices, choices.index(key))
    raise ValueError(f"the answer {key[:40]!r} is none of the choices")


def _same(left: str, right: str) -> bool:
    return " ".join(left.split()).strip(".").casefold() == " ".join(right.split()).strip(".").casefold()
