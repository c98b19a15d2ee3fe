"""Online evaluation: one at a time, with a limited number of rollouts; its failures never end the run.

A version that is due is evaluated when the servers switch to it. At most one more evaluation per schedule waits; a
newer version replaces it. The last version is always evaluated. Failures are logged and counted in
`<prefix>/<env>/failed`. After a restart, an interrupted evaluation is repeated if its version can still be sampled
from; otherwise it is skipped with a warning.

In mode `span` rollouts continue across switches, and `version/min` and `version/max` report the versions. In mode
`pinned` one version samples all rollouts: on separate servers, or on the training servers, whose next switch waits for
the evaluation for at most `hold_seconds` seconds (`held_s` reports the wait).
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from loguru import logger

from prime_rl.core.errors import RunError
from prime_rl.core.json_lines import JsonLinesFile, decode_object
from prime_rl.evaluation.eval_plan import EvalTask, choose_examples
from prime_rl.evaluation.eval_report import Summary, prefix_metrics, summarise
from prime_rl.evaluation.eval_results import ExampleRow, ResultFile, first_error
from prime_rl.evaluation.eval_session import FixedServers, Servers, lease_servers, run_examples
from prime_rl.monitors import Monitor
from prime_rl.orchestrator.inference.inference_pool import InferencePool
from prime_rl.orchestrator.inference.inference_server import FindProblem, InferenceServer, accept_all
from prime_rl.orchestrator.waits import deadline_scope, pause
from prime_rl.rollouts.clients.inference_client import InferenceClient, InferenceServerLost
from prime_rl.rollouts.workers.environment_pool import EnvironmentPool
from prime_rl.storage.paths import RunPaths, step_of

_CONTENT = "content_hash"
"""File with the hash of the examples of the latest evaluation."""
_LAST_METRIC = "time_s"
"""`<prefix>/time_s` is in the metrics of every finished evaluation, and nowhere else."""


@dataclass(frozen=True, slots=True)
class EvalSchedule:
    """What is evaluated, how, and when.

    Attributes:
        prefix: of its metrics: `eval` or `val`.
        base: also evaluate version 0.
        hold_seconds: longest time that a switch of the training servers waits for a pinned evaluation.
        own_servers: connects to the separate servers of a pinned evaluation; None uses the training servers.
        find_problem: why a separate server cannot be used, as for `InferenceServer`.
        pass_threshold: a rollout passes if its reward is at least this.
        seed: of the choice of examples.
        idle_timeout_seconds: an evaluation fails if no example ends for this long.
    """

    prefix: str
    tasks: Sequence[tuple[EvalTask, EnvironmentPool]]
    interval: int
    base: bool
    mode: Literal["span", "pinned"] = "span"
    hold_seconds: float = 0.0
    own_servers: Callable[[], Sequence[InferenceClient]] | None = None
    find_problem: FindProblem = accept_all
    max_concurrent: int = 64
    pass_threshold: float = 1.0
    seq_len: int = 2048
    seed: int = 42
    idle_timeout_seconds: float = 1800

    @property
    def holds(self) -> bool:
        """Whether a switch of the training servers waits for it."""
        return self.mode == "pinned" and self.own_servers is None

    def is_due(self, version: int, earlier: int) -> bool:
        """Return whether to evaluate `version`: the first one from each multiple of `interval`, after `earlier`."""
        return self.num_due(earlier, version) > 0 if version else self.base

    def num_due(self, earlier: int, version: int) -> int:
        """Return how many multiples of `interval` lie after `earlier`, up to `version`."""
        return version // self.interval - earlier // self.interval

    def folder(self, item: EvalTask) -> str:
        """Return the folder of an environment in `RunPaths.evals_dir`."""
        return (item.name if self.prefix == "eval" else f"{self.prefix}_{item.name}").replace("/", "_")


@dataclass(frozen=True, slots=True)
class InterruptedEvaluation:
    """An evaluation that was started and not reported. The base model is always available."""

    version: int
    is_available: bool


class OnlineEvaluator:
    """Evaluates versions when the servers switch to them; rollouts go to `paths.evals_dir`."""

    def __init__(
        self,
        schedules: Sequence[EvalSchedule],
        inference: InferencePool,
        monitor: Monitor,
        paths: RunPaths,
        warn: Callable[[str, str, str], None] = lambda kind, env, text: logger.warning("{}", text),
    ) -> None:
        """Connect the parts; `warn` gets warnings for the user: kind, environment and text."""
        self.num_skipped = 0
        """Due evaluations that a newer version replaced, or whose version was never sampled from."""
        self._schedules = schedules
        self._inference = inference
        self._monitor = monitor
        self._paths, self._warn = paths, warn
        self._repeated: list[tuple[EvalSchedule, int]] = []
        self._waiting: dict[str, tuple[EvalSchedule, int]] = {}
        self._latest: dict[str, int] = {}
        self._interrupted: dict[str, InterruptedEvaluation] = {}
        self._seen = -1
        self._runner: asyncio.Task[None] | None = None
        self._released = asyncio.Event()
        self._released.set()
        self._held_seconds = 0.0

    async def read_history(self) -> None:
        """Read what earlier processes of the run evaluated; call this before the first `on_switch`."""
        folders = {s.prefix: [s.folder(item) for item, _ in s.tasks] for s in self._schedules}
        self._latest, self._interrupted = await asyncio.to_thread(_read_history, self._paths, folders)

    def on_switch(self, version: int, tasks: asyncio.TaskGroup) -> None:
        """Start the evaluations due at `version`, which the servers sample from now; returns at once.

        Versions that are not newer than the last one are ignored: a restored server may briefly have an older one.
        """
        self._enqueue_due(version)
        if (self._repeated or self._waiting) and (self._runner is None or self._runner.done()):
            self._runner = tasks.create_task(self._run())

    def _enqueue_due(self, version: int) -> None:
        if version <= self._seen:
            return
        for schedule in self._schedules:
            is_known = self._seen >= 0 or schedule.prefix in self._latest
            earlier = self._latest.get(schedule.prefix, 0) if self._seen < 0 else self._seen
            interrupted = self._interrupted.get(schedule.prefix)
            self._repeat_interrupted(schedule, version)
            if version > self._latest.get(schedule.prefix, -1) and schedule.is_due(version, earlier):
                passed = max(earlier, interrupted.version) if interrupted is not None else earlier
                self.num_skipped += max(0, schedule.num_due(passed, version) - 1) if is_known else 0
                self._enqueue(schedule, version)
        self._seen = version

    async def before_switch(self) -> None:
        """Wait for a pinned evaluation on the training servers, at most `hold_seconds`; called before each switch."""
        if self._released.is_set():
            return
        started = time.monotonic()
        await pause(self._released, max(schedule.hold_seconds for schedule in self._schedules if schedule.holds))
        self._released.set()  # later switches do not wait for this evaluation again
        self._held_seconds += time.monotonic() - started

    async def finish(self, version: int) -> None:
        """Evaluate the last version if necessary, and wait for all evaluations."""
        self._enqueue_due(version)
        for schedule in self._schedules:
            if self._latest.get(schedule.prefix) != version:
                self._enqueue(schedule, version)
        if self._runner is not None:
            await asyncio.wait({self._runner})
        await self._run()

    def _repeat_interrupted(self, schedule: EvalSchedule, version: int) -> None:
        """Repeat an evaluation that an earlier process did not finish; the servers now sample from `version`."""
        interrupted = self._interrupted.pop(schedule.prefix, None)
        if interrupted is None or interrupted.version >= version:  # evaluated anyway, or of an abandoned branch
            return
        if schedule.own_servers is not None and interrupted.is_available:
            self._retain_files(schedule, interrupted.version)
            self._repeated.append((schedule, interrupted.version))
            return
        self.num_skipped += 1
        logger.warning(
            "{} of version {} was interrupted and cannot be repeated: servers sample from version {} now",
            schedule.prefix, interrupted.version, version,
        )  # fmt: skip

    def _enqueue(self, schedule: EvalSchedule, version: int) -> None:
        if (earlier := self._waiting.pop(schedule.prefix, None)) is not None:
            self.num_skipped += 1
            logger.warning(
                "{} of version {} is skipped: an earlier evaluation is still running, and version {} is next",
                schedule.prefix, earlier[1], version,
            )  # fmt: skip
            self._release_files(schedule, earlier[1])
        self._retain_files(schedule, version)
        if schedule.holds:
            self._released.clear()
        self._waiting[schedule.prefix] = (schedule, version)
        self._latest[schedule.prefix] = version

    async def _run(self) -> None:
        while self._repeated or self._waiting:
            waiting = self._waiting
            schedule, version = self._repeated.pop(0) if self._repeated else waiting.pop(next(iter(waiting)))
            try:
                await self._evaluate(schedule, version)
            except Exception as error:  # noqa: BLE001 -- training continues after any error of an evaluation
                logger.opt(exception=error).error("{} of version {} failed: {}", schedule.prefix, version, error)
            finally:
                if schedule.holds and schedule.prefix not in waiting:
                    self._released.set()
                self._release_files(schedule, version)

    async def _evaluate(self, schedule: EvalSchedule, version: int) -> None:
        started, prefix = time.monotonic(), schedule.prefix
        summaries: Summary = {}
        try:
            async with self._servers(schedule, version) as servers:
                for item, pool in schedule.tasks:
                    summary = await self._evaluate_environment(schedule, item, pool, servers, version)
                    summaries |= prefix_metrics(prefix, item.name, summary)
        except RunError as error:
            logger.error("{} of version {} failed: {}", prefix, version, error)
            summaries[f"{prefix}/failed"] = 1
        summaries |= {f"{prefix}/time_s": time.monotonic() - started, f"{prefix}/skipped": self.num_skipped}
        if schedule.holds:
            summaries[f"{prefix}/held_s"] = self._held_seconds
        await asyncio.to_thread(self._monitor.log, version, summaries)
        rewards = ((item.name, summaries.get(f"{prefix}/{item.name}/reward/mean")) for item, _ in schedule.tasks)
        headline = ", ".join(f"{name} {'-' if reward is None else format(reward, '.3f')}" for name, reward in rewards)
        logger.info("{} of version {}: {}", prefix, version, headline)

    async def _evaluate_environment(
        self, schedule: EvalSchedule, item: EvalTask, pool: EnvironmentPool, servers: Servers, version: int
    ) -> Summary:
        """Evaluate one environment; its failures are part of the summary."""
        path = self._paths.evals_dir / schedule.folder(item) / f"step_{version}.jsonl"
        examples = choose_examples(len(pool), item.num_examples, schedule.seed)
        failed, idle_seconds, name = 0, schedule.idle_timeout_seconds, f"{schedule.prefix}/{item.name}"
        if await asyncio.to_thread(_is_other_content, path.with_name(_CONTENT), pool.content_hash):
            text = "its examples differ from those of earlier versions, whose results are not comparable; seed its data"
            self._warn("data", name, f"{name}: {text}")
        with await asyncio.to_thread(ResultFile, path, fresh=True) as results:
            try:
                timed_out = RunError(f"no example ended for {idle_seconds:.0f} s (wait_timeout_seconds)")
                async with deadline_scope(lambda: timed_out, idle_seconds) as timeout:

                    def add(row: ExampleRow) -> None:
                        timeout.reschedule(asyncio.get_running_loop().time() + idle_seconds)
                        results.add(row)

                    await run_examples(item, pool, examples, schedule.seq_len, schedule.max_concurrent, servers, add)
            except Exception as error:  # noqa: BLE001 -- the other environments and training continue
                failed = 1
                logger.error("{} of version {} failed: {}", name, version, error)
            summary = summarise(results.rows.values(), schedule.pass_threshold)
        if first := first_error(list(results.rows.values())):
            logger.warning("{}: {:.0f} examples failed; the first: {}", name, summary["errors"], first)
        return summary | {"failed": failed}

    @asynccontextmanager
    async def _servers(self, schedule: EvalSchedule, version: int) -> AsyncIterator[Servers]:
        if schedule.own_servers is None:
            yield _TrainingServers(self._inference, version, schedule.holds)
            return
        async with lease_servers(schedule.own_servers()) as leased:
            for client in leased.clients:
                if (problem := schedule.find_problem(client.url, (await client.policy()).settings)) is not None:
                    raise RunError(problem)
            if version > 0:
                await leased.load(self._paths.weights(version))
            yield FixedServers([client.url for client in leased.clients])

    def _retain_files(self, schedule: EvalSchedule, version: int) -> None:
        if schedule.own_servers is not None and version > 0:
            self._inference.weight_versions.retain_files(version)

    def _release_files(self, schedule: EvalSchedule, version: int) -> None:
        if schedule.own_servers is not None and version > 0:
            self._inference.weight_versions.release_files(version)


@dataclass(frozen=True, slots=True)
class _TrainingServers:
    """The training servers, the least loaded first, including the load of evaluations.

    A pinned evaluation prefers servers with its version: a lost server returns with the newest.
    """

    inference: InferencePool
    version: int
    pinned: bool
    own: Counter[InferenceServer] = field(default_factory=Counter)

    @asynccontextmanager
    async def acquire(self, rollouts: int) -> AsyncIterator[str]:
        candidates = [s for s in self.inference.servers if s.up and s.version.step >= self.version]
        if self.pinned:
            candidates = [s for s in candidates if s.version.step == self.version] or candidates
        candidates = candidates or [await self.inference.wait_for_server(self.version)]
        server = min(candidates, key=lambda s: s.in_flight + self.own[s])
        self.own[server] += rollouts
        try:
            yield server.client.url
        except InferenceServerLost:
            self.inference.take_out(server)
            raise
        finally:
            self.own[server] -= rollouts


def _is_other_content(file: Path, content_hash: str) -> bool:
    """Return whether the examples differ from those of the evaluation before, and record their hash."""
    earlier = file.read_text() if file.exists() else content_hash
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content_hash)
    return earlier != content_hash


def _read_history(
    paths: RunPaths, folders: Mapping[str, Sequence[str]]
) -> tuple[dict[str, int], dict[str, InterruptedEvaluation]]:
    """Read the history of a run; `folders` maps a metrics prefix to folders of its environments in `evals_dir`.

    Returns:
        By prefix, the newest version with reported metrics, and the newest above it whose evaluation was started.
    """
    evaluated = _reported_versions(paths.metrics("orchestrator"), folders)
    interrupted = {}
    for prefix, names in folders.items():
        files = (file for name in names for file in (paths.evals_dir / name).glob("step_*.jsonl"))
        started = [step for file in files if (step := step_of(file.with_suffix(""))) is not None]
        if (newest := max(started, default=-1)) > evaluated.get(prefix, -1):
            interrupted[prefix] = InterruptedEvaluation(newest, newest == 0 or paths.weights(newest).exists())
    return evaluated, interrupted


def _reported_versions(metrics: Path, prefixes: Mapping[str, object]) -> dict[str, int]:
    """Return the newest version per prefix; a rollback has removed the lines of the versions that it undid.

    A damaged line at worst repeats an evaluation.
    """
    newest, file, mark = dict[str, int](), JsonLinesFile(metrics), f'/{_LAST_METRIC}"'.encode()
    while lines := file.read_lines():
        for row in filter(None, map(decode_object, (line for line in lines if mark in line))):
            for prefix in prefixes:
                if f"{prefix}/{_LAST_METRIC}" in row:
                    newest[prefix] = max(row["step"], newest.get(prefix, 0))
    return newest
