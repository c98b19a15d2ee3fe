"""Runs the rollouts of one group: limits their time, retries infrastructure failures, and counts the tokens.

First, how foreign code fails: the exceptions of a group, their translation, checks of arguments, rewards and metrics.
"""

import asyncio
import difflib
import inspect
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

from pydantic import ValidationError

from prime_rl.configs.environment import EnvConfig
from prime_rl.core.errors import ConfigError, summarize_exception, translate_error
from prime_rl.core.retries import Retries, growing_pauses
from prime_rl.core.types import Rollout
from prime_rl.rollouts.clients.inference_client import InferenceError, InferenceServerLost
from prime_rl.rollouts.clients.openai_chat_client import ChatServer
from prime_rl.rollouts.rendering.messages import Generation, Sampler
from prime_rl.rollouts.separate.crash_record import WorkerUnusable
from prime_rl.rollouts.separate.values import GATEWAY_ENDED, NotANumber, finite_number, is_infrastructure
from prime_rl_sandbox.execution import SandboxConfigError

T = TypeVar("T")

MAX_REWARD = 1e6
"""Advantages are float32. Above this they no longer distinguish rewards that differ by 0.1."""

MAX_METRIC = 2.0**53
"""Above this float64 does not represent all integers, so the mean of a batch is meaningless."""

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


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
        for cause in (error, error.__cause__):  # verifiers wraps what `load_environment` raises
            if isinstance(cause, ConfigError | SandboxConfigError):
                raise ConfigError(f"{problem}: {cause}") from error
        reason = summarize_exception(error, full=True)
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise ConfigError(f"{problem}: {reason}{hint}") from error


def check_arguments(load_environment: Callable[..., Any], args: Mapping[str, Any], env_id: str) -> None:
    """Raise ConfigError if `load_environment` does not take the arguments `env.args`, with the closest name."""
    parameters = inspect.signature(load_environment).parameters.values()
    if not any(each.kind is each.VAR_KEYWORD for each in parameters):
        names = [each.name for each in parameters]
        if unknown := [name for name in args if name not in names]:
            similar = difflib.get_close_matches(unknown[0], names, n=1)
            raise ConfigError(
                f"env.args.{unknown[0]}: environment {env_id!r} has no such argument"
                + (f"; did you mean {similar[0]}? It has " if similar else "; it has ")
                + (", ".join(names) or "none")
            )
    needed = [each.name for each in parameters if each.default is each.empty and each.kind in _NAMED]
    if missing := [name for name in needed if name not in args]:
        raise ConfigError(f"env.args.{missing[0]} is not set, and environment {env_id!r} needs it")


def environment_failure(error: BaseException) -> EnvironmentFailed:
    """Return the failure for an exception of an environment."""
    cause = next(leaf_exceptions(error))
    return EnvironmentFailed(summarize_exception(cause, full=True), is_infrastructure(cause))


ZERO_HINT = '(env.reward_errors = "zero" counts it as 0, as verifiers does)'


def reward_failure(name: str, error: EnvironmentFailed) -> EnvironmentFailed:
    """Return the failure of the reward function `name` for what it raised, or for the value that it returned."""
    message = f"{name} raised {error}" if error.__cause__ is not None else str(error)
    return EnvironmentFailed(message, error.is_infrastructure)


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
    with translate_error(NotANumber, lambda error: EnvironmentFailed(str(error))):
        return finite_number(name, value)


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


RETRY_PAUSE_SECONDS = 0.5
"""Pause before the first retry of a rollout; each further pause is four times as long."""
_MAX_GATEWAY_LOSSES = 10
"""How often a rollout that was lost with its gateway runs again besides `env.num_retries`: nothing in it has failed."""


