"""The runs that share a trainer: which exist, which have a slot, and which wait for one. Rank 0 alone keeps the table.

    (folder) --> waiting --> active --> finished | stopped | evicted | (folder removed)
         `-----> refused                each frees the slot for the run that waits longest

A run is a folder `run_*` of the trainer's output_dir. Its orchestrator announces a start by writing its configuration;
a later start in the same folder replaces the configuration and announces the run again.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from loguru import logger
from pydantic import ValidationError

from prime_rl.configs.checkpoint import SKIPPED
from prime_rl.configs.loading.base_config import BaseConfig
from prime_rl.configs.loading.schema import nodes_of, tag_of
from prime_rl.configs.monitoring import METRIC_LOGGERS
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.core.errors import ConfigError
from prime_rl.liveness.heartbeat_monitor import FAILED, WAIT_FOR_SLOT, HeartbeatMonitor
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.liveness.run_settings import MAX_RUNS, ProcessSettings, find_difference
from prime_rl.storage.artifact import replace_file
from prime_rl.storage.paths import RUN_FOLDER, RunPaths
from prime_rl.trainer.rl.trained_run import complete_settings

_KEEP_SECONDS = 600.0
"""How long a run without an orchestrator keeps a slot that no other run needs."""
_START_SECONDS = 120.0
"""How long an announced run is expected, whose orchestrator has not shown a sign of life."""


class RunState(StrEnum):
    """State of an announced run."""

    WAITING = "waiting"
    ACTIVE = "active"
    ENDED = "ended"  # refused, evicted, finished or stopped, until the next announcement


@dataclass
class AnnouncedRun:
    """A run whose orchestrator has written its configuration; `signature` identifies the file."""

    id: str
    paths: RunPaths
    signature: tuple[int, int]
    since: float  # of the announcement
    config: TrainerConfig | None = None
    state: RunState = RunState.ENDED
    idx: int | None = None
    orchestrator: HeartbeatMonitor | None = None
    heartbeat: HeartbeatWriter | None = None
    lost_since: float | None = None


@dataclass(frozen=True)
class Changes:
    """What all ranks do before the next iteration: runs that leave (index -> reason), then runs that join."""

    leaving: dict[int, str] = field(default_factory=dict)
    joining: dict[int, tuple[str, str]] = field(default_factory=dict)  # index -> id and configuration as JSON


class Runs:
    """The table of runs of one trainer.

    Attributes:
        idx_to_id, id_to_idx: the runs that have a slot.
        num_waiting: number of runs whose orchestrators waited for a slot, or were expected to, at the last look.
        has_seen_one: whether a run was announced, also one that was refused.
    """

    def __init__(self, config: TrainerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """Know no run yet."""
        self._config, self._clock = config, clock
        self._known: dict[str, AnnouncedRun] = {}  # in the order of their announcements
        self.idx_to_id: dict[int, str] = {}
        self.num_waiting = 0
        self.has_seen_one = False

    @property
    def id_to_idx(self) -> dict[str, int]:
        """The inverse of `idx_to_id`."""
        return {run_id: idx for idx, run_id in self.idx_to_id.items()}

    def heartbeat(self, idx: int) -> HeartbeatWriter:
        """The heartbeat of the run with a slot."""
        heartbeat = self._known[self.idx_to_id[idx]].heartbeat
        assert heartbeat is not None
        return heartbeat

    def discover(self, busy: Callable[[int], bool]) -> Changes:
        """Look at the folders, and give free slots to waiting runs. `busy` runs have a batch to train on.

        A run that leaves keeps its slot until the call of `leave`.
        """
        found = dict(self._scan())
        leaving = dict[int, str]()
        for run in [run for run in self._known.values() if run.id not in found]:
            if run.state is RunState.ACTIVE and run.idx is not None:
                leaving[run.idx] = "its folder was removed"
            else:
                self._forget(run)
        for run_id, signature in found.items():
            known = self._known.get(run_id)
            if known is not None and known.signature == signature:
                continue
            if known is not None and known.state is RunState.ACTIVE and known.idx is not None:
                if not self._continues(known, signature):
                    leaving[known.idx] = "its orchestrator started again"
                continue
            self._announce(run_id, signature)
        leaving |= {idx: reason for idx, reason in self._lost() if idx not in leaving and not busy(idx)}
        joining, now = self._give_slots(), self._clock()
        self.num_waiting = sum(self._is_alive(run) or now - run.since < _START_SECONDS for run in self._waiting())
        return Changes(leaving, joining)

    def has_orchestrator(self, idx: int) -> bool:
        """Whether the orchestrator of a run with a slot was alive at the last look."""
        return self._known[self.idx_to_id[idx]].lost_since is None

    def leave(self, idx: int, reason: str, failed: bool = False) -> None:
        """Free a slot: the run's last file is written. Only a new announcement brings the run back."""
        run = self._known[self.idx_to_id.pop(idx)]
        run.state, run.idx = RunState.ENDED, None
        if run.heartbeat is not None:
            run.heartbeat.close(*[FAILED] * failed)
        logger.info("{} leaves: {}", run.id, reason)

    def refuse(self, run_id: str, reason: str) -> None:
        """Refuse a run: report the reason to its orchestrator."""
        self._write(self._paths(run_id).refused, reason)

    def evict(self, idx: int, reason: str) -> None:
        """Evict an active run: report the reason to its orchestrator. Call it before `leave`."""
        self._write(self._paths(self.idx_to_id[idx]).evicted, reason)

    def _paths(self, run_id: str) -> RunPaths:
        return RunPaths(self._config.run_paths.root / run_id, self._config.fs_consistency_timeout_seconds)

    def _write(self, file: Path, reason: str) -> None:
        logger.warning("{}: {}", file, reason)
        try:
            replace_file(file, reason + "\n")
        except OSError as error:  # a full disk, or a folder that was removed: the other runs continue
            logger.warning("{} cannot be written: {}", file, error)

    def _scan(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Yield the runs with a configuration, those announced first first."""
        found = []
        for entry in self._config.run_paths.root.iterdir():
            if RUN_FOLDER.fullmatch(entry.name):
                try:
                    status = RunPaths(entry).config("orchestrator").stat()
                except (FileNotFoundError, NotADirectoryError):  # no run, or none yet
                    continue
                found.append((status.st_mtime_ns, entry.name, (status.st_mtime_ns, status.st_ino)))
        yield from ((name, signature) for _, name, signature in sorted(found))

    def _announce(self, run_id: str, signature: tuple[int, int]) -> None:
        self.has_seen_one = True
        earlier = self._known.pop(run_id, None)
        if earlier is not None:
            self._forget(earlier)
        paths = self._paths(run_id)
        run = self._known[run_id] = AnnouncedRun(run_id, paths, signature, self._clock())
        if paths.evicted.exists():
            return
        try:
            run.config = derive_config(self._config, read_orchestrator(paths), paths.root)
        except ConfigError as error:
            self.refuse(run_id, str(error))
            return
        run.state = RunState.WAITING
        run.orchestrator = HeartbeatMonitor(paths, self._config.heartbeat.limits, ("orchestrator",))
        settings = {**complete_settings(run.config), MAX_RUNS: self._config.max_concurrent_runs}
        run.heartbeat = HeartbeatWriter(paths, "trainer_0", "trainer", settings=settings)

    def _forget(self, run: AnnouncedRun) -> None:
        self._known.pop(run.id, None)
        if run.heartbeat is not None and run.heartbeat.is_started:
            run.heartbeat.close()

    def _continues(self, run: AnnouncedRun, signature: tuple[int, int]) -> bool:
        """Return whether an orchestrator that started again (`restart`) continues an active run as it is."""
        try:
            orchestrator = read_orchestrator(run.paths)
            config = derive_config(self._config, orchestrator, run.paths.root)
        except ConfigError:
            return False
        if run.config is None or not orchestrator.restart:
            return False
        if config.model_copy(update={"ckpt": run.config.ckpt}) != run.config:
            return False
        run.signature = signature
        return True

    def _is_alive(self, run: AnnouncedRun) -> bool:
        reports = run.orchestrator.poll() if run.orchestrator is not None else []
        limit_seconds = self._config.heartbeat.dead_after_seconds
        return any(report.seen_alive and not report.is_lost(limit_seconds) for report in reports)

    def _lost(self) -> Iterator[tuple[int, str]]:
        """Yield the active runs whose orchestrator has been dead for so long that the slot is free for others."""
        for idx, run_id in self.idx_to_id.items():
            run, now = self._known[run_id], self._clock()
            if self._is_alive(run):
                run.lost_since = None
                continue
            run.lost_since = now if run.lost_since is None else run.lost_since
            keep_seconds = self._config.heartbeat.dead_after_seconds if self.num_waiting else _KEEP_SECONDS
            if now - run.lost_since > keep_seconds:
                yield idx, "its orchestrator is gone"

    def _waiting(self) -> list[AnnouncedRun]:
        return [run for run in self._known.values() if run.state is RunState.WAITING]

    def _give_slots(self) -> dict[int, tuple[str, str]]:
        """Give free slots to the runs that wait, in the order of their announcements."""
        joining = dict[int, tuple[str, str]]()
        free, position = sorted(set(range(self._config.max_concurrent_runs)) - self.idx_to_id.keys()), 0
        for run in self._waiting():
            assert run.config is not None and run.heartbeat is not None
            if not self._is_alive(run):
                if run.heartbeat.is_started:  # it has waited, and is gone
                    run.state = RunState.ENDED
                    run.heartbeat.close()
                continue
            if not run.heartbeat.is_started:
                run.heartbeat.start()
            if not free:
                count, position = len(self.idx_to_id), position + 1
                run.heartbeat.enter(f"{WAIT_FOR_SLOT}: {count} runs use this trainer, position {position}")
                continue
            run.idx, run.state = free.pop(0), RunState.ACTIVE
            self.idx_to_id[run.idx] = run.id
            joining[run.idx] = (run.id, run.config.model_dump_json())
        return joining


def read_orchestrator(paths: RunPaths) -> OrchestratorConfig:
    """Read the resolved configuration of a run's orchestrator. Raises ConfigError in one line."""
    return OrchestratorConfig.read(paths.config("orchestrator"))


def derive_config(trainer: TrainerConfig, run: OrchestratorConfig, root: Path) -> TrainerConfig:
    """Return the configuration of a trainer of one run: the shared trainer's, with what the run chooses itself.

    Raises ConfigError if the run does not fit the trainer, or chooses something that several runs cannot have.
    """
    lora = trainer.model.lora
    assert lora is not None
    wanted = {key: value for key in ("rank", "alpha") if (value := getattr(run.model.lora, key, None)) is not None}
    if (rank := wanted.get("rank", lora.rank)) > lora.rank:
        raise ConfigError(
            f"model.lora.rank = {rank} is above the trainer's model.lora.rank = {lora.rank}; set {lora.rank} or less"
        )
    values = trainer.model_dump() | {
        "max_concurrent_runs": 1,
        "exit_when_idle_seconds": None,
        "output_dir": root,
        "model": trainer.model.model_dump() | {"lora": lora.model_dump() | wanted},
        **{name: _merge(name, getattr(trainer, name), getattr(run, name)) for name in _BLOCKS},
        **{name: dumped(getattr(run, name)) for name in ("ckpt", *METRIC_LOGGERS)},
        "max_steps": run.max_steps,
        "async_level": run.async_level,
        "seed": run.seed,
        "num_minibatches": run.num_minibatches or trainer.num_minibatches,
    }
    # Of normalization fixed: the longest sample of this run, as `rl` sets it for a single run.
    values["loss"]["fixed_length"] = values["loss"].get("fixed_length") or run.seq_len
    if run.restart and values["ckpt"] is not None:
        values["ckpt"] |= {"resume_step": -1, **dict.fromkeys(SKIPPED, False)}
    if values["wandb"] is not None:
        values["wandb"]["id"] = None  # the orchestrator's
    try:
        derived = TrainerConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")) from None
    if reason := _unsupported(derived):
        raise ConfigError(f"{reason} is not supported in a trainer of several runs")
    settings = {**derived.run_settings, MAX_RUNS: trainer.max_concurrent_runs}
    own, shared = ProcessSettings("in this run", run.run_settings), ProcessSettings("here", settings)
    if difference := find_difference(own, shared):
        raise ConfigError(difference.replace("here", "in the trainer"))
    return derived


_BLOCKS = ("optim", "scheduler", "loss")


def _merge(name: str, block: BaseConfig, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Apply a run's changes to a block of the trainer.

    Another `type` keeps the trainer's values of keys that mean the same in both: those with equal defaults.
    """
    kept, known = block.model_dump(), type(block).model_fields
    if "type" in changes:
        variants = {tag_of(variant): variant.model_fields for variant in nodes_of(TrainerConfig)[name].variants}
        fields = variants.get(str(changes["type"]), {})
        kept = {key: kept[key] for key in kept if key in fields and fields[key].default == known[key].default}
    return kept | dict(changes)


def dumped(block: Any) -> dict[str, Any] | None:
    """Return a block as plain values, None as it is."""
    return None if block is None else block.model_dump()


def _unsupported(config: TrainerConfig) -> str | None:
    if config.optim.type == "muon":
        return "optim.type = 'muon'"
    if config.loss.type == "custom":
        return "loss.type = 'custom'"
    if config.reference_name not in (None, config.model.name):
        return f"reference.name = {config.reference_name!r}, another model than the trained one,"
    if config.num_minibatches > 1 and config.loss.type == "decoupled_ppo":
        return "loss.type = 'decoupled_ppo' with num_minibatches > 1"
    if config.loss.top_entropy_quantile < 1:
        return f"loss.top_entropy_quantile = {config.loss.top_entropy_quantile:g}"
    return None
