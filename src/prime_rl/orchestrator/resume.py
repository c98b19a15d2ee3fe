"""What the orchestrator saves for a resume, and where a run starts: at step 0, at a checkpoint, or where it ended.

The orchestrator's part of checkpoint N is its state right after batch N - 1, written before that batch ships. Batch
N - 1 is on disk under a temporary name; then this part is written; then the batch is renamed. A trainer that reads the
batch therefore finds the part. The trainer commits the checkpoint. The part is a base of the ledger of the next branch
(`Ledger.start`) together with the pending groups, in the ledger's own encodings.

Only the trainer chooses the checkpoint of a resume. It archives later artifacts and writes `RESUME.json`, for which the
orchestrator waits, so both continue from the same step. If the trainer restarts while the orchestrator runs, the
orchestrator ends its work (`TrainerRolledBack`) and starts again from the new checkpoint.
"""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loguru import logger

from prime_rl.configs.checkpoint import CkptConfig
from prime_rl.configs.loading.base_config import write_config
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.core.errors import ConfigError, RunError, translate_error, unwritable
from prime_rl.core.types import Group, PolicyVersion
from prime_rl.liveness.parent_process import is_supervised
from prime_rl.orchestrator.ledger.ledger_records import decode_group, encode_group
from prime_rl.storage.artifact import MANIFEST, ArtifactError, read_manifest
from prime_rl.storage.checkpoint_artifacts import (
    ORCHESTRATOR,
    PART_FORMAT,
    ResumeRecord,
    check_hashes,
    hash_file,
    prepare_part,
    read_commit,
    read_resume,
    read_stop,
    seal_part,
)
from prime_rl.storage.paths import RUN_FOLDER, RunPaths, steps_in
from prime_rl.storage.rollback import (
    START_VARIABLE,
    archive_late_artifacts,
    branch_of_batch,
    find_earlier_run,
    remove_earlier_run,
)
from prime_rl.storage.wait_for import wait_until

_STATE, _GROUP = "state.json", "group_"
_HISTORY = "seconds"
"""Earlier releases saved tokens under `lengths`, which are not restored: both orders in one window would be wrong."""
_REPORTED = (
    *("async_level", "max_off_policy_steps", "batch_size", "rollouts_per_example", "seq_len", "sampling", "advantage"),
    *("reward_shaping", "buffer", "filter_zero_advantage", "mask_truncated_completions", "zero_truncated_completions"),
)
"""Keys whose change is reported on a resume: the batches are then others. Groups that do not fit are sampled again."""

_REPORTED_OF_ENV = {
    *("args", "rewards", "sampling", "rollouts_per_example", "min_rollouts", "reward_errors", "step_rewards"),
    "identity",
}


@dataclass(frozen=True, slots=True)
class OrchestratorState:
    """The state of the orchestrator before batch `step`.

    Attributes:
        base: of the ledger that continues from here (`LedgerSnapshot.state_after`).
        finished: groups that wait to be shipped.
        history: `DurationHistory.state`.
        changes: settings that differ from those when a checkpoint was written, such as `batch_size 64 -> 32`.
    """

    step: int
    base: dict[str, Any]
    finished: Sequence[Group]
    history: dict[str, Any]
    changes: tuple[str, ...] = ()

    def describe_changes(self) -> str:
        """Return a warning that names `changes`."""
        return f"resumed after step {self.step - 1}; changed: {', '.join(self.changes)}"


def write_checkpoint_part(
    checkpoint: Path, state: OrchestratorState, branch: int, batch_manifest: Path, config: OrchestratorConfig
) -> None:
    """Write the part durably into `checkpoint`, with the hash of the manifest of batch N - 1.

    Raises RunError if the disk is full, or the checkpoint is complete already.
    """
    try:
        with suppress(FileNotFoundError):  # a trainer rollback archived the incomplete checkpoint meanwhile: try again
            _write_part(checkpoint, state, branch, batch_manifest, config)
            return
        _write_part(checkpoint, state, branch, batch_manifest, config)
    except OSError as error:
        raise RunError(
            f"cannot save {checkpoint / ORCHESTRATOR}: {error.strerror}; earlier checkpoints are complete"
        ) from error


def _write_part(
    checkpoint: Path, state: OrchestratorState, branch: int, batch_manifest: Path, config: OrchestratorConfig
) -> None:
    temporary = prepare_part(checkpoint, ORCHESTRATOR)
    files = {f"{_GROUP}{group.group_id}.msgpack": encode_group(group) for group in state.finished}
    files[_STATE] = json.dumps({"base": state.base, _HISTORY: state.history}).encode()
    for name, data in files.items():
        (temporary / name).write_bytes(data)
    hashes = {name: hash_file(temporary / name) for name in files}
    settings = _settings(config)
    fields = {"step": state.step, "branch": branch, "batch": hash_file(batch_manifest), "settings": settings}
    seal_part(temporary, checkpoint / ORCHESTRATOR, fields, hashes)


