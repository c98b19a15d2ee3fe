"""Every path of a run, built from its root. No other module joins these names."""

import re
from dataclasses import dataclass
from pathlib import Path

_STEP = re.compile(r"step_(\d+)")


@dataclass(frozen=True, slots=True)
class RunPaths:
    """The layout of one run directory (docs/architecture.md shows it as a tree).

    Attributes:
        root: the directory.
        visibility_s: how long an artifact that has appeared may take to be whole, seconds; None lets the kind of file
            system decide (`run.visibility`).
    """

    root: Path
    visibility_s: float | None = None

    @property
    def rollouts_dir(self) -> Path:
        """Batches, orchestrator -> trainer."""
        return self.root / "rollouts"

    @property
    def weights_dir(self) -> Path:
        """Published policy versions, trainer -> inference."""
        return self.root / "weights"

    @property
    def checkpoints_dir(self) -> Path:
        """Checkpoints of the whole run."""
        return self.root / "checkpoints"

    @property
    def logs_dir(self) -> Path:
        """One log file a process."""
        return self.root / "logs"

    @property
    def metrics_dir(self) -> Path:
        """Metrics, one file a process."""
        return self.root / "metrics"

    @property
    def samples_dir(self) -> Path:
        """Rollouts as text."""
        return self.root / "samples"

    @property
    def evals_dir(self) -> Path:
        """Evaluations, one folder an environment."""
        return self.root / "evals"

    @property
    def synthesis_dir(self) -> Path:
        """Synthetic training data, one folder an environment."""
        return self.root / "synthesis"

    @property
    def ledger_dir(self) -> Path:
        """What became of the positions of the stream, one file a branch."""
        return self.root / "ledger"

    @property
    def spool_dir(self) -> Path:
        """Finished groups that are not yet shipped."""
        return self.root / "spool"

    @property
    def abandoned_dir(self) -> Path:
        """What a rewind or a new run has put aside."""
        return self.root / "abandoned"

    @property
    def heartbeats_dir(self) -> Path:
        """What each process last said of itself, one file a process."""
        return self.root / "heartbeats"

    @property
    def run_toml(self) -> Path:
        """The resolved configuration of this run."""
        return self.root / "run.toml"

    @property
    def lock(self) -> Path:
        """Held (flock) by the run that owns the directory."""
        return self.root / "lock"

    def rollouts(self, step: int) -> Path:
        """Batch `step`."""
        return self.rollouts_dir / f"step_{step}"

    def weights(self, step: int) -> Path:
        """Policy version `step`."""
        return self.weights_dir / f"step_{step}"

    def checkpoint(self, step: int) -> Path:
        """Checkpoint after `step` steps."""
        return self.checkpoints_dir / f"step_{step}"

    def abandoned(self, branch: int) -> Path:
        """What a rewind has put aside of branch `branch`."""
        return self.abandoned_dir / f"branch_{branch}"

    def metrics(self, role: str) -> Path:
        """One JSON object a step, written by `role`."""
        return self.metrics_dir / f"{role}.jsonl"

    def samples(self, step: int) -> Path:
        """The rollouts of batch `step` as text, one JSON object a rollout."""
        return self.samples_dir / f"step_{step}.jsonl"

    def ledger(self, branch: int) -> Path:
        """The ledger of branch `branch`, one JSON object a record."""
        return self.ledger_dir / f"branch_{branch}.jsonl"

    def spool(self, group_id: int) -> Path:
        """The finished group at stream position `group_id`."""
        return self.spool_dir / f"group_{group_id}.msgpack"

    def log(self, role: str) -> Path:
        """Log file of `role`."""
        return self.logs_dir / f"{role}.log"

    def heartbeat(self, name: str) -> Path:
        """Replaced each second by the process `name`: `orchestrator`, `trainer_0`, `inference`."""
        return self.heartbeats_dir / f"{name}.json"

    def config(self, role: str) -> Path:
        """The resolved configuration that `rl` hands to `role`."""
        return self.root / "configs" / f"{role}.toml"

    def error(self, role: str) -> Path:
        """Why `role` failed, if it could say so."""
        return self.logs_dir / f"{role}.error.json"

    @property
    def events(self) -> Path:
        """What happened to the processes of a run, one JSON object an event, written by `rl`."""
        return self.root / "events.jsonl"

    @property
    def torchrun_logs(self) -> Path:
        """torchrun's own folder: stdout and stderr of each rank."""
        return self.logs_dir / "torchrun"


def step_of(path: Path) -> int | None:
    """Return N of a path that ends in `step_N`, None of any other."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def steps_in(directory: Path) -> list[int]:
    """Return the steps of the complete `step_N` folders in `directory`, ascending; [] where it does not exist.

    Temporary folders carry another name, so whatever matches was committed by its rename.
    """
    if not directory.is_dir():
        return []
    return sorted(int(match[1]) for entry in directory.iterdir() if (match := _STEP.fullmatch(entry.name)))
