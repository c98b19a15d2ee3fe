"""A generated corpus about people and towns that do not exist, and questions that need one or two documents."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from research.corpus import Document

_STARTS = (
    "Bel",
    "Cor",
    "Dal",
    "Fen",
    "Gar",
    "Hal",
    "Kel",
    "Lor",
    "Mar",
    "Nor",
    "Pel",
    "Ros",
    "Sel",
    "Tal",
    "Vel",
    "Wen",
)
_ENDS = ("ara", "bury", "dale", "eth", "ford", "ham", "ina", "mora", "mouth", "stad", "ton", "via", "wick", "ys")
_FIRST = ("Ada", "Bram", "Cleo", "Dora", "Emil", "Faye", "Goran", "Hana", "Ivo", "Juna", "Kira", "Lars", "Mila", "Nils")
_JOBS = ("painter", "chemist", "sailor", "composer", "botanist", "engineer", "astronomer", "poet")
_GOODS = ("glass", "wool", "salt", "copper", "paper", "amber", "tea", "timber")


@dataclass(frozen=True)
class Question:
    """A question, accepted answers, and the names of the documents that support them."""

    text: str
    answers: Sequence[str]
    evidence: frozenset[str]


def make_documents(seed: int, num_towns: int) -> tuple[list[Document], list[Question]]:
    """Make a document for each town and one for each person born in one of them, and all questions about them.

    Raises:
        ValueError: there are too few names for so many towns.
    """
    source = Random(f"research {seed}")
    towns = [start + end for start in _STARTS for end in _ENDS]
    people = [f"{first} {start}{end}" for first in _FIRST for start in _STARTS for end in ("berg", "holm", "sen")]
    if not 1 <= num_towns <= len(towns):
        raise ValueError(f"num_towns must be from 1 to {len(towns)}, not {num_towns}")
    documents, questions = [], []
    for number, (town, person) in enumerate(
        zip(source.sample(towns, num_towns), source.sample(people, num_towns), strict=True), 1
    ):
        founded, born, job = source.randint(900, 1700), source.randint(1701, 1950), source.choice(_JOBS)
        goods, residents = source.choice(_GOODS), source.randint(11, 999) * 100
        here, there = f"t{number}", f"p{number}"
        documents += [
            Document(
                here, town, f"{town} is a town of {residents} people, founded in {founded}. It trades in {goods}."
            ),
            Document(there, person, f"{person} was a {job}, born in {town} in {born}."),
        ]
        for text, answer, evidence in (
            (f"In which year was {town} founded?", str(founded), {here}),
            (f"In which year was {person} born?", str(born), {there}),
            (f"What was the profession of {person}?", job, {there}),
            (f"In which year was the town founded in which {person} was born?", str(founded), {there, here}),
            (f"In what does the town trade in which {person} was born?", goods, {there, here}),
        ):
            questions.append(Question(text, (answer,), frozenset(evidence)))
    source.shuffle(questions)
    return documents, questions
