"""Evaluation beside training: at most one at a time, a bounded number of rollouts, and nothing of it ends the run.

A version is evaluated when it is switched to and its turn has come. While one evaluation goes on, at most one more of
its kind waits; a newer version takes the waiting one's place, so evaluations never pile up. The last version is always
evaluated. What fails (an environment, a server for evaluation alone) is logged, counted in `<prefix>/<env>/failed`, and
that is all.

In mode `span` rollouts go on across switches, as those of training do; `version/min` and `version/max` tell which
versions sampled them. In mode `pinned` one version answers: on servers of their own, or on those of the run, whose next
switch then waits for the evaluation, `hold_s` seconds at most; `held_s` is what that has cost.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Literal

from loguru import logger

from prime_rl.errors import RunError
from prime_rl.monitor import Monitor
from prime_rl.orchestrator.engine import Engine, EngineLost
from prime_rl.orchestrator.evals.player import Player, Servers, Workload, play
from prime_rl.orchestrator.evals.report import named
from prime_rl.orchestrator.evals.results import ResultFile
from prime_rl.orchestrator.evals.rows import ExampleRow
from prime_rl.orchestrator.evals.scores import Summary, summarise
from prime_rl.orchestrator.evals.servers import FixedServers, LeasedServers
from prime_rl.orchestrator.evals.workloads import Play, choose_examples, folder_name
from prime_rl.orchestrator.policy import Policy
from prime_rl.orchestrator.server import Server
from prime_rl.run.paths import RunPaths


@dataclass(frozen=True, slots=True)
class Schedule:
    """One kind of evaluation: of what, how and when.

    Attributes:
        prefix: of its metrics: `eval` or `val`.
        plays: environments, started, and how each is played.
        interval: steps between two.
        base: version 0 is evaluated too.
        mode: `span` or `pinned`.
        hold_s: pinned on the servers of the run: longest time that a switch waits.
        own_servers: pinned on servers for evaluation alone: makes connections to them; None takes those of the run.
        max_concurrent: most rollouts in flight.
        pass_threshold: a rollout passes if its reward is at least this.
        seq_len: longest sample, tokens.
        seed: of the choice of examples.
        patience_s: an evaluation in which no example ends for so long is given up.
    """

    prefix: str
    plays: Sequence[tuple[Play, Player]]
    interval: int
    base: bool
    mode: Literal["span", "pinned"] = "span"
    hold_s: float = 0.0
    own_servers: Callable[[], Sequence[Engine]] | None = None
    max_concurrent: int = 64
    pass_threshold: float = 1.0
    seq_len: int = 2048
    seed: int = 42
    patience_s: float = 1800

    @property
    def holds(self) -> bool:
        """A switch waits for it."""
        return self.mode == "pinned" and self.own_servers is None

    def is_due(self, version: int, earlier: int | None) -> bool:
        """Tell whether `version` is to be evaluated; `earlier` is the version before, None at the start.

        Versions may be skipped where training is faster than switching: the first one behind a multiple counts.
        """
        if version == 0:
            return self.base
        if earlier is None:
            return version % self.interval == 0
        return version // self.interval > earlier // self.interval


class OnlineEvaluator:
    """Evaluates versions as they are switched to.

    Attributes:
        skipped: how many evaluations gave way to a newer version's.
    """

    def __init__(self, schedules: Sequence[Schedule], policy: Policy, monitor: Monitor, paths: RunPaths) -> None:
        """Evaluate on the servers of `policy`; metrics go to `monitor`, rollouts to `paths.evals_dir`."""
        self.skipped = 0
        self._schedules = schedules
        self._policy = policy
        self._monitor = monitor
        self._paths = paths
        self._waiting: dict[str, tuple[Schedule, int]] = {}
        self._latest: dict[str, int] = {}
        self._seen: int | None = None
        self._runner: asyncio.Task[None] | None = None
        self._released = asyncio.Event()
        self._released.set()
        self._held_s = 0.0

    def on_switch(self, version: int, tasks: asyncio.TaskGroup) -> None:
        """Hear that `version` is sampled from now; at the start too. Returns at once; `tasks` runs what is due."""
        if version == self._seen:
            return
        for schedule in self._schedules:
            if schedule.is_due(version, self._seen):
                self._enqueue(schedule, version)
        self._seen = version
        if self._waiting and (self._runner is None or self._runner.done()):
            self._runner = tasks.create_task(self._run())

    async def before_switch(self) -> None:
        """Wait for an evaluation that pins the servers' version, `hold_s` at most; called before each switch."""
        if self._released.is_set():
            return
        started = time.monotonic()
        hold_s = max(schedule.hold_s for schedule in self._schedules if schedule.holds)
        with suppress(TimeoutError):
            async with asyncio.timeout(hold_s):
                await self._released.wait()
        self._released.set()  # it has had its time: further switches do not wait again
        self._held_s += time.monotonic() - started

    async def finish(self, version: int) -> None:
        """Evaluate the last version, if that is not done, and wait for all evaluations to end."""
        for schedule in self._schedules:
            if self._latest.get(schedule.prefix) != version:
                self._enqueue(schedule, version)
        if self._runner is not None:
            await asyncio.wait({self._runner})
        await self._run()

    def _enqueue(self, schedule: Schedule, version: int) -> None:
        if (earlier := self._waiting.pop(schedule.prefix, None)) is not None:
            self.skipped += 1
            logger.warning(
                "{} of version {} is skipped: an earlier one is not done, and version {} is next",
                schedule.prefix, earlier[1], version,
            )  # fmt: skip
            self._free_files(schedule, earlier[1])
        if schedule.own_servers is not None and version > 0:
            self._policy.published.keep_files(version)
        if schedule.holds:
            self._released.clear()
        self._waiting[schedule.prefix] = (schedule, version)
        self._latest[schedule.prefix] = version

    async def _run(self) -> None:
        while self._waiting:
            prefix = next(iter(self._waiting))
            schedule, version = self._waiting.pop(prefix)
            try:
                await self._evaluate(schedule, version)
            except Exception as error:  # noqa: BLE001 -- whatever an evaluation meets, training goes on
                logger.opt(exception=error).error("{} of version {} has failed: {}", prefix, version, error)
            finally:
                if schedule.holds and prefix not in self._waiting:
                    self._released.set()
                self._free_files(schedule, version)

    async def _evaluate(self, schedule: Schedule, version: int) -> None:
        started, metrics = time.monotonic(), Counter[str]()
        summaries: Summary = {}
        try:
            async with self._servers(schedule, version) as servers:
                for item, pool in schedule.plays:
                    summaries |= named(
                        schedule.prefix, item.name, await self._play(schedule, item, pool, servers, version)
                    )
        except RunError as error:
            logger.error("{} of version {} has failed: {}", schedule.prefix, version, error)
            metrics[f"{schedule.prefix}/failed"] = 1
        summaries |= {**metrics, f"{schedule.prefix}/time_s": time.monotonic() - started}
        summaries[f"{schedule.prefix}/skipped"] = self.skipped
        if schedule.holds:
            summaries[f"{schedule.prefix}/held_s"] = self._held_s
        self._monitor.log(version, summaries)
        logger.info("{} of version {}: {}", schedule.prefix, version, _headline(schedule, summaries))

    async def _play(self, schedule: Schedule, item: Play, pool: Player, servers: Servers, version: int) -> Summary:
        """Play one environment; what goes wrong in it is in its summary."""
        folder = item.name if schedule.prefix == "eval" else f"{schedule.prefix}_{item.name}"
        path = self._paths.evals_dir / folder_name(folder) / f"step_{version}.jsonl"
        work = Workload(
            pool, choose_examples(len(pool), item.num_examples, schedule.seed), item.rollouts, item.parameters,
            item.sampling.seed, schedule.seq_len, schedule.max_concurrent,
        )  # fmt: skip
        failed = 0
        with ResultFile(path, fresh=True) as results:
            try:
                await _play_with_patience(work, servers, results.add, schedule.patience_s)
            except Exception as error:  # noqa: BLE001 -- the other environments and training go on
                failed = 1
                logger.error("{}/{} of version {} has failed: {}", schedule.prefix, item.name, version, error)
            summary = summarise(results.rows.values(), schedule.pass_threshold)
        first = next((row.failure.message for row in results.rows.values() if row.failure is not None), None)
        if first is not None:
            logger.warning(
                "{}/{}: {:.0f} examples failed; the first: {}", schedule.prefix, item.name, summary["errors"], first
            )
        return summary | {"failed": failed}

    @asynccontextmanager
    async def _servers(self, schedule: Schedule, version: int) -> AsyncIterator[Servers]:
        if schedule.own_servers is None:
            yield _ServersOfTheRun(self._policy, version, schedule.holds)
            return
        async with LeasedServers(schedule.own_servers()) as leased:
            if version > 0:
                await leased.load(self._paths.weights(version))
            yield FixedServers(leased.urls)

    def _free_files(self, schedule: Schedule, version: int) -> None:
        if schedule.own_servers is not None and version > 0:
            self._policy.published.free_files(version)


