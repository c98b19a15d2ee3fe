"""Train the small model of configs/aqua_rat/cpu.toml again, on a CPU, in less than a minute:

    uv run --extra cpu python scripts/make_aqua_rat_model.py

It does what scripts/make_reverse_text_model.py does for words: random weights, supervised examples (a generated
question, and an answer), `sft` as configured in configs/aqua_rat/sft_cpu.toml. Half of the letters are random, so that
the recipe has something to teach.
"""

from collections.abc import Iterator
from random import Random

from make_reverse_text_model import ROOT, WarmStart, main

NUM_EXAMPLES = 20_000
RIGHT = 0.5


def make_examples() -> Iterator[tuple[str, str]]:
    """Yield questions with options, and answers of which half are right and half have a random letter."""
    from nanochat_aqua_rat.environment_tools.letters import LETTERS
    from nanochat_aqua_rat.generated import make_rows
    from nanochat_aqua_rat.rows import example_of

    random = Random(0)
    for row in make_rows(NUM_EXAMPLES, 0, "sft"):
        example = example_of(row, "", include_rationale=False)
        letter = example["answer"] if random.random() < RIGHT else random.choice(LETTERS)
        yield example["prompt"][0]["content"], f"Answer: {letter}"


if __name__ == "__main__":
    main(__doc__, WarmStart(make_examples, ROOT / "configs/aqua_rat"))
