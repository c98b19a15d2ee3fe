"""The environment: a long plan with tools in a warehouse, or the repair of a small repository."""

from typing import TYPE_CHECKING

from agentic.repositories import make_repairs, read_repair

from .environment_tools.rows import pick, read_splits
from .environment_tools.sandboxed import require_sandbox

if TYPE_CHECKING:
    from verifiers import StatefulToolEnv

TASKS = ("planning", "repair")
PLANNING_PROMPT = "Use the tools until the work is done."
REPAIR_PROMPT = (
    "A user reports a problem with a small Python repository. Find the cause with the tools, repair it with "
    "`write_file`, and finish with a reply without a tool call. Tests that you cannot see decide."
)


def load_environment(
    task: str = "planning",
    min_actions: int = 20,
    max_actions: int = 36,
    data_path: str | None = None,
    eval_data_path: str | None = None,
    dataset_name: str | None = None,
    dataset_subset: str | None = None,
    train_split: str = "train",
    eval_split: str = "test",
    num_train_examples: int = -1,
    num_eval_examples: int = -1,
    num_generated: int = 200,
    seed: int = 0,
    max_turns: int | None = None,
    timeout_seconds: float = 5.0,
    system_prompt: str | None = None,
) -> "StatefulToolEnv":
    """Make the environment.

    Args:
        task: "planning" in a generated warehouse, or "repair" of a repository.
        min_actions: no plan of a warehouse has fewer actions.
        max_actions: a plan with at most this many actions exists.
        data_path: for repair, a `.jsonl`, `.json` or `.parquet` file of repositories (see the README); without it
            they are generated.
        eval_data_path: the same for evaluation; without it, `data_path` is used for evaluation too.
        dataset_name: for repair, a data set of the hub with such rows.
        dataset_subset: its configuration.
        train_split: its split for training.
        eval_split: its split for evaluation.
        num_train_examples: number of examples; -1 uses all.
        num_eval_examples: the same for evaluation.
        num_generated: number of generated examples for training; an eighth of it for evaluation.
        seed: seed of the generated examples.
        max_turns: maximum number of replies; None for twice `max_actions` in planning and 24 in repair.
        timeout_seconds: for repair, time of each run of code.
        system_prompt: the system message; "" for none, None for that of the task.

    Raises:
        ValueError: a missing or malformed file, invalid arguments, or prime-rl-sandbox is not installed for repair.
        SandboxConfigError: for repair, this machine cannot isolate code.
    """
    if task not in TASKS:
        raise ValueError(f"task is {task!r}, not {' or '.join(TASKS)}")
    if num_generated < 1 or (max_turns is not None and max_turns < 1) or timeout_seconds <= 0:
        raise ValueError("num_generated, max_turns and timeout_seconds must be positive")
    num_eval = max(1, num_generated // 8)
    if task == "planning":
        from agentic.planning import PlanningEnv, make_tasks

        if data_path or dataset_name:
            raise ValueError("planning has generated warehouses only; data_path and dataset_name are for repair")
        if not 1 <= min_actions <= max_actions:
            raise ValueError(f"need 1 <= min_actions <= max_actions, not {min_actions} and {max_actions}")
        plans = make_tasks(seed, "train", num_generated, min_actions, max_actions)
        other_plans = make_tasks(seed, "eval", num_eval, min_actions, max_actions)
        return PlanningEnv(
            pick(plans, num_train_examples),
            pick(other_plans, num_eval_examples),
            PLANNING_PROMPT if system_prompt is None else system_prompt,
            max_turns or 2 * max_actions,
        )
    require_sandbox("agentic with task = repair")
    from agentic.repair import RepairEnv

    if data_path or dataset_name:
        train, evaluation = read_splits(
            read_repair, data_path, eval_data_path, dataset_name, dataset_subset, train_split, eval_split
        )
    else:
        train = list(make_repairs(seed, "train", num_generated))
        evaluation = list(make_repairs(seed, "eval", num_eval))
    return RepairEnv(
        pick(train, num_train_examples),
        pick(evaluation, num_eval_examples),
        REPAIR_PROMPT if system_prompt is None else system_prompt,
        max_turns or 24,
        timeout_seconds,
    )