class GroupAccount:
    """Counts the tokens that one group samples, and the seconds that its rollouts take.

    Attributes:
        sampled: all tokens so far.
        discarded: rollouts and tokens by reason that the running group has discarded.
        seconds: by activity (`protocol.ACTIVITIES`), over the rollouts that finished.
        on_stuck: called when a cancelled rollout of the group does not end.
        on_scoring: called when all rollouts of the group have ended, and its scoring starts.
    """

    def __init__(
        self,
        on_tokens: Callable[[int], None] = lambda count: None,
        on_stuck: Callable[[], None] = lambda: None,
        on_scoring: Callable[[], None] = lambda: None,
    ) -> None:
        """Start at 0; `on_tokens` is called with the tokens of each completion."""
        self.on_stuck, self.on_scoring = on_stuck, on_scoring
        self.sampled = 0
        self.discarded: dict[str, tuple[int, int]] = {}
        self.seconds: dict[str, float] = {}
        self._on_tokens = on_tokens

    def count(self, tokens: int) -> None:
        """Count the tokens of a completion."""
        self.sampled += tokens
        self._on_tokens(tokens)

    def add_seconds(self, activity: str, seconds: float) -> None:
        """Add the seconds of one rollout, or of the scoring of the group."""
        self.seconds[activity] = self.seconds.get(activity, 0.0) + seconds

    def discard(self, reason: str, rollouts: int, tokens: int) -> None:
        """Count rollouts that the group continues without."""
        before = self.discarded.get(reason, (0, 0))
        self.discarded[reason] = before[0] + rollouts, before[1] + tokens

    def close(self, rollouts: Sequence[Rollout]) -> dict[str, tuple[int, int]]:
        """Return the discarded work of a group that ended with these rollouts."""
        unused = self._remaining - sum(rollout.sampled_tokens for rollout in rollouts)
        return self.discarded | ({"unused": (0, unused)} if unused else {})

    def close_failed(self, reason: str, rollouts: int) -> dict[str, tuple[int, int]]:
        """Return the discarded work of a group that ended without its rollouts."""
        self.discard(reason, rollouts - self.discarded.get("failed", (0, 0))[0], self._remaining)
        return self.discarded

    @property
    def _remaining(self) -> int:
        return self.sampled - sum(tokens for _, tokens in self.discarded.values())


class RolloutClock:
    """Limits the time that an environment takes for one rollout (`async with`), without the time of sampling.

    Sampling time depends on the load of the server, and every request has its own limit. RolloutTimedOut ends the block
    at the limit; `on_stuck` is called if the block has not ended `cleanup_seconds` seconds after that.

    Attributes:
        expired: the limit was reached.
        running_seconds: time in the block without the pauses.
        paused_seconds: time of the pauses; those that overlap count once.
    """

    def __init__(
        self,
        timeout_seconds: float | None,
        cleanup_seconds: float,
        on_stuck: Callable[[], None],
        what: str = "a rollout",
        key: str = "timeout_seconds",
    ) -> None:
        """Limit `what` to `timeout_seconds`, which `env.<key>` sets; None: unlimited."""
        self.expired = False
        self.running_seconds = self.paused_seconds = 0.0
        self._timeout_seconds = self._remaining = timeout_seconds
        self._what, self._key = what, key
        self._cleanup_seconds = cleanup_seconds
        self._on_stuck = on_stuck
        self._scope = None if timeout_seconds is None else asyncio.timeout(None)
        self._pauses = 0
        self._paused_at = 0.0
        self._resumed_at: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        if self._scope is not None:
            await self._scope.__aenter__()
        self._resume()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()
        if self._scope is None:
            return
        self._remaining = None
        try:
            await self._scope.__aexit__(kind, error, traceback)
        except TimeoutError:
            limit = f"{self._timeout_seconds:g} s (env.{self._key})"
            raise RolloutTimedOut(f"{self._what} took longer than {limit}") from None
        finally:
            self._scope = None  # it refers to the task, whose result refers to this clock

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock inside the block. Blocks may overlap."""
        self._pauses += 1
        if self._pauses == 1:
            self._paused_at = asyncio.get_running_loop().time()
            if not self.expired:
                self._stop()
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses:
                self.paused_seconds += asyncio.get_running_loop().time() - self._paused_at
                if not self.expired:
                    self._resume()

    def _resume(self) -> None:
        loop = asyncio.get_running_loop()
        self._resumed_at = loop.time()
        if self._remaining is not None:
            self._timer = loop.call_later(max(0.0, self._remaining), self._expire)

    def _stop(self) -> None:
        elapsed = 0.0 if self._resumed_at is None else asyncio.get_running_loop().time() - self._resumed_at
        self.running_seconds += elapsed
        self._resumed_at = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            if self._remaining is not None:
                self._remaining -= elapsed

    def _expire(self) -> None:
        loop = asyncio.get_running_loop()
        self.expired = True
        assert self._scope is not None
        self._scope.reschedule(loop.time())
        self._timer = loop.call_later(self._cleanup_seconds, self._on_stuck)


class Attempt:
    """One attempt at one rollout, and its `Sampler`, which counts the tokens.

    Attributes:
        index: of the rollout in its group.
        number: of earlier attempts.
        seed: derived from the seed of the group.
        clock: of the environment's time, which stops while the attempt samples; the caller enters it.
        sampled: tokens so far.
    """

    def __init__(self, group: "GroupAttempts", index: int, number: int) -> None:
        self.index = index
        self.number = number
        self.seed = None if group.seed is None else [*group.seed, index, *([number] if number else [])]
        self.clock = group.clock("a rollout", group.timeout_seconds, "timeout_seconds")
        self.sampled = 0
        self._server = group.server
        self._account = group.account

    @property
    def server(self) -> Sampler | ChatServer:
        """What the rollout calls: this attempt, or the group's `ChatServer`, whose tokens are unknown."""
        return self._server if isinstance(self._server, ChatServer) else self

    async def generate(self, prompt_ids: list[int], sampling: Mapping[str, Any]) -> Generation:
        """Sample one completion with the server of the group."""
        assert not isinstance(self._server, ChatServer), "its rollouts call it directly"
        with self.clock.paused():
            generation = await self._server.generate(prompt_ids, sampling)
        self.sampled += len(generation.token_ids)
        self._account.count(len(generation.token_ids))
        return generation


