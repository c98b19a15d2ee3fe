"""Runs the examples of one environment with a bounded number of rollouts in flight.

Every example ends in exactly one row, with its rollouts or with a failure. An exception ends the whole evaluation: no
server is left, a server refuses everything, or the workers do not start.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from prime_rl.core.errors import RunError
from prime_rl.evaluation.eval_plan import EvalTask
from prime_rl.evaluation.eval_results import EvalFailureKind, ExampleFailure, ExampleRow, RolloutRow
from prime_rl.rollouts.clients.inference_client import InferenceError, InferenceServerLost, sampling_parameters
from prime_rl.rollouts.group_failures import EnvironmentFailed, SampleTooLong
from prime_rl.rollouts.workers.environment_pool import EnvironmentPool

_MAX_REFUSALS = 8
"""After so many refused examples without a finished one, the server is at fault and not the examples."""


class Servers(Protocol):
    """The inference servers of an evaluation."""

    def acquire(self, rollouts: int) -> AbstractAsyncContextManager[str]:
        """Reserve a server for so many rollouts and return its address; raise RunError if none becomes available.

        InferenceServerLost that leaves the block marks the server as lost.
        """


async def run_examples(
    task: EvalTask,
    pool: EnvironmentPool,
    examples: Sequence[int],
    seq_len: int,
    max_concurrent: int | None,
    servers: Servers,
    on_row: Callable[[ExampleRow], None],
) -> None:
    """Run examples of `pool` and pass each row to `on_row`; raise RunError if the evaluation cannot continue.

    At most `max_concurrent` rollouts are in flight, but at least one example; None is unlimited.
    """
    remaining = iter(examples)
    refusals = 0

    async def run_lane() -> None:
        nonlocal refusals
        for example in remaining:
            row = await _run_example(task, pool, example, seq_len, servers)
            refused = row.failure is not None and row.failure.kind == "refused"
            refusals = refusals + 1 if refused else 0 if row.rollouts else refusals
            on_row(row)
            if refusals >= _MAX_REFUSALS and row.failure is not None:
                raise RunError(f"{refusals} requests in a row were refused; the last: {row.failure.message}")

    lanes = len(examples) if max_concurrent is None else max(1, max_concurrent // task.rollouts)
    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(lanes, len(examples))):
                tasks.create_task(run_lane())
    except ExceptionGroup as group:
        raise first_exception(group) from group


_FAILURE_KINDS: dict[type[Exception], EvalFailureKind] = {
    EnvironmentFailed: "environment",
    SampleTooLong: "overlong",
    InferenceError: "refused",
}


async def _run_example(
    task: EvalTask, pool: EnvironmentPool, example: int, seq_len: int, servers: Servers
) -> ExampleRow:
    seed = None if task.sampling.seed is None else (task.sampling.seed, example)
    sampling = sampling_parameters(task.sampling)
    while True:
        try:
            async with servers.acquire(task.rollouts) as url:
                rollouts = await pool.run_group(example, task.rollouts, url, sampling, seq_len, seed)
            columns = pool.columns[example] if pool.columns else {}
            return ExampleRow(example, [RolloutRow.of(rollout) for rollout in rollouts], columns=columns)
        except InferenceServerLost:
            continue  # `acquire` limits how long this repeats
        except (EnvironmentFailed, SampleTooLong, InferenceError) as error:
            return ExampleRow(example, failure=ExampleFailure(_FAILURE_KINDS[type(error)], str(error)))


def first_exception(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first exception of a group that may contain other groups."""
    error = group.exceptions[0]
    return first_exception(error) if isinstance(error, BaseExceptionGroup) else error