class _ServersOfTheRun:
    """The run's servers, beside training; the least loaded first, evaluations counted too.

    Where one version is to answer, servers that have it go first: one that was lost comes back with the newest.
    """

    def __init__(self, policy: Policy, version: int, pinned: bool) -> None:
        self._policy = policy
        self._version = version
        self._pinned = pinned
        self._own: Counter[Server] = Counter()

    @asynccontextmanager
    async def one(self, rollouts: int) -> AsyncIterator[str]:
        able = [s for s in self._policy.servers if s.up and s.version.step >= self._version]
        if self._pinned:
            able = [s for s in able if s.version.step == self._version] or able
        server = min(able or [await self._policy.any_at(self._version)], key=lambda s: s.in_flight + self._own[s])
        self._own[server] += rollouts
        try:
            yield server.engine.url
        except EngineLost:
            self._policy.suspect(server)
            raise
        finally:
            self._own[server] -= rollouts


async def _play_with_patience(
    work: Workload, servers: Servers, done: Callable[[ExampleRow], None], patience_s: float
) -> None:
    """Play; RunError if no example ends for `patience_s` seconds."""
    now = asyncio.get_running_loop().time
    limit = asyncio.timeout(patience_s)

    def add(row: ExampleRow) -> None:
        limit.reschedule(now() + patience_s)
        done(row)

    try:
        async with limit:
            await play(work, servers, add)
    except TimeoutError:
        raise RunError(f"no example has ended for {patience_s:.0f} s") from None


def _headline(schedule: Schedule, metrics: Summary) -> str:
    values = ((item.name, metrics.get(f"{schedule.prefix}/{item.name}/reward/mean")) for item, _ in schedule.plays)
    return ", ".join(f"{name} {'-' if value is None else format(value, '.3f')}" for name, value in values)