class GroupAttempts:
    """Runs the rollouts of one group.

    Attributes:
        server: samples all of them.
        seed: of the group; None: unseeded.
        account: counts the tokens.
        timeout_seconds: limit of the environment's time of one rollout.
        min_rollouts: minimum number of successful rollouts; evaluations require all.
    """

    def __init__(
        self,
        config: EnvConfig,
        example: int,
        count: int,
        server: Sampler | ChatServer,
        seed: Sequence[int] | None,
        account: GroupAccount,
        is_train: bool,
    ) -> None:
        self.server = server
        self.seed = seed
        self.account = account
        allowed = config.min_rollouts if is_train else None
        self.min_rollouts = count if allowed is None else min(allowed, count)
        self.timeout_seconds = config.timeout_seconds
        self._config = config
        self._example = example
        self._count = count

    async def run(self, attempt: Callable[[Attempt], Awaitable[T]]) -> list[T]:
        """Run all rollouts; `attempt` makes one attempt at one rollout.

        Returns:
            The results of the rollouts that survived, at least `min_rollouts`.

        Raises:
            EnvironmentFailed: too many rollouts failed; the others are cancelled. The message is the first failure's.
            SampleTooLong, InferenceServerLost, InferenceError: raised by an attempt.
        """
        failures: list[EnvironmentFailed] = []

        async def run_one(index: int) -> list[T]:
            retries, losses = self._retries(), 0
            while True:
                this = Attempt(self, index, self._config.num_retries - retries.left + losses)
                try:
                    result = await attempt(this)
                    self.account.add_seconds("environment", this.clock.running_seconds)
                    self.account.add_seconds("engine", this.clock.paused_seconds)
                    return [result]
                except EnvironmentFailed as failure:
                    is_lost = GATEWAY_ENDED in str(failure) and losses < _MAX_GATEWAY_LOSSES
                    retry = failure.is_infrastructure and (is_lost or retries.left > 0)
                    self.account.discard("retried" if retry else "failed", 1, this.sampled)
                    if not retry:
                        failures.append(failure)
                        self.check(failures, self._count)
                        return []
                if is_lost:
                    losses += 1
                    await asyncio.sleep(RETRY_PAUSE_SECONDS)
                else:
                    await retries.pause()

        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(run_one(index)) for index in range(self._count)]
        except BaseExceptionGroup as errors:
            explaining = (InferenceServerLost, InferenceError, UnsupportedEnvironment)  # explain all other errors
            leaves = list(leaf_exceptions(errors))
            raise next((error for error in leaves if isinstance(error, explaining)), leaves[0]) from None
        return [result for task in running for result in task.result()]

    async def repeat(self, scoring: Callable[[], Awaitable[T]]) -> T:
        """Await `scoring()` within its time limit; retry infrastructure failures."""
        retries = self._retries()
        self.account.on_scoring()
        while True:
            try:
                async with self.clock("the scoring", *self._config.scoring_limit) as clock:
                    result = await scoring()
                self.account.add_seconds("scoring", clock.running_seconds)
                return result
            except EnvironmentFailed as failure:
                if not failure.is_infrastructure or not await retries.pause():
                    raise

    def _retries(self) -> Retries:
        return Retries(growing_pauses(RETRY_PAUSE_SECONDS, self._config.num_retries))

    def clock(self, what: str, timeout_seconds: float | None, key: str) -> RolloutClock:
        """Return a new clock; arguments as those of `RolloutClock`."""
        what = f"{what} of example {self._example}"
        return RolloutClock(timeout_seconds, self._config.cleanup_seconds, self.account.on_stuck, what, key)

    def check(self, failures: Sequence[EnvironmentFailed], count: int) -> None:
        """Raise the first of `failures` if too few of `count` rollouts are left."""
        if failures and count - len(failures) < self.min_rollouts:
            raise failures[0]
