"""Scores of an answer with citations: pure functions of hostile text."""

import re
from collections.abc import Sequence, Set

from research.corpus import words_of
from research.generated import Question

SHOWN = "research_shown_documents"
"""Key of a rollout's state: names of the documents that its tools returned."""

_CITATION = re.compile(r"\[([\w./-]{1,80})\]")
_ARTICLES = {"a", "an", "the"}


def cited_documents(reply: str) -> frozenset[str]:
    """Return the names that a reply cites: [t3]."""
    return frozenset(_CITATION.findall(reply))


def is_answer(reply: str, answers: Sequence[str]) -> bool:
    """Whether an answer without its citations equals an accepted one, but for case, punctuation and articles."""
    found = _normalise(_CITATION.sub(" ", reply))
    return any(found == _normalise(answer) for answer in answers)


def citation_scores(cited: Set[str], shown: Set[str], question: Question) -> tuple[float, float]:
    """Return precision and recall of the citations, from 0 to 1.

    A citation counts only if its document was shown to the model; guessed names have no value.
    """
    right = cited & shown & question.evidence
    precision = len(right) / len(cited) if cited else 0.0
    return precision, len(right) / len(question.evidence) if question.evidence else 1.0


def _normalise(text: str) -> list[str]:
    return [word for word in words_of(text) if word not in _ARTICLES]