def read_checkpoint_part(checkpoint: Path, config: OrchestratorConfig) -> OrchestratorState:
    """Read the part of a committed checkpoint, if it has one, and check its hashes. Raises ConfigError, RunError."""
    if ORCHESTRATOR not in read_commit(checkpoint, only=ORCHESTRATOR).parts:
        raise ConfigError(
            f"{checkpoint} was written by a trainer without an orchestrator; only a trainer on recorded batches can "
            "resume from it"
        )
    part = checkpoint / ORCHESTRATOR
    check_hashes(part)
    manifest = read_manifest(part, PART_FORMAT)
    saved, now = manifest["settings"], _settings(config)
    changes = tuple(f"{key} {saved[key]} -> {now[key]}" for key in now if key in saved and saved[key] != now[key])
    state = json.loads((part / _STATE).read_text())
    files = [part / name for name in sorted(manifest["files"]) if name.startswith(_GROUP)]
    finished = [decode_group(file.read_bytes(), file) for file in files]
    return OrchestratorState(manifest["step"], state["base"], finished, state.get(_HISTORY, {}), changes)


def _settings(config: OrchestratorConfig) -> dict[str, Any]:
    """Return the reported settings by name; those of a block as `block.key`."""
    settings: dict[str, Any] = {}
    for key, value in config.model_dump(mode="json", include=set(_REPORTED)).items():
        settings |= {f"{key}.{name}": one for name, one in value.items()} if isinstance(value, dict) else {key: value}
    for env in config.env:
        values = env.model_dump(mode="json", include=_REPORTED_OF_ENV)
        settings |= {f"environment {env.label}.{name}": value for name, value in values.items()}
    return settings


class StopCheckpoints:
    """Keeps the states after the newest batches, at most k + 2 of them, for a trainer that stops between checkpoints.

    Such a trainer saves checkpoint N before batch N, the next that it would train on. The orchestrator's part is the
    state before batch N - 1 was shipped, so it must be kept until the trainer has trained on that batch.

    Without checkpoints it keeps nothing. Saved groups are shared with the batches, so a state costs little memory.
    """

    def __init__(self, config: OrchestratorConfig, branch: int) -> None:
        """Start without states."""
        self._config, self._branch = config, branch
        self._states: dict[int, Callable[[], OrchestratorState]] = {}

    def keep(self, step: int, state: Callable[[], OrchestratorState], published: int) -> None:
        """Keep the state of checkpoint `step`, and forget those below the newest version, `published`."""
        self._states = {kept: build for kept, build in self._states.items() if kept >= published}
        self._states[step] = state

    def answer(self) -> None:
        """Write the part of the checkpoint with which the trainer stops, if it does. Blocks. Raises RunError."""
        if self._config.ckpt is not None:
            stop = read_stop(self._config.run_paths.root / self._config.ckpt.path)
            if stop is not None and stop.step is not None and stop.branch == self._branch:
                self.write(stop.step)

    def write(self, wanted: int | None = None) -> None:
        """Write the part of checkpoint `wanted`, or of all kept ones, if its batch is shipped. Blocks. Raises RunError.

        A part that exists already is not replaced: the trainer may be committing it.
        """
        config, states = self._config, self._states
        if config.ckpt is None:
            return
        for step in sorted(states if wanted is None else states.keys() & {wanted}):
            checkpoint = config.run_paths.root / config.ckpt.path / f"step_{step}"
            manifest = config.run_paths.rollouts(step - 1) / MANIFEST
            if manifest.exists() and not (checkpoint / ORCHESTRATOR).exists():
                write_checkpoint_part(checkpoint, states.pop(step)(), self._branch, manifest, config)


@dataclass(frozen=True, slots=True)
class StartPoint:
    """Where a run starts: the branch of its versions and batches, and the state of the checkpoint.

    The state is None at the start of the stream, or if the ledger holds it.
    """

    branch: int = 0
    state: OrchestratorState | None = None

    @property
    def version(self) -> PolicyVersion | None:
        """The version to load before anything is dispatched; None is the base model."""
        return PolicyVersion(self.branch, self.state.step) if self.state is not None else None


START = StartPoint()


class TrainerRolledBack(Exception):
    """The trainer resumed from a checkpoint on a new branch; the groups in flight belong to the old one."""

    def __init__(self, resume: ResumeRecord) -> None:
        super().__init__(f"the trainer rolled back to step {resume.step}, where branch {resume.branch} starts")
        self.resume = resume


