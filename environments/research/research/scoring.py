"""Scores of an answer with citations: pure functions of hostile text."""

import re
from collections.abc import Sequence, Set

from research.corpus import words_of
from research.generated import Question

from .environment_tools.numbers import number_of

SHOWN = "research_shown_documents"
"""Key of a rollout's state: names of the documents that its tools returned."""

_CITATION = re.compile(r"\[([\w./-]{1,80})\]")
_ARTICLES = {"a", "an", "the"}
_GROUPS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
# With sign and decimals, which the words of a text do not have.
_NUMBERS = re.compile(r"(?:(?<![\w-])[-\u2212])?[0-9]+(?:\.[0-9]+)?")


def cited_documents(reply: str) -> frozenset[str]:
    """Return the names that a reply cites: [t3]."""
    return frozenset(_CITATION.findall(reply))


def is_answer(reply: str, answers: Sequence[str]) -> bool:
    """Whether an answer without its citations equals an accepted one, but for case, punctuation and articles.

    Numbers are compared as numbers: 1,743 is 1743, and -5 is not 5.
    """
    found = " ".join(word for word in _CITATION.sub(" ", reply).split() if word.lower() not in _ARTICLES)
    return any(_is_same(found, answer) for answer in answers)


def citation_scores(cited: Set[str], shown: Set[str], question: Question) -> tuple[float, float]:
    """Return precision and recall of the citations, from 0 to 1.

    A citation counts only if its document was shown to the model; guessed names have no value.
    """
    right = cited & shown & question.evidence
    precision = len(right) / len(cited) if cited else 0.0
    return precision, len(right) / len(question.evidence) if question.evidence else 1.0


def _is_same(found: str, answer: str) -> bool:
    right = number_of(answer, evaluate=False)
    if right is not None and not any(map(str.isalpha, answer)):
        return number_of(found, evaluate=False) == right
    found, answer = (_GROUPS.sub("", text) for text in (found, answer))
    return _NUMBERS.findall(found) == _NUMBERS.findall(answer) and _normalise(found) == _normalise(answer)


def _normalise(text: str) -> list[str]:
    return [word for word in words_of(text) if word not in _ARTICLES]
