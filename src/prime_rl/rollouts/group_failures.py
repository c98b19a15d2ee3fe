"""How a group fails: the exceptions, their translation from foreign code, and the checks of rewards and metrics."""

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import aiohttp
from pydantic import ValidationError

from prime_rl.core.errors import ConfigError, summarize_exception
from prime_rl.core.types import Rollout
from prime_rl.rollouts.clients.inference_client import BUSY_STATUSES, InferenceError, InferenceServerLost

MAX_REWARD = 1e6
"""Advantages are float32. Above this they no longer distinguish rewards that differ by 0.1."""

MAX_METRIC = 2.0**53
"""Above this float64 does not represent all integers, so the mean of a batch is meaningless."""

_INFRASTRUCTURE = {"InfraError", "SandboxError", "TunnelError", "TransportError", "APIConnectionError"}
"""Base classes of verifiers, httpx and openai, by name because not all of them need to be installed."""


class EnvironmentFailed(Exception):
    """An environment could not finish a group; the group is dropped as `error/<env>`.

    Attributes:
        is_infrastructure: a retry may succeed.
    """

    def __init__(self, message: str, is_infrastructure: bool = False) -> None:
        super().__init__(message)
        self.is_infrastructure = is_infrastructure


class RolloutTimedOut(EnvironmentFailed):
    """A rollout, or its scoring, reached the time limit of its environment."""


class SampleTooLong(Exception):
    """A prompt does not fit into `seq_len`; its group is dropped as `overlong`."""


class WorkerUnusable(SystemExit):
    """The worker cannot run groups any more: it exits, and its groups are retried in another worker."""


class UnsupportedEnvironment(Exception):
    """An environment uses an unsupported feature and would do so in every group: the run ends."""


_EXPECTED = (EnvironmentFailed, SampleTooLong, UnsupportedEnvironment, InferenceServerLost, InferenceError)


class contain_failures:  # a class, because a generator costs more at each reward function
    """Raise EnvironmentFailed for every exception of the foreign code in the block, including SystemExit.

    Programs that a model writes call `sys.exit()`, and the other groups of the worker continue. Only WorkerUnusable
    and a cancellation of the task pass.
    """

    __slots__ = ("_cancellations", "_task")

    def __enter__(self) -> None:
        self._task = asyncio.current_task()
        self._cancellations = self._task.cancelling() if self._task is not None else 0

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None or isinstance(error, (*_EXPECTED, WorkerUnusable)):
            return
        if not isinstance(error, asyncio.CancelledError):
            raise environment_failure(error) from error
        if self._task is None or self._task.cancelling() > self._cancellations:
            return
        # The environment raised it. asyncio would treat the rollout as cancelled and never answer.
        raise EnvironmentFailed(f"{summarize_exception(error, full=True)}, although nothing was cancelled") from error


@contextmanager
def config_errors(problem: str, hint: str = "") -> Iterator[None]:
    """Raise ConfigError for every exception of the foreign code in the block: the problem, the exception, the hint."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ConfigError):
            raise
        if isinstance(error.__cause__, ConfigError):  # verifiers wraps what `load_environment` raises
            raise ConfigError(f"{problem}: {error.__cause__}") from error
        reason = summarize_exception(error, full=True)
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise ConfigError(f"{problem}: {reason}{hint}") from error


def environment_failure(error: BaseException) -> EnvironmentFailed:
    """Return the failure for an exception of an environment."""
    cause = next(leaf_exceptions(error))
    return EnvironmentFailed(summarize_exception(cause, full=True), is_infrastructure(cause))


def is_infrastructure(error: BaseException | None) -> bool:
    """Return whether a retry may succeed: a lost connection or sandbox, an overloaded server."""
    while error is not None:
        if isinstance(error, ConnectionError | TimeoutError | aiohttp.ClientConnectionError):
            return True
        if _INFRASTRUCTURE & {kind.__name__ for kind in type(error).__mro__}:
            return True
        status = getattr(error, "status_code", getattr(error, "status", None))
        if isinstance(status, int) and (500 <= status < 600 or status in BUSY_STATUSES):
            return True
        error = error.__cause__
    return False


def leaf_exceptions(error: BaseException) -> Iterator[BaseException]:
    """Iterate over the exceptions of nested exception groups."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaf_exceptions(inner)
    else:
        yield error


def as_number(name: str, value: Any) -> float:
    """Return the value of a reward function; EnvironmentFailed, with its `name`, if it is not a finite number."""
    if type(value) is float and math.isfinite(value):
        return value
    if value is None or isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise EnvironmentFailed(f"{name} is {value!r:.80}, not a number")
    number = float(value)
    if not math.isfinite(number):
        raise EnvironmentFailed(f"{name} is {number}, not a finite number")
    return number


def check_scores(rollout: Rollout) -> None:
    """Raise EnvironmentFailed if the reward or a metric of a rollout is not a finite number, or implausibly large."""
    scores = [("the reward", rollout.reward, MAX_REWARD)]
    scores += [(f"metric {name}", value, MAX_METRIC) for name, value in rollout.metrics.items()]
    for credit in rollout.credits:
        of_part = f"of {credit.name or 'the rollout'}"
        scores += [(f"the reward {of_part}", credit.reward, MAX_REWARD)]
        scores += [(f"the advantage {of_part}", credit.advantage or 0.0, MAX_REWARD)]
    for name, value, maximum in scores:
        if abs(as_number(name, value)) > maximum:
            raise EnvironmentFailed(f"{name} is {value:g}, above the limit of {maximum:g}")
