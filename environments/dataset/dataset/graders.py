"""Graders: what a right answer of the data set is, and whether a reply states it."""

import importlib
import inspect
import re
import sys
from abc import ABC, abstractmethod
from fractions import Fraction
from pathlib import Path
from typing import Any

from .environment_tools.answers import final_part, gold_text, last_boxed
from .environment_tools.letters import LETTERS, stated_letter
from .environment_tools.math_grading import MathGrader, Verdict
from .environment_tools.numbers import final_number, number_of, show_number
from .environment_tools.prompts import hash_data


class Grader(ABC):
    """Compares replies with the answers of the data set.

    Attributes:
        source: hash of the user's file that decides; None for graders of this package.
    """

    source: str | None = None

    def gold(self, answer: str) -> str:
        """Return the right answer in the form that `grade` takes; see `gold_text`.

        Raises:
            ValueError: it is no answer of the kind that `grade` compares.
        """
        return gold_text(answer)

    @abstractmethod
    async def grade(self, text: str, answer: str) -> float:
        """Return the reward of a reply, which is untrusted."""

    def close(self) -> None:
        """Release resources."""
        return


class ExactGrader(Grader):
    r"""The final part of the reply, or its last `\boxed{}`, is the answer, white space aside."""

    async def grade(self, text: str, answer: str) -> float:
        """1 if the texts are equal."""
        text = final_part(text)
        boxed = last_boxed(text)
        return float(" ".join((text if boxed is None else boxed).split()) == " ".join(answer.split()))


class ContainsGrader(Grader):
    """The final part of the reply contains the answer as complete words, in any case."""

    async def grade(self, text: str, answer: str) -> float:
        """1 if the answer occurs."""
        words = r"\s+".join(map(re.escape, answer.split()))
        # Part of another number or name is no word: 5 of -5, 0.5, 5/6; C of C++; can of can't.
        before = r"(?<![\w√])(?<![0-9][.,/^])(?<![+\u2212-])(?<!\.)" if answer[:1].isdigit() else r"(?<!\w)"
        behind = r"(?![\w+#]|['\u2019]t\b|[.,/^][0-9])"
        return float(re.search(f"{before}{words}{behind}", final_part(text), re.IGNORECASE) is not None)


class NumberGrader(Grader):
    """The final number of the reply is the answer; see `final_number`."""

    def gold(self, answer: str) -> str:
        """Return the number that the answer is, or the one after `####`."""
        number = number_of(super().gold(answer).rpartition("####")[2])
        if number is None:
            raise ValueError(f"the answer is not one number: {answer[-60:]!r}")
        return show_number(number)

    async def grade(self, text: str, answer: str) -> float:
        """1 if the numbers are equal."""
        number = final_number(text)
        return float(number is not None and number == Fraction(answer))


class LetterGrader(Grader):
    """The letter A to E that the reply states is the answer; see `stated_letter`."""

    def gold(self, answer: str) -> str:
        """Return the letter."""
        letter = super().gold(answer).strip("() .").upper()
        if letter not in tuple(LETTERS):
            raise ValueError(f"the answer is not one of the letters {', '.join(LETTERS)}: {answer[:60]!r}")
        return letter

    async def grade(self, text: str, answer: str) -> float:
        """1 if the letters are equal."""
        return float(stated_letter(text) == answer)


class MathVerifyGrader(Grader):
    r"""math-verify finds the last `\boxed{}` of the reply equal to the answer; in separate, limited processes."""

    def __init__(self) -> None:
        self.processes = MathGrader()

    async def verdict(self, text: str, answer: str) -> Verdict:
        """Return whether the answers are equal, and why that could not be graded."""
        return await self.processes.grade(answer, last_boxed(final_part(text)) or "")

    async def grade(self, text: str, answer: str) -> float:
        """1 if the answers are equal."""
        return float((await self.verdict(text, answer)).correct)

    def close(self) -> None:
        """End the processes."""
        self.processes.close()


class FunctionGrader(Grader):
    """Your function of the text of the reply and the answer returns the reward; it may be a coroutine function."""

    def __init__(self, import_path: str) -> None:
        """Import it from an installed package or the working directory. Raises ValueError if that fails."""
        module_name, _, name = import_path.replace(":", ".").rpartition(".")
        if str(Path.cwd()) not in sys.path:
            sys.path.append(str(Path.cwd()))  # last, so that its modules do not shadow installed ones
        try:
            self._function = getattr(importlib.import_module(module_name), name)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"grader = {import_path!r} cannot be imported: {error}") from error
        file = getattr(inspect.getmodule(self._function), "__file__", None)
        self.source = hash_data(Path(file).read_bytes()) if file else None

    def gold(self, answer: str) -> str:
        """Return the answer as it is."""
        return answer

    async def grade(self, text: str, answer: str) -> float:
        """What the function returns."""
        value: Any = self._function(text, answer)
        return float(await value if inspect.isawaitable(value) else value)


GRADERS: dict[str, type[Grader]] = {
    "exact": ExactGrader,
    "contains": ContainsGrader,
    "number": NumberGrader,
    "math": MathVerifyGrader,
    "letter": LetterGrader,
}


def make_grader(name: str) -> Grader | None:
    """Return a grader by name, or by the import path of a function; None for `none`.

    Raises:
        ValueError: there is none.
    """
    if name == "none":
        return None
    if name in GRADERS:
        return GRADERS[name]()
    if not re.fullmatch(r"\w+(\.\w+)*[.:]\w+", name):
        raise ValueError(f"grader = {name!r} is none of {', '.join(GRADERS)}, none, and no package.module:function")
    return FunctionGrader(name)