def announce(config: OrchestratorConfig) -> None:
    """Prepare the directory and write the configuration, by which a trainer with several runs finds this one.

    `rl` has written that of a single run, and passes it.

    Raises:
        ConfigError: the directory holds another run, or the trainer has evicted this one.
    """
    paths = config.run_paths
    if paths.evicted.exists():
        raise ConfigError(
            f"{paths.evicted}: the trainer has evicted this run: {paths.evicted.read_text().strip()}; remove the file "
            "to start it again"
        )
    if not config.restart and (config.bench or not _is_asked_to_resume(config)):
        _prepare_directory(config)
    if config.training_keys:
        logger.info("this run sets {} of its training", ", ".join(config.training_keys))
    paths.refused.unlink(missing_ok=True)  # of an earlier start
    if not is_supervised() or RUN_FOLDER.fullmatch(paths.root.name):
        write_config(config, paths.config("orchestrator"))


def find_start_point(config: OrchestratorConfig, check: Callable[[], object] = lambda: None) -> StartPoint:
    """Find where the run starts; if the trainer resumes, wait for its checkpoint and the published version.

    `check` is called repeatedly during a wait for the trainer; it raises if the trainer is lost, and returns a true
    value as long as the time does not count.

    Raises:
        ConfigError: the checkpoint does not match the configuration.
        RunError: the trainer did not resume in time, or the checkpoint is damaged.
    """
    if waits_for_trainer(config):  # batches of a process that was killed while it wrote them
        for unfinished in config.run_paths.rollouts_dir.glob(".tmp-step_*"):
            shutil.rmtree(unfinished, ignore_errors=True)
    if config.restart:
        return _continue(config, check)
    if config.bench or not _is_asked_to_resume(config):
        known = None if config.bench else read_resume(resume_directory(config))
        return StartPoint(known.branch) if known else START
    return _start_at(config, _wait_for_resume(config, check), check)


def waits_for_trainer(config: OrchestratorConfig) -> bool:
    """Return whether the trainer decides where the run starts."""
    return config.restart or _is_asked_to_resume(config)


def resume_directory(config: OrchestratorConfig) -> Path:
    """Return the directory of `RESUME.json`, which exists even if no checkpoints are written."""
    return config.run_paths.root / (config.ckpt or CkptConfig()).path


def find_rollback(config: OrchestratorConfig, branch: int) -> ResumeRecord | None:
    """Return the trainer's rollback to a branch above `branch`, if this orchestrator samples for it."""
    directory = resume_directory(config)
    resume = read_resume(directory)
    return resume if resume is not None and resume.branch > branch and _is_for_us(directory, resume) else None


def _is_for_us(directory: Path, resume: ResumeRecord) -> bool:
    """Return whether the checkpoint has an orchestrator's part; otherwise the trainer replays recorded batches."""
    if resume.step:
        with suppress(ArtifactError):  # `read_checkpoint_part` reports the defect
            return ORCHESTRATOR in read_commit(directory / f"step_{resume.step}", only=ORCHESTRATOR).parts
    return True


def _continue(config: OrchestratorConfig, check: Callable[[], object]) -> StartPoint:
    """Start where an earlier process of the run ended, or where the trainer rolled back to since."""
    if _is_asked_to_resume(config) and os.environ.get(START_VARIABLE):
        _wait_for_resume(config, check)  # until then all files belong to the resumed run
    branch, shipped = _newest_branch(config.run_paths), _shipped_branch(config.run_paths)
    if shipped > branch:  # a rollback archived the ledger and is still running, or will be repeated
        _wait_for_branch(config, shipped + 1, check)
    resume = find_rollback(config, branch)
    return StartPoint(max(branch, 0)) if resume is None else _start_at(config, resume, check)


def _start_at(config: OrchestratorConfig, resume: ResumeRecord, check: Callable[[], object]) -> StartPoint:
    """Start the branch of `resume`, or a newer one if the trainer rolls back again meanwhile."""
    paths, directory = config.run_paths, resume_directory(config)
    while True:
        if _is_for_us(directory, resume) and (resume.step or config.restart):
            archive_late_artifacts(paths, directory, resume.step, resume.branch)
        if later := [step for step in steps_in(paths.rollouts_dir) if step >= resume.step]:
            raise RunError(
                f"{paths.rollouts(later[0])} already exists, so branch {resume.branch} cannot start: the trainer "
                "resumed on recorded batches; move them away to sample new ones"
            )
        if not resume.step:
            return StartPoint(resume.branch)
        state = read_checkpoint_part(directory / f"step_{resume.step}", config)
        newest = _wait_for_version(config, resume, check)
        if newest is resume:
            return StartPoint(resume.branch, state)
        resume = newest


