"""The environment: mathematical rows of a data set of the hub or of a local file, filtered by solve rate."""

from typing import TYPE_CHECKING, Any

from .environment_tools.math_grading import MathGrader
from .environment_tools.rows import Row, Source

if TYPE_CHECKING:
    from verifiers import SingleTurnEnv

DATASET = "PrimeIntellect/INTELLECT-2-only-math"
SYSTEM_PROMPT = "Think it through, then give the final answer, and nothing else, in \\boxed{}."


def load_environment(
    dataset_name: str = DATASET,
    dataset_subset: str | None = None,
    dataset_split: str = "train",
    dataset_shuffle: bool = False,
    seed: int = 0,
    data_path: str | None = None,
    eval_data_path: str | None = None,
    num_train_examples: int = -1,
    num_eval_examples: int = -1,
    solve_rate_field: str | None = None,
    min_solve_rate: float | None = None,
    max_solve_rate: float | None = None,
    system_prompt: str = SYSTEM_PROMPT,
    grading: dict[str, Any] | None = None,
) -> "SingleTurnEnv":
    r"""Make the environment: one question, one answer in `\boxed{}`, compared with the right one by math-verify.

    Args:
        dataset_name: data set of the hub. `PrimeIntellect/INTELLECT-2-RL-Dataset` works too: rows whose column
            `task_type` is not about mathematics are excluded.
        dataset_subset: its configuration.
        dataset_split: its split.
        dataset_shuffle: shuffle the examples before `num_train_examples` are selected.
        seed: seed of the shuffle.
        data_path: read this `.jsonl`, `.json` or `.parquet` file instead.
        eval_data_path: a file with examples for evaluation; without it the training examples are used.
        num_train_examples: number of examples; -1 uses all.
        num_eval_examples: the same for evaluation; only with `eval_data_path`.
        solve_rate_field: column with the share of attempts in which some model solved the problem, such as
            `solve_rate_qwen_r1_distill_7b`. Needed for the two bounds.
        min_solve_rate: leave out what was solved less often than this.
        max_solve_rate: leave out what was solved more often than this.
        system_prompt: the system message; "" for none.
        grading: other limits than those of `environment_tools.math_grading.MathGrader`: `seconds`, `max_chars`,
            `workers`, `memory`.

    Raises:
        ValueError: a missing or malformed file (the message names file and row), or invalid arguments.
    """
    if solve_rate_field is None and (min_solve_rate is not None or max_solve_rate is not None):
        raise ValueError("min_solve_rate and max_solve_rate need solve_rate_field, the column to look at")
    grader = MathGrader(**(grading or {}))
    # Imports verifiers and datasets, which take seconds.
    from .environment_tools.math_environment import is_within, math_environment, number_in

    def keep(row: Row) -> bool:
        if "math" not in str(row.get("task_type") or "math"):
            return False
        if solve_rate_field is None:
            return True
        return is_within(number_in(row, solve_rate_field), min_solve_rate, max_solve_rate)

    return math_environment(
        train=Source(data_path, dataset_name, dataset_subset, dataset_split),
        evaluation=Source(path=eval_data_path) if eval_data_path else None,
        keep=keep,
        system_prompt=system_prompt,
        grader=grader,
        num_train_examples=num_train_examples,
        num_eval_examples=num_eval_examples,
        shuffle_seed=seed if dataset_shuffle else None,
    )
