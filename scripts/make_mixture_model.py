"""Train the small model of configs/mixture/cpu.toml again, on a CPU, in some minutes:

    uv run --extra cpu python scripts/make_mixture_model.py

It does what scripts/make_reverse_text_model.py does for words, with examples of all environments of the recipe, and
`sft` as configured in configs/mixture/sft_cpu.toml.
"""

from collections.abc import Iterator
from itertools import islice

from make_code_tests_model import make_examples as make_code_examples
from make_reverse_text_model import ROOT, WarmStart, main
from make_reverse_text_model import make_examples as make_word_examples

NUM_ROUNDS = 5_000


def make_examples() -> Iterator[tuple[str, str]]:
    """Yield questions and replies of the environments in turn; words and programs, which take longest, twice."""
    words, programs = make_word_examples(), make_code_examples()
    sources = (words, programs, _make_orderings(), words, programs, _make_choices())
    for examples in islice(zip(*sources, strict=False), NUM_ROUNDS):
        yield from examples


def _make_orderings() -> Iterator[tuple[str, str]]:
    from logic.environment import make_puzzles

    for puzzle in make_puzzles(0, "sft", ["ordering"], "easy"):
        yield puzzle.question, f"<answer>{puzzle.solution}</answer>"


def _make_choices() -> Iterator[tuple[str, str]]:
    from science.questions import make_questions

    for question in make_questions(0, "sft", ["choices"], 0.01):
        yield question.text, f"<answer>{question.answer}</answer>"


if __name__ == "__main__":
    main(__doc__, WarmStart(make_examples, ROOT / "configs/mixture"))
