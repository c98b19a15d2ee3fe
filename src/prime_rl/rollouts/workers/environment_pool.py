"""Runs one environment in worker processes, so its code cannot block the orchestrator's event loop.

Every group ends with its rollouts or with a named error (I2). A worker that dies or hangs is replaced. Its groups run
again: the group that caused the death in a separate process, for a limited number of attempts; the others in another
worker, as often as necessary.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, Self

import msgspec
import psutil
from loguru import logger

from prime_rl.configs.environment import EnvConfig
from prime_rl.core.errors import ConfigError, RunError
from prime_rl.core.types import EvalSplit, Rollout, Split
from prime_rl.liveness.timeline_writer import TimelineWriter
from prime_rl.rollouts.group_attempts import EnvironmentFailed, UnsupportedEnvironment
from prime_rl.rollouts.workers.protocol import DiscardedWork, LoadEnvironment, ModelAccess, RolloutSeconds, RunGroup
from prime_rl.rollouts.workers.worker_handle import WorkerDied, WorkerHandle
from prime_rl.rollouts.workers.worker_launcher import WorkerLauncher

_CHECK_SECONDS = 0.5
_TIMELINE_SECONDS = 5.0
_MAX_STARTS = 3
_MAX_RETRIES = 2
"""Maximum retries of a group whose worker died because of it or for an unknown reason."""
_MAX_SOLO_WORKERS = 2
"""Maximum number of groups that run in a separate process at the same time."""


class EnvironmentPool:
    """Runs the examples of one split of one environment.

    Attributes:
        name: of the environment, in metrics and messages.
        deaths: number of workers that have died.
        eval_split: source of its evaluation examples; known after the start.
        columns: of each example of an evaluation, those of `env.breakdown`; known after the start.
        content_hash: of its examples; known after the start.
        skipped: training examples whose prompt is too long, with `env.long_prompts`; known after the start.
        discarded: rollouts and tokens that were sampled and not used.
        seconds: time of the finished rollouts by activity.
    """

    def __init__(
        self,
        config: EnvConfig,
        launcher: WorkerLauncher,
        access: ModelAccess,
        split: Split = "train",
        workers: int = 1,
        check_seq_len: int | None = None,
        log: Callable[[str], Path] | None = None,
        timeline: TimelineWriter | None = None,
        warn: Callable[[str, str, Callable[[int], str]], None] = lambda kind, env, text: None,
    ) -> None:
        """Describe the pool; entering the context starts the workers.

        Args:
            workers: number of processes.
            check_seq_len: refuse to start if one of the first prompts has so many tokens or more, or skip it; None: no
                check.
            log: from the name of a worker to the file for its output (`RunPaths.log`); None: our stderr.
            timeline: gets the share of the time in which the workers are busy; the pool closes it.
            warn: gets warnings for the user of a run (`RunWarnings.add`), which are also logged.
        """
        self.name = config.label
        self.deaths = 0
        self.eval_split: EvalSplit = "none"
        self.columns: list[dict[str, str]] = []
        self.content_hash = ""
        self.skipped: list[int] = []
        self.discarded = DiscardedWork()
        self.seconds = RolloutSeconds()
        self._launcher = launcher
        self._grace_seconds = config.cleanup_seconds
        self._load = LoadEnvironment(config, split, access)
        self._check_seq_len = check_seq_len
        self._log, self._warn_user = log, warn
        self._num_repeated = 0
        self._num_workers = workers
        self._timeline = WorkerTimeline(timeline) if timeline is not None else None
        self._requests = itertools.count(1)
        self._examples = 0
        self._workers: list[WorkerHandle] = []
        self._solo_workers: set[WorkerHandle] = set()
        self._retired_workers: set[WorkerHandle] = set()
        self._solo_slots = asyncio.Semaphore(_MAX_SOLO_WORKERS)
        self._changed = asyncio.Event()
        self._warnings = set[str]()
        self._failure: Exception | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def __len__(self) -> int:
        """Return the number of examples of the split; 0 before the start."""
        return self._examples

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Start the workers; return when all have loaded the environment.

        Raises:
            ConfigError: it cannot be loaded, has no examples, or one of the first prompts is too long.
            RunError: a worker died while it loaded, or took longer than `env.start_timeout_seconds`.
        """
        started = time.time()
        ready = [asyncio.get_running_loop().create_future() for _ in range(self._num_workers)]
        self._tasks = [asyncio.create_task(self._keep_alive(slot, future)) for slot, future in enumerate(ready)]
        self._tasks.append(asyncio.create_task(self._check_workers()))
        try:
            await asyncio.gather(*ready)
        except BaseException:
            await self.close()
            raise
        if self._timeline is not None:
            self._timeline.add_start(started)
            record = self._timeline.record(
                lambda: [worker.pid for worker in self._all_workers],
                lambda: sum(worker.in_flight for worker in self._all_workers),
            )
            self._tasks.append(asyncio.create_task(record))

    async def close(self) -> None:
        """Close the workers. Running groups end with RunError."""
        self._fail(RunError(f"environment {self.name} is closed"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        workers = self._all_workers
        self._workers.clear()
        await asyncio.gather(*(worker.close(self._grace_seconds) for worker in workers))
        if self._timeline is not None:
            await asyncio.to_thread(self._timeline.close)

    async def run_group(
        self,
        example: int,
        count: int,
        url: str,
        sampling: Mapping[str, Any],
        seq_len: int,
        seed: Sequence[int] | None = None,
        on_scoring: Callable[[], None] = lambda: None,
    ) -> list[Rollout]:
        """Run and score `count` rollouts of one example. Cancelling this cancels them in their worker.

        Args:
            example: its index.
            count: number of rollouts.
            url: root of the server that samples all of them.
            sampling: vLLM sampling parameters; `max_tokens` is lowered to fit into `seq_len`.
            seq_len: maximum sample length, tokens.
            seed: of the group; each rollout and turn derives its own seed. None: unseeded.
            on_scoring: called when the scoring of the group starts.

        Returns:
            The rollouts. Their arrays are read-only.

        Raises:
            EnvironmentFailed: the environment raised, exceeded `env.timeout_seconds`, returned an invalid reward or
                metric, or killed its worker in every attempt.
            SampleTooLong: a prompt leaves no space for a completion.
            ConfigError: the environment uses an unsupported feature.
            InferenceServerLost, InferenceError: the server cannot be reached, or refused.
            RunError: the workers of the environment do not start again, or the pool is closed.
        """
        group = RunGroup(0, example, count, url, dict(sampling), seq_len, None if seed is None else list(seed))
        attempts, solo = 0, False
        while True:
            group = msgspec.structs.replace(group, request=next(self._requests))
            try:
                if solo:
                    rollouts = await self._run_solo(group, on_scoring)
                else:
                    rollouts = await (await self._least_loaded()).run_group(group, on_scoring)
                if self._timeline is not None:
                    self._timeline.num_groups += 1
                return rollouts
            except UnsupportedEnvironment as error:
                raise ConfigError(f"environment {self.name!r}: {error}") from None
            except WorkerDied as death:
                if death.culprit not in (None, group.request):
                    continue  # another group caused the death
                attempts += 1
                solo = death.culprit == group.request
                if attempts > _MAX_RETRIES:
                    activity = f"while it ran example {example}" if solo else f"with example {example} in flight"
                    raise EnvironmentFailed(f"its worker {death} {activity}, the last of {attempts} attempts") from None

    async def _least_loaded(self) -> WorkerHandle:
        while not (alive := [worker for worker in self._workers if not worker.died.done()]):
            if self._failure is not None:
                raise RunError(str(self._failure))
            self._changed.clear()
            await self._changed.wait()
        return min(alive, key=lambda worker: worker.in_flight)

    async def _run_solo(self, group: RunGroup, on_scoring: Callable[[], None]) -> list[Rollout]:
        async with self._solo_slots:
            worker = await self._start_worker("alone")
            self._solo_workers.add(worker)
            try:
                return await worker.run_group(group, on_scoring)
            finally:
                self._solo_workers.discard(worker)
                await worker.close(0)

    async def _keep_alive(self, slot: int, ready: asyncio.Future[None]) -> None:
        """Restart one worker whenever it dies or has become too large, until cancelled."""
        while True:
            try:
                worker = await self._start_worker(str(slot), check=slot == 0 and not ready.done())
            except (ConfigError, RunError) as error:
                if ready.done():
                    self._fail(error)
                else:
                    ready.set_exception(error)
                return
            self._workers.append(worker)
            self._changed.set()
            if not ready.done():
                ready.set_result(None)
            ends: set[asyncio.Future[Any]] = {worker.died, worker.outgrown}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            self._workers.remove(worker)
            if worker.died.done():
                self._report_death(slot, worker.died.result())
            else:
                self._tasks.append(asyncio.create_task(self._retire(slot, worker)))

    async def _retire(self, slot: int, worker: WorkerHandle) -> None:
        """Close a worker when its groups have ended."""
        self._retired_workers.add(worker)
        what = f"worker {slot} exceeded env.max_memory_gib = {self._load.env.max_memory_gib}; starting another"
        logger.warning("environment {}: {}", self.name, what)
        self._warn_user("worker", self.name, lambda count: f"environment {self.name}: {what}")
        while worker.in_flight and not worker.died.done():
            await asyncio.wait({worker.died}, timeout=_CHECK_SECONDS)
        await worker.close(self._grace_seconds)
        self._retired_workers.discard(worker)

    def _report_death(self, slot: int, death: WorkerDied) -> None:
        self.deaths += 1
        self._num_repeated += death.num_rollouts
        what = f"worker {slot} {death}; starting another, {death.num_groups} groups run again"
        logger.warning("environment {}: {}", self.name, what)
        remedy = f"its output is in {self._log(self._worker_name(str(slot)))}" if self._log is not None else ""
        if death.blocked:
            remedy = (
                "await blocking code in a thread (asyncio.to_thread); env.silence_timeout_seconds = "
                f"{self._load.env.silence_timeout_seconds:g} limits the block"
            )

        def text(count: int) -> str:
            so_far = f"; {count} workers have died and {self._num_repeated} rollouts were repeated" if count > 1 else ""
            return f"environment {self.name}: {what}{so_far}; with more workers_per_env fewer run again; {remedy}"

        self._warn_user("worker", self.name, text)

    def _worker_name(self, name: str) -> str:
        return f"env_{self.name.replace('/', '_')}_{name}"

    async def _start_worker(self, name: str, check: bool = False) -> WorkerHandle:
        log = self._log(self._worker_name(name)) if self._log is not None else None
        load = msgspec.structs.replace(self._load, check_seq_len=self._check_seq_len if check else None)
        for attempt in range(1, _MAX_STARTS + 1):
            try:
                worker = await WorkerHandle.start(self._launcher, load, log, self.discarded, self.seconds, self._warn)
                break
            except RunError as error:
                if check or attempt == _MAX_STARTS:
                    raise RunError(f"environment {self.name} {error}") from None
                logger.warning("environment {} {}; retrying", self.name, error)
        limit_gib, loaded_gib = self._load.env.max_memory_gib, worker.memory_bytes() / 2**30
        if limit_gib is not None and loaded_gib > limit_gib:
            await worker.close(0)
            needs = f"needs {loaded_gib:.2f} GiB before its first group; raise env.max_memory_gib = {limit_gib:g}"
            raise ConfigError(f"environment {self.name!r} {needs}")
        loaded = worker.environment
        if self._examples not in (0, loaded.examples):
            await worker.close(0)
            changed = f"had {self._examples} examples and now has {loaded.examples}: its data set changed"
            raise RunError(f"environment {self.name} {changed}")
        if self.content_hash not in ("", loaded.content_hash):
            differs = (
                "its examples differ between two workers: load_environment() must return the same examples each time"
            )
            if self._load.split == "eval":
                await worker.close(0)
                raise ConfigError(f"environment {self.name!r}: {differs}; seed it, or set workers_per_env = 1")
            self._warn_user("data", self.name, lambda count: f"environment {self.name}: {differs}; seed it")
            self._warn(f"{differs}; seed it, so that every example is trained once per epoch")
        self._examples, self.eval_split, self.columns = loaded.examples, loaded.eval_split, loaded.columns
        self.content_hash = self.content_hash or loaded.content_hash
        self.skipped = loaded.skipped if check else self.skipped
        return worker

    def _warn(self, message: str) -> None:
        """Log a warning of a worker once, because all workers of the environment send it."""
        if message not in self._warnings:
            self._warnings.add(message)
            logger.warning("environment {}: {}", self.name, message)

    async def _check_workers(self) -> None:
        """Check the workers periodically; skip a check after this event loop itself was blocked."""
        due = time.monotonic()
        while True:
            due = max(due, time.monotonic()) + _CHECK_SECONDS
            await asyncio.sleep(_CHECK_SECONDS)
            if time.monotonic() - due < _CHECK_SECONDS:
                for worker in self._all_workers:
                    worker.check()

    @property
    def _all_workers(self) -> list[WorkerHandle]:
        return [*self._workers, *self._solo_workers, *self._retired_workers]

    def memory_bytes(self) -> int:
        """Return the resident memory of the workers, without that of their child processes."""
        return sum(worker.memory_bytes() for worker in self._all_workers)

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._changed.set()


async def start_pools(pools: Sequence[EnvironmentPool], stack: AsyncExitStack) -> None:
    """Start environments concurrently; `stack` closes them. Raises the same as `EnvironmentPool.start`."""

    async def close() -> None:  # concurrently, because each may wait for the cleanup of its environment
        await asyncio.gather(*(pool.close() for pool in pools))

    stack.push_async_callback(close)
    await asyncio.gather(*(pool.start() for pool in pools))


def warn_about_training_examples(pools: Sequence[EnvironmentPool]) -> None:
    """Log a warning for each environment without an evaluation split: it is evaluated on its training examples."""
    for pool in pools:
        if pool.eval_split == "train":
            logger.warning("environment {} has no evaluation split: its training examples are used", pool.name)


class WorkerTimeline:
    """Adds a phase per interval to `timeline`, with these keys in addition.

    busy: CPU seconds of the workers / (seconds of the interval * number of workers), at most 1.
    groups: groups that finished in the interval.
    rollouts: rollouts in flight at its end.
    """

    def __init__(self, timeline: TimelineWriter) -> None:
        """Start the first interval."""
        self.num_groups = 0
        """Groups that finished so far; the pool counts them."""
        self._timeline = timeline
        self._cpu_seconds: dict[int, float] = {}
        self._start, self._last_groups = time.time(), 0

    def add_start(self, started: float) -> None:
        """Add the start of the workers, which ends now; `started` in Unix seconds."""
        self._timeline.add("start the workers", started, time.time())

    async def record(self, pids: Callable[[], Iterable[int]], in_flight: Callable[[], int]) -> None:
        """Add phases until cancelled. `pids` and `in_flight` return the present workers and rollouts."""
        self.measure(pids())
        while True:
            self._start, self._last_groups = time.time(), self.num_groups
            await asyncio.sleep(_TIMELINE_SECONDS)
            self._add(pids(), in_flight())

    def close(self) -> None:
        """Write what is queued; blocks."""
        self._timeline.close()

    def measure(self, pids: Iterable[int]) -> float:
        """Return the CPU seconds of the processes since the last call; those that are new count from now on."""
        now, used = dict[int, float](), 0.0
        for pid in pids:
            with suppress(psutil.Error):
                now[pid] = sum(psutil.Process(pid).cpu_times()[:4])  # with children that have exited
                used += now[pid] - self._cpu_seconds.get(pid, now[pid])
        self._cpu_seconds = now
        return used

    def _add(self, pids: Iterable[int], in_flight: int) -> None:
        end, present = time.time(), list(pids)
        share = self.measure(present) / max(end - self._start, 1e-3) / max(len(present), 1)
        groups = self.num_groups - self._last_groups
        self._timeline.add("rollouts", self._start, end, busy=min(1.0, share), groups=groups, rollouts=in_flight)
