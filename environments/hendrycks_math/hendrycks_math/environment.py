"""The environment: rows of a data set of the hub or of a local file, optionally filtered by difficulty."""

from typing import TYPE_CHECKING, Any

from .environment_tools.math_grading import MathGrader
from .environment_tools.rows import Row, Source

if TYPE_CHECKING:
    from verifiers import SingleTurnEnv

DATASET = "PrimeIntellect/Hendrycks-Math"
EVAL_DATASET = "HuggingFaceH4/MATH-500"
SYSTEM_PROMPT = "Solve the problem step by step. Put the final answer, and nothing else, in \\boxed{}."


def load_environment(
    dataset_name: str = DATASET,
    dataset_subset: str | None = None,
    dataset_split: str = "train",
    dataset_shuffle: bool = False,
    seed: int = 0,
    data_path: str | None = None,
    eval_dataset_name: str | None = EVAL_DATASET,
    eval_split: str = "test",
    eval_data_path: str | None = None,
    num_train_examples: int = -1,
    num_eval_examples: int = -1,
    difficulty_key: str = "level",
    min_difficulty: float | None = None,
    max_difficulty: float | None = None,
    system_prompt: str = SYSTEM_PROMPT,
    grading: dict[str, Any] | None = None,
) -> "SingleTurnEnv":
    r"""Make the environment: one question, one answer in `\boxed{}`, compared with the right one by math-verify.

    Args:
        dataset_name: data set of the hub; for its columns see `environment_tools.math_environment.math_example`.
        dataset_subset: its configuration.
        dataset_split: its split.
        dataset_shuffle: shuffle the training examples before `num_train_examples` are selected.
        seed: seed of the shuffle.
        data_path: read this `.jsonl`, `.json` or `.parquet` file instead; nothing is then read from the hub.
        eval_dataset_name: data set for evaluation, read when it is needed; None evaluates on the training examples.
        eval_split: its split.
        eval_data_path: read this file instead; without it, `data_path` is used for evaluation too.
        num_train_examples: number of examples; -1 uses all.
        num_eval_examples: the same for evaluation.
        difficulty_key: column with the difficulty, a number or text with one, such as "Level 5".
        min_difficulty: leave out training examples below this.
        max_difficulty: leave out training examples above this.
        system_prompt: the system message; "" for none.
        grading: other limits than those of `environment_tools.math_grading.MathGrader`: `seconds`, `max_chars`,
            `workers`, `memory`.

    Raises:
        ValueError: a missing or malformed file (the message names file and row), or invalid arguments.
    """
    grader = MathGrader(**(grading or {}))
    # Imports verifiers and datasets, which take seconds.
    from .environment_tools.math_environment import is_within, math_environment, number_in

    def keep(row: Row) -> bool:
        if min_difficulty is None and max_difficulty is None:
            return True
        return is_within(number_in(row, difficulty_key), min_difficulty, max_difficulty)

    evaluation = None
    if eval_data_path:
        evaluation = Source(path=eval_data_path)
    elif eval_dataset_name and not data_path:
        evaluation = Source(name=eval_dataset_name, split=eval_split)
    return math_environment(
        train=Source(data_path, dataset_name, dataset_subset, dataset_split),
        evaluation=evaluation,
        keep=keep,
        system_prompt=system_prompt,
        grader=grader,
        num_train_examples=num_train_examples,
        num_eval_examples=num_eval_examples,
        shuffle_seed=seed if dataset_shuffle else None,
    )