def _wait_for_version(config: OrchestratorConfig, resume: ResumeRecord, check: Callable[[], object]) -> ResumeRecord:
    """Wait until the trainer publishes the resumed version, or rolls back again; return the newest rollback."""
    version = config.run_paths.weights(resume.step)
    what = f"{version}, which {_trainer(config)} should have written"

    def find() -> ResumeRecord | None:
        return find_rollback(config, resume.branch) or (resume if version.exists() else None)

    return _wait(config, version.parent, find, what, check)


def _wait_for_resume(config: OrchestratorConfig, check: Callable[[], object]) -> ResumeRecord:
    """Wait until the trainer writes from which checkpoint this start resumes."""
    paths, directory, start = config.run_paths, resume_directory(config), os.environ.get(START_VARIABLE)
    asked = config.ckpt.resume_step if config.ckpt is not None else None

    def find() -> ResumeRecord | None:
        resume = read_resume(directory)
        if resume is None:
            return None
        if start:
            is_new = resume.start == start
        else:  # standalone: may read a stale `RESUME.json` of a resume that crashed; the next rollback corrects it
            is_started = paths.ledger(resume.branch).exists() or resume.branch == _shipped_branch(paths)
            is_new = not is_started and asked in (-1, resume.step)
        return resume if is_new else None

    logger.info("waiting for the trainer to record which checkpoint it resumes from")
    what = f"{_trainer(config)} to record in {directory} that it resumes" + (f" from {asked}" if asked != -1 else "")
    return _wait(config, directory, find, what, check)


def _wait_for_branch(config: OrchestratorConfig, branch: int, check: Callable[[], object]) -> None:
    directory = resume_directory(config)

    def find() -> ResumeRecord | None:
        resume = read_resume(directory)
        return resume if resume is not None and resume.branch >= branch else None

    if find() is None:
        logger.info("the ledger was archived by a rollback: waiting for the trainer to resume")
    what = f"{_trainer(config)} to start branch {branch}: the ledger of the branch before was archived"
    _wait(config, directory, find, what, check)


def _wait(
    config: OrchestratorConfig,
    directory: Path,
    find: Callable[[], ResumeRecord | None],
    what: str,
    check: Callable[[], object],
) -> ResumeRecord:
    """Return what `find` returns, as soon as it finds something in `directory`."""
    found = list[ResumeRecord]()

    def is_found() -> bool:
        found.extend(record for record in [find()] if record is not None)
        return bool(found)

    wait_until(directory, is_found, config.wait_timeout_seconds, what, check)
    return found[-1]


def _trainer(config: OrchestratorConfig) -> str:
    return f"the trainer{config.run_paths.log_hint('trainer')}"


def _is_asked_to_resume(config: OrchestratorConfig) -> bool:
    return config.ckpt is not None and config.ckpt.resume_step is not None


def _newest_branch(paths: RunPaths) -> int:
    """Return the newest branch whose ledger has a complete line; -1 if there is none."""
    branches = [-1]
    for file in paths.ledger_dir.glob("branch_*.jsonl"):
        with file.open("rb") as ledger:
            if ledger.readline().endswith(b"\n"):
                branches.append(int(file.stem.removeprefix("branch_")))
    return max(branches)


def _shipped_branch(paths: RunPaths) -> int:
    """Return the branch of the newest batch, which is the highest; -1 if there is no batch."""
    steps = steps_in(paths.rollouts_dir)
    branches = (branch_of_batch(paths.rollouts(step)) for step in reversed(steps))
    return next((branch for branch in branches if branch is not None), 0 if steps else -1)


def _prepare_directory(config: OrchestratorConfig) -> None:
    """Create the directory, or clear it with `clean`; raise ConfigError if artifacts of an earlier run remain."""
    paths = config.run_paths
    with translate_error(OSError, unwritable(f"output_dir: {paths.root} cannot be created")):
        paths.root.mkdir(parents=True, exist_ok=True)
    try:
        if config.clean and (old := find_earlier_run(paths)):
            remove_earlier_run(old)
            logger.info("removed an earlier run from {}", paths.root)
    except OSError as error:
        raise ConfigError(
            f"clean: {error.filename} cannot be removed: {error.strerror}; remove it, or choose another output_dir"
        ) from None
    if (branch := _newest_branch(paths)) >= 0:
        raise ConfigError(
            f"output_dir: {paths.ledger(branch)} is the ledger of an earlier run; remove it with --clean, choose "
            "another output_dir, or continue that run with --restart"
        )
    for directory in (paths.rollouts_dir, paths.weights_dir):
        if steps := steps_in(directory):
            raise ConfigError(
                f"output_dir: {directory} holds steps {steps[0]} to {steps[-1]} of an earlier run; "
                "remove it with --clean, or choose another output_dir"
            )
