"""The environment: a programming problem, and the share of its tests that the program in the reply passes."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from code_tests.problems import STYLES, Problem, make_problems, read_problem
from code_tests.scoring import Outcome, grade

from .environment_tools.prompts import make_dataset
from .environment_tools.rows import pick, read_splits
from .environment_tools.sandboxed import require_sandbox

if TYPE_CHECKING:
    from verifiers import SingleTurnEnv

    from prime_rl_sandbox.shared_sandbox import SharedSandbox

SYSTEM_PROMPT = "Solve the problem in Python. End with the complete code in one block between ```python and ```."
_OUTCOME = "code_tests_outcome"


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
    style: str = "sentences",
    seed: int = 0,
    reward: str = "fraction",
    timeout_ms: float = 5000,
    max_tests: int = 20,
    system_prompt: str = SYSTEM_PROMPT,
) -> "SingleTurnEnv":
    """Make the environment. Without a file or data set it generates small problems.

    The last fenced block after the reasoning is run against the tests, in a sandbox. `compiled`, `passed_tests`,
    `timeouts` and `sandbox_ms` are metrics with weight 0.

    Args:
        data_path: a `.jsonl`, `.json` or `.parquet` file with problems (see the README).
        eval_data_path: the same for evaluation; without it, `data_path` is used for evaluation too.
        dataset_name: a data set of the hub with such rows.
        dataset_subset: its configuration.
        train_split: its split for training.
        eval_split: its split for evaluation.
        num_train_examples: number of examples; -1 uses all.
        num_eval_examples: the same for evaluation.
        num_generated: number of generated problems for training; an eighth of it for evaluation.
        style: wording of the generated problems: "sentences", or "notation" for models of under a million parameters.
        seed: seed of the generated problems.
        reward: "fraction" of the tests passed, or "all": 1 if all pass, else 0.
        timeout_ms: time of each test.
        max_tests: number of tests of a problem that are run, the first ones.
        system_prompt: the system message; "" for none.

    Raises:
        ValueError: a missing or malformed file, invalid arguments, or prime-rl-sandbox is not installed.
        SandboxConfigError: this machine cannot isolate code.
    """
    import verifiers as vf

    if reward not in ("fraction", "all"):
        raise ValueError(f"reward is {reward!r}, not fraction or all")
    if style not in STYLES:
        raise ValueError(f"style is {style!r}, not {' or '.join(STYLES)}")
    if timeout_ms <= 0 or max_tests < 1 or num_generated < 1:
        raise ValueError("timeout_ms, max_tests and num_generated must be positive")
    require_sandbox("code_tests")
    from prime_rl_sandbox.shared_sandbox import SharedSandbox

    if data_path or dataset_name:
        train, evaluation = read_splits(
            read_problem, data_path, eval_data_path, dataset_name, dataset_subset, train_split, eval_split
        )
    else:
        train = list(make_problems(seed, "train", num_generated, style))
        evaluation = list(make_problems(seed, "eval", max(1, num_generated // 8), style))
    train, evaluation = pick(train, num_train_examples), pick(evaluation, num_eval_examples)
    # The tests stay here: rows, which have only their hash, are written to samples/, which people publish.
    problems = [*train, *evaluation]
    sandbox = SharedSandbox()
    sandbox.check()
    scores = _make_scores(problems, sandbox, reward, timeout_ms, max_tests)
    env = vf.SingleTurnEnv(
        dataset=make_dataset(((problem.question, "", problem) for problem in train), system_prompt),
        eval_dataset=make_dataset(
            ((problem.question, "", problem) for problem in evaluation), system_prompt, len(train)
        ),
        rubric=vf.Rubric(funcs=scores, weights=[1.0] + [0.0] * (len(scores) - 1)),
    )
    env.sandbox = sandbox
    return env


def _make_scores(
    problems: Sequence[Problem], sandbox: "SharedSandbox", reward: str, timeout_ms: float, max_tests: int
) -> list[Any]:
    """Return the reward function and the metrics; the first that is called runs the tests."""
    running: dict[int, asyncio.Future[Outcome]] = {}

    async def grade_reply(reply: str, problem: Problem) -> Outcome:
        return await grade(await sandbox.open(), reply, problem, timeout_ms, max_tests)

    async def outcome_of(state: Any, completion: Any, info: Any, parser: Any) -> Outcome:
        if _OUTCOME in state:
            return Outcome(**state[_OUTCOME])
        key = id(state)
        if key not in running:
            reply = parser.parse_answer(completion) or ""
            running[key] = asyncio.ensure_future(grade_reply(reply, problems[info["number"]]))
        try:
            outcome = await running[key]
        finally:
            running.pop(key, None)
        state[_OUTCOME] = {name: getattr(outcome, name) for name in outcome.__slots__}
        return outcome

    async def tests_passed(state: Any, completion: Any, info: Any, parser: Any) -> float:
        """The share of the tests passed, or 1 if all are."""
        outcome = await outcome_of(state, completion, info, parser)
        if reward == "all":
            return float(outcome.num_passed == outcome.num_tests)
        return outcome.num_passed / outcome.num_tests

    async def compiled(state: Any, completion: Any, info: Any, parser: Any) -> float:
        """1 if the reply has code that Python can read."""
        return float((await outcome_of(state, completion, info, parser)).compiled)

    async def passed_tests(state: Any, completion: Any, info: Any, parser: Any) -> float:
        """Number of tests passed."""
        return float((await outcome_of(state, completion, info, parser)).num_passed)

    async def timeouts(state: Any, completion: Any, info: Any, parser: Any) -> float:
        """Number of tests that took too long."""
        return float((await outcome_of(state, completion, info, parser)).num_timeouts)

    async def sandbox_ms(state: Any, completion: Any, info: Any, parser: Any) -> float:
        """Milliseconds of all tests in the sandbox."""
        return (await outcome_of(state, completion, info, parser)).milliseconds

    return [tests_passed, compiled, passed_tests, timeouts, sandbox_ms]
