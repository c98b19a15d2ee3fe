"""Runs the rollouts of one group: each with a time limit, retried after an infrastructure failure."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from prime_rl.configs.shared.blocks import EnvConfig
from prime_rl.rollouts.clients.inference_client import InferenceClient, InferenceError, InferenceServerLost
from prime_rl.rollouts.clients.openai_chat_client import ChatServer
from prime_rl.rollouts.group_failures import (
    EnvironmentFailed,
    RolloutTimedOut,
    UnsupportedEnvironment,
    leaf_exceptions,
)
from prime_rl.rollouts.replies import Generation
from prime_rl.rollouts.token_accounting import GroupAccount

T = TypeVar("T")

RETRY_PAUSE_SECONDS = 0.5
"""Pause before the first retry of a rollout; each further pause is four times as long."""


class RolloutClock:
    """Limits the time that an environment takes for one rollout (`async with`), without the time of sampling.

    Sampling time depends on the load of the server, and every request has its own limit. RolloutTimedOut ends the block
    at the limit; `on_stuck` is called if the block has not ended `cleanup_s` seconds after that.

    Attributes:
        expired: the limit was reached.
        running_seconds: time in the block without the pauses.
        paused_seconds: time of the pauses; those that overlap count once.
    """

    def __init__(
        self, timeout_s: float | None, cleanup_s: float, on_stuck: Callable[[], None], what: str = "a rollout"
    ) -> None:
        """Limit `what` to `timeout_s`; None: unlimited."""
        self.expired = False
        self.running_seconds = self.paused_seconds = 0.0
        self._timeout_s = self._remaining = timeout_s
        self._what = what
        self._cleanup_s = cleanup_s
        self._on_stuck = on_stuck
        self._scope = None if timeout_s is None else asyncio.timeout(None)
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
            limit = f"{self._timeout_s:g} s (env.timeout_seconds)"
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
        self._timer = loop.call_later(self._cleanup_s, self._on_stuck)


class Attempt:
    """One attempt at one rollout. Counts the tokens that it samples with an `InferenceClient`.

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
        self.clock = group.clock("a rollout")
        self.sampled = 0
        self._server = group.server
        self._account = group.account

    @property
    def server(self) -> InferenceClient | ChatServer:
        """Client for the model calls: the server of the group, counted and timed if it is an `InferenceClient`."""
        if isinstance(self._server, ChatServer):
            return self._server
        return cast(InferenceClient, self)  # a rollout only calls generate()

    async def generate(self, prompt_ids: list[int], sampling: Mapping[str, Any]) -> Generation:
        """Sample one completion; see `InferenceClient.generate`."""
        with self.clock.paused():
            generation = await cast(InferenceClient, self._server).generate(prompt_ids, sampling)
        self.sampled += len(generation.token_ids)
        self._account.count(len(generation.token_ids))
        return generation


class GroupAttempts:
    """Runs the rollouts of one group.

    Attributes:
        server: samples all of them.
        seed: of the group; None: unseeded.
        account: counts the tokens.
        min_rollouts: minimum number of successful rollouts; evaluations require all.
    """

    def __init__(
        self,
        config: EnvConfig,
        example: int,
        count: int,
        server: InferenceClient | ChatServer,
        seed: Sequence[int] | None,
        account: GroupAccount,
        is_train: bool,
    ) -> None:
        self.server = server
        self.seed = seed
        self.account = account
        allowed = config.min_rollouts if is_train else None
        self.min_rollouts = count if allowed is None else min(allowed, count)
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
            number = 0
            while True:
                this = Attempt(self, index, number)
                try:
                    result = await attempt(this)
                    self.account.add_seconds("environment", this.clock.running_seconds)
                    self.account.add_seconds("engine", this.clock.paused_seconds)
                    return [result]
                except EnvironmentFailed as failure:
                    retry = failure.is_infrastructure and number < self._config.num_retries
                    self.account.discard("retried" if retry else "failed", 1, this.sampled)
                    if not retry:
                        failures.append(failure)
                        self.check(failures, self._count)
                        return []
                await asyncio.sleep(RETRY_PAUSE_SECONDS * 4**number)
                number += 1

        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(run_one(index)) for index in range(self._count)]
        except BaseExceptionGroup as errors:
            explaining = (InferenceServerLost, InferenceError, UnsupportedEnvironment)  # explain all other errors
            leaves = list(leaf_exceptions(errors))
            raise next((error for error in leaves if isinstance(error, explaining)), leaves[0]) from None
        return [result for task in running for result in task.result()]

    async def repeat(self, scoring: Callable[[], Awaitable[T]]) -> T:
        """Await `scoring()` within the time limit of a rollout; retry infrastructure failures."""
        number = 0
        while True:
            try:
                async with self.clock("its scoring") as clock:
                    result = await scoring()
                self.account.add_seconds("scoring", clock.running_seconds)
                return result
            except EnvironmentFailed as failure:
                if not failure.is_infrastructure or number >= self._config.num_retries:
                    raise
            await asyncio.sleep(RETRY_PAUSE_SECONDS * 4**number)
            number += 1

    def clock(self, what: str) -> RolloutClock:
        """Return a new clock."""
        what = f"{what} of example {self._example}"
        return RolloutClock(self._config.timeout_seconds, self._config.cleanup_seconds, self.account.on_stuck, what)

    def check(self, failures: Sequence[EnvironmentFailed], count: int) -> None:
        """Raise the first of `failures` if too few of `count` rollouts are left."""
        if failures and count - len(failures) < self.min_rollouts:
            raise failures[0]
