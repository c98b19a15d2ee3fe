"""All paths of a run directory."""

import re
from dataclasses import dataclass
from pathlib import Path

_STEP = re.compile(r"step_(\d+)")
RUN_FOLDER = re.compile(r"run_[A-Za-z0-9._-]+")
"""Name of the folder of a run that shares a trainer, and of its orchestrator in events."""


class _Fixed:
    """A path below the root."""

    def __init__(self, place: str) -> None:
        self._place = place

    def __get__(self, paths: "RunPaths", owner: type) -> Path:
        return paths.root / self._place


@dataclass(frozen=True, slots=True)
class RunPaths:
    """The layout of one run directory; docs/concepts.md shows it as a tree.

    Attributes:
        root: the directory.
        fs_consistency_timeout_seconds: how long a new artifact may appear incomplete; None chooses by file system
            (`storage.artifact`).
    """

    root: Path
    fs_consistency_timeout_seconds: float | None = None

    rollouts_dir = _Fixed("rollouts")  # Batches, written by the orchestrator for the trainer
    weights_dir = _Fixed("weights")  # Published policy versions, written by the trainer for inference
    checkpoints_dir = _Fixed("checkpoints")  # Checkpoints of trainer and orchestrator
    logs_dir = _Fixed("logs")  # One log file per process
    metrics_dir = _Fixed("metrics")  # Metrics, one file per process
    samples_dir = _Fixed("samples")  # Rollouts as text
    evals_dir = _Fixed("evals")  # Evaluations, one folder per environment
    synthesis_dir = _Fixed("synthesis")  # Synthetic training data, one folder per environment
    ledger_dir = _Fixed("ledger")  # State of the stream positions, one file per branch
    spool_dir = _Fixed("spool")  # Finished groups that have not been shipped
    abandoned_dir = _Fixed("abandoned")  # Files that a rollback has archived
    earlier_dir = _Fixed("earlier")  # Runs that a later one in the same directory has moved, one folder per run
    timeline_dir = _Fixed("timeline")  # Finished phases, one file per process
    heartbeats_dir = _Fixed("heartbeats")  # Heartbeats, one file per process
    format = _Fixed("format.json")  # The number of the layout, which a release compares with its own
    run_toml = _Fixed("run.toml")  # The resolved configuration of this run
    locks_dir = _Fixed("configs/environments")  # Packages of each environment with an interpreter of its own
    lock = _Fixed("lock")  # Held (flock) by the run that owns the directory
    owner = _Fixed("owner")  # The start that has resumed the run last; processes of an earlier start end
    refused = _Fixed("configs/refused.txt")  # Why a trainer of several runs refuses this one
    evicted = _Fixed("configs/evicted.txt")  # Why a trainer of several runs has evicted this one
    warnings = _Fixed("metrics/warnings.jsonl")  # Warnings that `rl` prints, written by the orchestrator
    events = _Fixed("events.jsonl")  # Starts, failures and restarts of processes, written by `rl`
    kv_cache = _Fixed("kv_cache.json")  # Size of the server's KV cache, for its restart on a GPU that it shares
    loss_surface = _Fixed("loss_surface.json")  # The latest result of `loss-surface`
    torchrun_logs = _Fixed("logs/torchrun")  # torchrun's log folder, with stdout and stderr of each rank

    def rollouts(self, step: int) -> Path:
        """Directory of batch `step`."""
        return self.rollouts_dir / f"step_{step}"

    def weights(self, step: int) -> Path:
        """Directory of policy version `step`."""
        return self.weights_dir / f"step_{step}"

    def checkpoint(self, step: int) -> Path:
        """Directory of the checkpoint after `step` steps."""
        return self.checkpoints_dir / f"step_{step}"

    def abandoned(self, branch: int) -> Path:
        """Files that a rollback has archived from branch `branch`."""
        return self.abandoned_dir / f"branch_{branch}"

    def metrics(self, role: str) -> Path:
        """One JSON object per step, written by `role`."""
        return self.metrics_dir / f"{role}.jsonl"

    def samples(self, step: int) -> Path:
        """The rollouts of batch `step` as text, one JSON object per rollout."""
        return self.samples_dir / f"step_{step}.jsonl"

    def ledger(self, branch: int) -> Path:
        """The ledger of branch `branch`, one JSON object per record."""
        return self.ledger_dir / f"branch_{branch}.jsonl"

    def spool(self, group_id: int) -> Path:
        """The finished group at stream position `group_id`."""
        return self.spool_dir / f"group_{group_id}.msgpack"

    def log(self, role: str) -> Path:
        """Log file of `role`."""
        return self.logs_dir / f"{role}.log"

    def log_hint(self, role: str) -> str:
        """Return ` (log PATH)` for a message, or "" if there is no such file, as without `rl`."""
        logs = (self.log(role), self.log(f"{role}_rank_0"))
        return next((f" (log {log})" for log in logs if log.exists()), "")

    def heartbeat(self, name: str) -> Path:
        """Heartbeat of the process `name`, e.g. `trainer_0`, replaced every second."""
        return self.heartbeats_dir / f"{name}.json"

    def timeline(self, name: str) -> Path:
        """Finished phases of the process `name`, the name of its heartbeat; one JSON object per phase."""
        return self.timeline_dir / f"{name}.jsonl"

    def role_lock(self, role: str) -> Path:
        """Held (flock) by the process of this role, e.g. `orchestrator`, of which a directory has one."""
        return self.root / f"{role}.lock"

    def config(self, role: str) -> Path:
        """The resolved configuration that `rl` passes to `role`."""
        return self.root / "configs" / f"{role}.toml"

    def error(self, role: str) -> Path:
        """The error of `role`, if it was able to write one."""
        return self.logs_dir / f"{role}.error.json"


def step_of(path: Path) -> int | None:
    """Return N for a path that ends in `step_N`, otherwise None."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def steps_in(directory: Path) -> list[int]:
    """Return the steps of the `step_N` folders in `directory`, ascending. Temporary folders have other names."""
    if not directory.is_dir():
        return []
    return sorted(int(match[1]) for entry in directory.iterdir() if (match := _STEP.fullmatch(entry.name)))
