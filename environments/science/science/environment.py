"""The environment: a science question, and a reward for the right quantity or choice."""

from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from science.questions import KINDS, Question, make_questions, read_question

from .environment_tools.prompts import final_answer, has_answer, make_dataset
from .environment_tools.rows import pick, read_splits

if TYPE_CHECKING:
    from verifiers import SingleTurnEnv

SYSTEM_PROMPT = (
    "Answer the question. End with the result between <answer> and </answer>: a number with its unit, or the letter of "
    "a choice."
)


def load_environment(
    kinds: Sequence[str] = KINDS,
    tolerance: float = 0.01,
    data_path: str | None = None,
    eval_data_path: str | None = None,
    dataset_name: str | None = None,
    dataset_subset: str | None = None,
    train_split: str = "train",
    eval_split: str = "test",
    num_train_examples: int = -1,
    num_eval_examples: int = -1,
    num_generated: int = 1000,
    seed: int = 0,
    system_prompt: str = SYSTEM_PROMPT,
) -> "SingleTurnEnv":
    """Make the environment. Without a file or data set it generates questions of physics, chemistry and biology.

    The reward is 1 if the last <answer> of the reply is the right choice, or a quantity of the right dimension within
    the tolerance. `has_answer` is a metric with weight 0.

    Args:
        kinds: generated questions: "numbers", "choices", or both in turn.
        tolerance: largest relative difference of a number, for rows without `tolerance`.
        data_path: a `.jsonl`, `.json` or `.parquet` file of questions (see the README).
        eval_data_path: the same for evaluation; without it, `data_path` is used for evaluation too.
        dataset_name: a data set of the hub with such rows.
        dataset_subset: its configuration.
        train_split: its split for training.
        eval_split: its split for evaluation.
        num_train_examples: number of examples; -1 uses all.
        num_eval_examples: the same for evaluation.
        num_generated: number of generated questions for training; an eighth of it for evaluation.
        seed: seed of the generated questions.
        system_prompt: the system message; "" for none.

    Raises:
        ValueError: a missing or malformed file, or invalid arguments.
    """
    import verifiers as vf

    if not kinds or any(kind not in KINDS for kind in kinds):
        raise ValueError(f"kinds is {kinds!r}; it must name some of {', '.join(KINDS)}")
    if not 0 <= tolerance < 1 or num_generated < 1:
        raise ValueError("need 0 <= tolerance < 1 and a positive num_generated")
    if data_path or dataset_name:
        read = partial(read_question, tolerance=tolerance)
        train, evaluation = read_splits(
            read, data_path, eval_data_path, dataset_name, dataset_subset, train_split, eval_split
        )
    else:
        train = list(islice(make_questions(seed, "train", kinds, tolerance), num_generated))
        evaluation = list(islice(make_questions(seed, "eval", kinds, tolerance), max(1, num_generated // 8)))
    train, evaluation = pick(train, num_train_examples), pick(evaluation, num_eval_examples)
    return vf.SingleTurnEnv(
        dataset=make_dataset(((q.text, q.answer, q.tolerance) for q in train), system_prompt),
        eval_dataset=make_dataset(((q.text, q.answer, q.tolerance) for q in evaluation), system_prompt, len(train)),
        rubric=vf.Rubric(funcs=_make_scores([*train, *evaluation]), weights=[1.0, 0.0]),
    )


def _make_scores(questions: Sequence[Question]) -> list[Any]:
    def correct_answer(completion: Any, info: Any) -> float:
        """1 if the answer is correct."""
        answer = final_answer(completion)
        return float(answer is not None and questions[info["number"]].is_correct(answer))

    return [correct_answer, has_answer]
