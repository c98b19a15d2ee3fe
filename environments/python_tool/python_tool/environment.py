"""The environment: a question, the tool `python`, and a reward for the right number."""

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from python_tool.questions import Question, make_questions, read_question

from .environment_tools.numbers import number_of, show_number
from .environment_tools.prompts import ERROR, describe_error, final_answer, make_dataset, tool_results
from .environment_tools.rows import pick, read_splits
from .environment_tools.sandboxed import require_sandbox

if TYPE_CHECKING:
    from prime_rl_sandbox.python_env import PythonEnv

SYSTEM_PROMPT = (
    "Answer the question. Use the tool `python` to compute. When you know the result, reply with the number between "
    "<answer> and </answer>."
)


def load_environment(
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
    tolerance: float = 0.0,
    max_turns: int = 6,
    timeout_seconds: float = 5.0,
    require_tool: bool = False,
    system_prompt: str = SYSTEM_PROMPT,
) -> "PythonEnv":
    """Make the environment. Without a file or data set it generates questions.

    The reward is 1 if the last message has the right number in <answer>. `has_answer` and `tool_errors` (calls that
    raised or timed out) are metrics with weight 0.

    Args:
        data_path: a `.jsonl`, `.json` or `.parquet` file with `question` and `answer`, a number.
        eval_data_path: the same for evaluation; without it, `data_path` is used for evaluation too.
        dataset_name: a data set of the hub with such rows.
        dataset_subset: its configuration.
        train_split: its split for training.
        eval_split: its split for evaluation.
        num_train_examples: number of examples; -1 uses all.
        num_eval_examples: the same for evaluation.
        num_generated: number of generated questions for training; an eighth of it for evaluation.
        seed: seed of the generated questions.
        tolerance: largest relative difference of a right number.
        max_turns: maximum number of replies.
        timeout_seconds: time of each call.
        require_tool: reward 0 without a call that succeeded.
        system_prompt: the system message; "" for none.

    Raises:
        ValueError: a missing or malformed file, invalid arguments, or prime-rl-sandbox is not installed.
        SandboxConfigError: this machine cannot isolate code.
    """
    import verifiers as vf

    if tolerance < 0 or max_turns < 1 or timeout_seconds <= 0 or num_generated < 1:
        raise ValueError("max_turns, timeout_seconds and num_generated must be positive, tolerance at least 0")
    require_sandbox("python_tool")
    from prime_rl_sandbox.python_env import PythonEnv

    if data_path or dataset_name:
        train, evaluation = read_splits(
            read_question, data_path, eval_data_path, dataset_name, dataset_subset, train_split, eval_split
        )
    else:
        train = list(islice(make_questions(seed, "train"), num_generated))
        evaluation = list(islice(make_questions(seed, "eval"), max(1, num_generated // 8)))
    train, evaluation = pick(train, num_train_examples), pick(evaluation, num_eval_examples)
    scores = _make_scores([*train, *evaluation], tolerance, require_tool)
    return PythonEnv(
        timeout_seconds=timeout_seconds,
        max_turns=max_turns,
        error_formatter=describe_error,
        dataset=make_dataset(((q.text, show_number(q.answer)) for q in train), system_prompt),
        eval_dataset=make_dataset(((q.text, show_number(q.answer)) for q in evaluation), system_prompt, len(train)),
        rubric=vf.Rubric(funcs=scores, weights=[1.0, 0.0, 0.0]),
    )


def tool_errors(completion: Any) -> float:
    """Count the calls that raised, timed out, or named another tool."""
    return float(sum(map(_failed, tool_results(completion))))


def _make_scores(questions: Sequence[Question], tolerance: float, require_tool: bool) -> list[Any]:
    def right_number(completion: Any, info: Any) -> float:
        """1 if the final answer is right."""
        found = number_of(final_answer(completion) or "")
        right = questions[info["number"]].answer
        if found is None or (require_tool and all(map(_failed, tool_results(completion)))):
            return 0.0
        return float(abs(found - right) <= abs(right) * tolerance)

    def has_answer(completion: Any) -> float:
        """1 if there is a final answer, right or wrong."""
        return float(number_of(final_answer(completion) or "") is not None)

    return [right_number, has_answer, tool_errors]


def _failed(result: str) -> bool:
    return result.startswith(ERROR) or f"\n{ERROR}" in result or "Traceback (most recent call last)" in result
