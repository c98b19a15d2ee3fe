"""Single-turn environments of mathematics: a question, and an answer in a box that math-verify compares."""

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import verifiers as vf
from datasets import Dataset

from .answers import final_part, gold_text, last_boxed
from .math_grading import MathGrader
from .prompts import make_prompt
from .rows import Row, Source, pick, text_of

QUESTION_COLUMNS = ("question", "problem", "prompt")


class MathRubric(vf.Rubric):
    """Rewards 1 for a right answer; measures with weight 0 whether there was one and whether it could be graded."""

    def __init__(self, grader: MathGrader) -> None:
        """Grade with `grader`, which is closed when the environment is torn down."""
        super().__init__(
            funcs=[self.correct_answer, self.has_answer, self.grading_failed],
            weights=[1.0, 0.0, 0.0],
            parser=vf.Parser(extract_fn=boxed_answer),
        )
        self.grader = grader

    async def correct_answer(self, completion: Any, answer: str, state: Any) -> float:
        """1 if the last box of the reply holds what equals the answer."""
        verdict = await self.grader.grade(answer, self.parser.parse_answer(completion) or "")
        state["grading_failure"] = verdict.failure
        return float(verdict.correct)

    async def has_answer(self, completion: Any) -> float:
        """1 if the reply has an answer in a box."""
        return float(bool(self.parser.parse_answer(completion)))

    async def grading_failed(self, state: Any) -> float:
        """1 if the answer is too long, or grading it took too much time or memory: scored 0, right or not."""
        return float(state.get("grading_failure") is not None)

    async def teardown(self) -> None:
        """End the grading processes."""
        await super().teardown()
        self.grader.close()


def boxed_answer(text: str) -> str:
    r"""Return what stands in the last `\boxed{}` behind the reasoning; "" if nothing does."""
    return last_boxed(final_part(text)) or ""


def math_example(row: Row, system_prompt: str) -> dict[str, Any]:
    r"""Make an example of a row.

    The question is the column `question`, `problem` or `prompt`. The right answer is the column `answer`, or
    `ground_truth` of the column `verification_info` (an object or its JSON), or what is boxed in the column `solution`;
    reasoning before it and a `\boxed{}` around it are removed.

    Raises:
        ValueError: the row has no question or no answer.
    """
    return {"prompt": make_prompt(text_of(row, *QUESTION_COLUMNS), system_prompt), "answer": gold_answer(row)}


def gold_answer(row: Row) -> str:
    """Return the right answer of a row (see `math_example`)."""
    if row.get("answer") is not None:
        return gold_text(text_of(row, "answer"))
    info = row.get("verification_info")
    if isinstance(info, str):
        try:
            info = json.loads(info)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"'verification_info' is not JSON ({error})") from error
    if isinstance(info, Mapping):
        return gold_text(text_of(info, "ground_truth"))
    if row.get("solution") is not None:
        boxed = last_boxed(text_of(row, "solution"))
        if not boxed:
            raise ValueError("nothing in 'solution' is boxed")
        return boxed
    return text_of(row, "answer", "verification_info", "solution")  # raises, naming all three


def math_environment(
    train: Source,
    evaluation: Source | None,
    keep: Callable[[Row], bool],
    system_prompt: str,
    grader: MathGrader,
    num_train_examples: int = -1,
    num_eval_examples: int = -1,
    shuffle_seed: int | None = None,
) -> vf.SingleTurnEnv:
    """Make the environment.

    Args:
        train: where the training examples come from.
        evaluation: where those for evaluation come from: a file is read now, so that its errors show early, a data set
            of the hub when they are first asked for. None evaluates on the training examples.
        keep: which rows of `train` to take; only these need be well-formed.
        system_prompt: the system message; "" for none.
        grader: compares the answers.
        num_train_examples: number of examples; -1 uses all.
        num_eval_examples: the same for evaluation.
        shuffle_seed: shuffle the training examples first.

    Raises:
        ValueError: see `Source.examples` and `pick`.
    """

    def example(row: Row) -> dict[str, Any]:
        return math_example(row, system_prompt)

    def read_evaluation() -> Dataset:
        assert evaluation
        return Dataset.from_list(pick(evaluation.examples(example), num_eval_examples))

    examples = train.examples(lambda row: example(row) if keep(row) else None)
    eval_dataset: Dataset | Callable[[], Dataset] | None = None
    if evaluation:
        eval_dataset = read_evaluation() if evaluation.path else read_evaluation
    rubric = MathRubric(grader)
    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(pick(examples, num_train_examples, shuffle_seed)),
        eval_dataset=eval_dataset,
        parser=rubric.parser,
        rubric=rubric,
    )


def number_in(row: Row, column: str) -> float | None:
    """Return the number in a column, be it a number or text with one, such as "Level 5"; None if it is not known.

    Raises:
        ValueError: the row has no such column.
    """
    if column not in row:
        raise ValueError(f"no {column!r} to filter by; it has {', '.join(map(repr, row))}")
    value = row[column]
    if isinstance(value, str):
        found = re.search(r"[0-9]+(?:\.[0-9]+)?", value)
        return float(found.group()) if found else None
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        return None
    return float(value)


def is_within(value: float | None, low: float | None, high: float | None) -> bool:
    """Return whether a number lies within bounds, which belong to them; one that is not known lies within none."""
    if low is None and high is None:
        return True
    return value is not None and (low is None or low <= value) and (high is None or value <= high)
