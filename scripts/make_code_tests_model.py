"""Train the small model of configs/code_tests/cpu.toml again, on a CPU, in about a minute:

    uv run --extra cpu python scripts/make_code_tests_model.py

It does what scripts/make_reverse_text_model.py does for words: random weights, supervised examples (a function in
notation, and the same as a Python program), `sft` as configured in configs/code_tests/sft_cpu.toml.
"""

import re
from collections.abc import Iterator

from make_reverse_text_model import ROOT, WarmStart, main

NUM_EXAMPLES = 40_000
RARE = 5


def make_examples() -> Iterator[tuple[str, str]]:
    """Yield questions and replies: "f(x)=3x-7", and a fenced block with that function.

    Numbers of three digits are rare, so that the recipe has something to teach.
    """
    from code_tests.problems import make_problems

    for number, problem in enumerate(make_problems(0, "sft", NUM_EXAMPLES, "notation")):
        if number % RARE and re.search(r"\d{3}", problem.question):
            continue
        rule = problem.question.removeprefix("f(x)=").replace("x", "*x")
        yield problem.question, f"```\nf=lambda x:{rule}\n```"


if __name__ == "__main__":
    main(__doc__, WarmStart(make_examples, ROOT / "configs/code_tests"))
