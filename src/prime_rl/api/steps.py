"""The trained steps of a run, read from its directory while it runs."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from prime_rl.core.errors import RunError
from prime_rl.core.json_lines import JsonTail
from prime_rl.liveness.heartbeat_monitor import read_heartbeat
from prime_rl.storage.paths import RunPaths
from prime_rl.supervisor.run_progress import ROLES, RunProgress


@dataclass(frozen=True, slots=True)
class Step:
    """A trained step n: batch n was trained, and policy version n + 1 published.

    Attributes:
        number: n, from 0.
        metrics: the metrics of trainer and orchestrator by name (docs/reference/metrics.md).
    """

    number: int
    metrics: dict[str, Any]
    _paths: RunPaths = field(repr=False)

    @property
    def reward(self) -> float:
        """Mean reward of the batch."""
        return float(self.metrics["reward/mean"])

    @property
    def staleness(self) -> int:
        """Largest number of versions between the policy that sampled a token of the batch, and version n."""
        return int(self.metrics["staleness/max"])

    @property
    def rollouts(self) -> list[dict[str, Any]]:
        """The rollouts of the batch: env, reward, advantage, metrics, messages, and others; read from samples/.

        The messages are model output and untrusted. Raises RunError if `num_kept_sample_files` has removed them.
        """
        file = self._paths.samples(self.number)
        if not file.exists():
            raise RunError(f"{file} does not exist: orchestrator.num_kept_sample_files limits what is kept")
        return [json.loads(line) for line in file.read_text().splitlines()]


class StepReader:
    """Reads the steps that a run trains from now on.

    Steps that are trained again after a rollback are returned once, with their first metrics.
    """

    def __init__(self, paths: RunPaths, resumes: bool) -> None:
        """Prepare to read; to be called before the run starts.

        Args:
            paths: of the run.
            resumes: the run continues the one in the directory, whose lines are skipped.
        """
        self._paths = paths
        self._tails = {role: JsonTail(paths.metrics(role)) for role in ROLES}
        self._events = JsonTail(paths.events)
        self._progress = RunProgress()
        self._next = 0
        self._is_started = False
        self.is_finished = False
        if resumes:
            for _ in [*self._new_steps(), *self._events.read()]:
                pass

    def read(self, pid: int) -> list[Step]:
        """Return the new steps of the run whose `rl` has the process id `pid`, in order. Sets `is_finished`."""
        if not self._is_started:
            # Before its first heartbeat, `rl` may not have removed the files of an earlier run yet.
            beat = read_heartbeat(self._paths.heartbeat("rl"))
            self._is_started = beat is not None and beat.pid == pid
            if not self._is_started:
                return []
        finished = any(event["event"] == "finished" for event in self._events.read())
        self.is_finished = self.is_finished or finished  # before the metrics, which are complete by then
        steps = []
        for metrics in self._new_steps():
            if metrics["step"] >= self._next:
                self._next = metrics["step"] + 1
                steps.append(Step(metrics["step"], metrics, self._paths))
        return steps

    def _new_steps(self) -> Iterator[dict[str, Any]]:
        for role, tail in self._tails.items():
            for row in tail.read():
                yield from self._progress.add(role, row)
