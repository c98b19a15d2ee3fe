"""Saves and resumes the state of a trainer, on any number of ranks (I3, I4).

Checkpoint N is written after step N - 1 and before batch N. All ranks write their shards to a temporary folder. Rank 0
renames it when all shards are on the disk, and commits the checkpoint if the orchestrator's part is complete too.

`check_settings` decides which settings may change on resume: those that change results log a warning, a few are
refused.
"""

import itertools
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed.checkpoint as dcp
from loguru import logger
from torch import Tensor, nn
from torch.optim import Optimizer

from prime_rl.configs.checkpoint import SKIPPED, CkptConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.core.errors import ConfigError, RunError
from prime_rl.core.import_utils import package_versions
from prime_rl.storage import checkpoint_artifacts as files
from prime_rl.storage.artifact import MANIFEST, ArtifactError
from prime_rl.storage.batch import Progress, delete_rows
from prime_rl.storage.paths import RunPaths, step_of
from prime_rl.storage.rollback import orchestrator_has_run, start_name
from prime_rl.storage.wait_for import DeadlineError, start_daemon_future, wait_for
from prime_rl.trainer.checkpoints import trainer_state as state
from prime_rl.trainer.checkpoints.resume_point import ResumeDecision, ResumePoint
from prime_rl.trainer.checkpoints.trainer_state import TensorReader, load_model_and_optimizer, summarize_dcp_error
from prime_rl.trainer.parallel.process_group import RankConsensus, World, wrap_rank_errors
from prime_rl.trainer.process_setup import StopRequest, check_output_dir

PART = files.TRAINER
_ORCHESTRATOR_SECONDS = 20.0
"""Longest wait for the orchestrator's part of a checkpoint at a stop; it writes it within a second."""


class DataStream(Protocol):
    """Training data with a position that does not depend on the number of ranks."""

    def state(self) -> dict[str, Any]:
        """Return the position after the trained batches, as JSON values."""

    def restore(self, state: dict[str, Any]) -> None:
        """Continue at a position. Raises ConfigError if the data changed."""


_cache_keys = itertools.count()


class _SavePlanner(dcp.DefaultSavePlanner):
    """Plans a save only if names, shapes or shards differ from those of the last one with the same `key`."""

    def __init__(self, key: str) -> None:
        super().__init__(enable_plan_caching=True)
        self._cached_plans_key = key  # torch's is the name of the class: runs that save in threads would mix plans

    @classmethod
    def forget(cls, key: str) -> None:
        """Free the plans of `key`, which torch otherwise keeps until the process ends."""
        plans = (cls._cached_save_plan, cls._cached_final_save_plan, cls._cached_metadata)
        for cache in (*plans, cls._cached_all_plans, cls._cached_global_plan):
            cache.pop(key, None)


class Checkpointer:
    """Saves and resumes one trainer. A benchmark does neither; without a `ckpt` block a restart starts at step 0."""

    def __init__(
        self,
        config: TrainerConfig | SFTConfig,
        paths: RunPaths,
        world: World,
        publishes_versions: bool = False,
        keeps_rows: Callable[[int], bool] = lambda step: False,
        check_data: Callable[[dict[str, Any]], object] = lambda state: None,
    ) -> None:
        """Choose the start point, and roll the run directory back to it. All ranks call it together.

        Args:
            config: of the trainer.
            paths: the run.
            world: the ranks.
            publishes_versions: inference samples from the versions, so version N is published again after a resume.
            keeps_rows: whether the rows of a batch are kept although no checkpoint needs them.
            check_data: raises ConfigError if the data changed since a position, before anything is rolled back.

        Raises:
            ConfigError: the directory contains another run, the requested checkpoint does not exist, or these settings
                or data cannot resume it.
            RunError: the checkpoint is damaged, or the directory cannot be written.
        """
        self._config, self._paths, self._world, self._keeps_rows = config, paths, world, keeps_rows
        self._cache_key = f"checkpointer {next(_cache_keys)}"
        self._publishes_versions, self._waits_for_orchestrator = publishes_versions, False
        self.first_needed_batch = 0
        """First batch whose rows a checkpoint needs, as far as is known; earlier ones are deleted."""
        self.schedule_start = 0
        """Step at which the learning rate schedule starts; known once restored."""
        self._options = None if config.bench else config.ckpt
        if config.bench:
            check_output_dir(paths, resuming=False)
            self._start = ResumePoint()
            self.stop_request = StopRequest(None, 0, world)
            return
        self._directory = paths.root / (self._options or CkptConfig()).path
        self._group = world.new_group()
        self._ranks = RankConsensus(world, self._group)
        self._pending: Future[None] | None = None
        self._check_data = check_data
        self._start = ResumeDecision(
            config, paths, self._directory, world, self._ranks, publishes_versions, self._check
        ).choose()
        self._saved = self._start.step
        self.stop_request = StopRequest(self._directory if self._options else None, self._start.branch, world)

    def _check(self, manifest: Mapping[str, Any]) -> list[str]:
        """Return the changed settings; ConfigError if a checkpoint cannot be resumed with these settings and data."""
        options, config = self._used_options(manifest), self._config.model_dump(mode="json")
        if manifest["data"] is not None and not options.skip_dataloader:
            self._check_data(manifest["data"])
        keeps_optimizer = not options.skip_optimizer
        return check_settings(
            manifest["command"], manifest["config"], self._config.command_name, config, keeps_optimizer
        )

    def _used_options(self, manifest: Mapping[str, Any]) -> CkptConfig:
        """Return the options of a resume: a restart that resumes a checkpoint of its own start skips nothing."""
        is_own = start_name() is not None and manifest.get("start") == start_name()
        return CkptConfig() if is_own or self._options is None else self._options

    @property
    def branch(self) -> int:
        """Branch of this run: 0, or one more than that of the resumed run."""
        return self._start.branch

    @property
    def required_branch(self) -> int | None:
        """Branch that batches must have; None accepts any, for a trainer without an orchestrator.

        An orchestrator that has not noticed a rollback yet may still write batches of the old branch.
        """
        return self._start.required_branch

    @property
    def resumes(self) -> bool:
        """Whether the run resumes a checkpoint, so that its version must be published again."""
        return self._start.commit is not None

    @property
    def is_saving(self) -> bool:
        """Whether a save in the background is not complete yet."""
        return self._options is not None and self._pending is not None and not self._pending.done()

    def restore(self, policy: nn.Module, optimizer: Optimizer, stream: DataStream | None = None) -> Progress:
        """Restore model, optimizer, random generators and data from the checkpoint, if this run resumes one.

        The keys `ckpt.skip_*` exclude parts, unless a restart resumes a checkpoint that its own start has written. A
        new run seeds its generators. Call it last before the first step, so that nothing draws random numbers between.
        Later saves read the same objects. Returns the progress at the start.

        Raises:
            ConfigError: the checkpoint is of another model, or of other data.
            RunError: it is damaged.
        """
        self._policy, self._optimizer, self._stream = policy, optimizer, stream
        state.seed_rng(self._world, self._config.seed)
        if self._options is None or self._start.commit is None:
            return Progress(self._start.step)
        part = self._checkpoint(self._start.step) / PART
        manifest = files.read_manifest(part, files.PART_FORMAT)
        options, changes = self._used_options(manifest), self._check(manifest)
        loaded = None if options.skip_optimizer else optimizer
        for line in changes if self._world.is_main else ():
            logger.warning(f"settings changed since the checkpoint; results will not be bit-identical: {line}")
        changed = [line for line in changes if line.startswith("model")]
        hint = f"; {changed[0]}" if changed else ""
        self._restore_generators(load_model_and_optimizer(part, policy, loaded, self._group, hint), manifest)
        if stream is not None and not options.skip_dataloader:
            self._ranks.gather(lambda: stream.restore(manifest["data"]))
        step = self._start.step
        self.schedule_start = step if options.skip_scheduler else manifest.get("schedule_start", 0)
        if self._world.is_main:
            skipped = [f"ckpt.{key}" for key in SKIPPED if getattr(options, key)]
            without = f", with {', '.join(skipped)}" if skipped else ""
            logger.info(f"resumed from {part.parent}, branch {self.branch}{without}")
            if self.required_branch is not None:
                logger.info("the orchestrator samples the batches from step {} again", self._start.step)
        return Progress(step) if options.skip_progress else Progress(**manifest["progress"])

    def step_done(self, progress: Progress, last: bool) -> None:
        """Save after step `progress.step - 1` if the interval is reached or it is the `last`. All ranks call it.

        Raises RunError if this save, or an earlier one in the background, failed.
        """
        if self._options is None:
            return
        self._poll()
        if last or not progress.step % self._options.interval:
            self._start_save(progress)

    def save_at_stop(self, progress: Progress) -> None:
        """Save before batch `progress.step` if a stop is agreed and it is not saved yet. All ranks call it.

        The orchestrator writes its part when it reads `STOP.json`. A failure is logged: the run ends anyway.
        """
        if self._options is None or not self.stop_request.is_agreed or progress.step in (0, self._saved):
            return
        try:
            self._wait()
            self._waits_for_orchestrator = self._publishes_versions and orchestrator_has_run(self._paths)
            self._start_save(progress)
            self._wait()
        except RunError as error:
            if self._world.is_main:
                logger.warning("{}", error)

    def _start_save(self, progress: Progress) -> None:
        assert self._options is not None
        self._wait()
        self._saved = progress.step
        tensors = {
            **state.model_tensors(self._policy),
            **state.optimizer_tensors(self._policy, self._optimizer),
            **state.rng_tensors(self._world),
        }
        config = self._config.model_dump(mode="json")
        fields = {
            "step": progress.step,
            "branch": self.branch,
            "command": self._config.command_name,
            "world": self._world.size,
            "device": self._world.device.type,
            "packages": package_versions(),
            "progress": asdict(progress),
            "start": start_name(),
            "schedule_start": self.schedule_start,
            "data": self._stream.state() if self._stream is not None else None,
            "config": config,
            "digest": files.settings_digest(settings_of(config)),
        }
        if not self._options.save_async:
            self._save(progress.step, tensors, fields)
        else:
            on_host = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
            save = partial(self._save, progress.step, on_host, fields)
            self._pending = start_daemon_future(save, "checkpoint", exit_wait_seconds=self._options.timeout_seconds)

    def close(self) -> None:
        """Wait for a save in the background. Raises RunError if it failed, DeadlineError after the timeout."""
        if self._options is not None:
            self._wait()
            _SavePlanner.forget(self._cache_key)

    def _save(self, step: int, tensors: Mapping[str, Tensor], fields: Mapping[str, Any]) -> None:
        """Write and commit; errors of the disk and of lost ranks become one line."""
        begin = time.perf_counter()
        checkpoint = self._checkpoint(step)
        try:
            with wrap_rank_errors(self._config.dist_timeout_seconds):
                self._write(checkpoint, tensors, fields)
        except (OSError, RunError, dcp.CheckpointException) as error:
            if self._world.is_main:
                shutil.rmtree(files.temporary_part(checkpoint, PART), ignore_errors=True)
                with suppress(OSError):  # another part is in it
                    checkpoint.rmdir()
            raise RunError(
                f"cannot save {checkpoint}: {summarize_dcp_error(error)} ({_free(self._directory)}); "
                "earlier checkpoints are complete"
            ) from error
        if self._world.is_main:
            size = sum(file.stat().st_size for file in (checkpoint / PART).iterdir()) / 1024**2
            logger.info(f"saved {checkpoint}: {size:,.1f} MiB in {time.perf_counter() - begin:.1f} s")

    def _write(self, checkpoint: Path, tensors: Mapping[str, Tensor], fields: Mapping[str, Any]) -> None:
        temporary = self._ranks.on_main(lambda: files.prepare_part(checkpoint, PART))
        writer = dcp.FileSystemWriter(temporary, sync_files=True)
        planner = _SavePlanner(self._cache_key)
        dcp.save(dict(tensors), storage_writer=writer, planner=planner, process_group=self._group)
        # Each rank hashes the files that it wrote, while its node still caches them.
        names = [f"__{self._world.rank}_*.distcp", *([".metadata"] if self._world.is_main else [])]
        own = (file for name in names for file in temporary.glob(name))
        hashes = self._ranks.gather(lambda: {file.name: files.hash_file(file) for file in own})
        together = {name: digest for some in hashes for name, digest in some.items()}
        self._ranks.on_main(lambda: self._commit(checkpoint, fields, together))

    def _commit(self, checkpoint: Path, fields: Mapping[str, Any], hashes: Mapping[str, str]) -> None:
        assert self._options is not None
        files.seal_part(files.temporary_part(checkpoint, PART), checkpoint / PART, fields, hashes)
        if self._waits_for_orchestrator:
            wait_for(checkpoint / files.ORCHESTRATOR, _ORCHESTRATOR_SECONDS, "the orchestrator")
        parts = (PART, *self._orchestrators(checkpoint))
        files.commit_checkpoint(checkpoint, self.branch, parts, fields["digest"])
        if self._waits_for_orchestrator:  # which may have written its part for several steps
            files.remove_unfinished(self._directory, below=fields["step"])
        kept = files.remove_old_checkpoints(self._directory, self._options.keep_last, self._options.keep_interval)
        first, self.first_needed_batch = self.first_needed_batch, kept[0]
        delete_rows(self._paths, below=kept[0], first=first, keeps=self._keeps_rows)

    def _poll(self) -> None:
        """Raise on all ranks if a background save failed on one; drop a save that is complete on all."""
        if self._pending is None:
            return
        done = self._pending.done()
        error = self._pending.exception() if done else None
        counts = self._world.sum(
            torch.tensor([float(error is not None), float(not done)], device=self._world.device)
        ).tolist()
        if error is not None:
            raise error
        if counts[0]:
            self._pending.result()
            raise RunError("saving a checkpoint failed on another rank, whose log says why")
        if not counts[1]:
            self._pending = None

    def _wait(self) -> None:
        if self._pending is None or self._options is None:
            return
        if not futures.wait([self._pending], self._options.timeout_seconds).done:
            raise DeadlineError(
                f"waited {self._options.timeout_seconds:.0f} s for a checkpoint to be written to {self._directory} "
                "(ckpt.timeout_seconds): the disk or another rank does not respond"
            )
        self._pending.result()
        self._pending = None

    def _orchestrators(self, checkpoint: Path) -> tuple[str, ...]:
        """Return the orchestrator's part, if there is one. Raises ArtifactError if it belongs to another batch."""
        part = checkpoint / files.ORCHESTRATOR
        if not part.exists():
            return ()
        step = step_of(checkpoint)
        assert step is not None, checkpoint
        manifest = files.read_manifest(part, files.PART_FORMAT)
        batch = self._paths.rollouts(step - 1) / MANIFEST
        if (manifest["branch"], manifest["batch"]) != (self.branch, files.hash_file(batch)):
            raise ArtifactError(f"{part} is of branch {manifest['branch']} and does not belong to {batch.parent}")
        return (files.ORCHESTRATOR,)

    def _restore_generators(self, reader: TensorReader, manifest: Mapping[str, Any]) -> None:
        """Restore this rank's generators; with another number of ranks they are seeded instead."""
        if manifest["world"] != self._world.size:
            return
        tensors = state.empty_rng_tensors(self._world, reader.read_metadata())
        dcp.load(tensors, storage_reader=reader, process_group=self._group)
        state.restore_rng(self._world, tensors)

    def _checkpoint(self, step: int) -> Path:
        return self._directory / f"step_{step}"


def _free(directory: Path) -> str:
    place = next(place for place in (directory, *directory.parents) if place.exists())
    return f"{shutil.disk_usage(place).free / 1024**3:.1f} GiB free"


_DECIDING = (
    "model.name", "model.revision", "model.lora", "model.dtype", "model.reduce_dtype", "model.debug", "optim",
    "scheduler", "loss", "reference", "num_minibatches", "data", "seed", "tokenizer.name", "rendering",
)  # fmt: skip
# Names that earlier releases wrote into checkpoints.
_RENAMED = {
    "minibatches": "num_minibatches",
    "optim.betas1": "optim.beta1",
    "optim.betas2": "optim.beta2",
    "optim.mu": "optim.momentum",
    "data.fake.generate_samples": "data.fake.variable_length",
    "model.download_timeout": "model.download_timeout_seconds",
}
# These change results by rounding at most.
_IGNORED = {"data.micro_batch_size", "model.lora.publish", "model.download_timeout_seconds"}


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Select them from a dumped configuration, as dotted keys.

    The learning rate is a function of the step and these settings, so a checkpoint contains no scheduler. A decaying
    schedule also depends on `max_steps`.
    """
    keys = {_RENAMED.get(key, key): value for key, value in _flat(config)}
    roots = tuple(f"{root}." for root in _DECIDING)
    chosen = {key: value for key, value in keys.items() if f"{key}.".startswith(roots) and key not in _IGNORED}
    if keys.get("scheduler.type") != "constant":
        chosen["max_steps"] = keys.get("max_steps")
    return chosen


def check_settings(
    old_command: str, before: Mapping[str, Any], command: str, now: Mapping[str, Any], keeps_optimizer: bool = True
) -> list[str]:
    """Return the changed settings, as `changed_settings`; ConfigError if a run of `command` cannot be resumed.

    The data and environments check their own settings when their position is restored.
    """
    if old_command != command:
        raise ConfigError(
            f"the checkpoint was written by {old_command}, not by {command}; to start from its weights, export them "
            "(`uv run export`) and set model.name to the folder"
        )
    had, has = before["optim"]["type"], now["optim"]["type"]
    if had != has and keeps_optimizer:
        raise ConfigError(
            f"optim.type = {has}, but the checkpoint has the state of {had}; resume with that, or without that state: "
            "--ckpt.skip-optimizer"
        )
    return changed_settings(before, now)


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Describe each setting that differs in one line; keys that one version of the program lacks are ignored."""
    old, new = settings_of(before), settings_of(now)
    differing = {key: (repr(old[key]), repr(new[key])) for key in old.keys() & new.keys() if old[key] != new[key]}
    differing |= dict.fromkeys(_switched_on(old, new), ("None", "set"))
    differing |= dict.fromkeys(_switched_on(new, old), ("set", "None"))
    return [
        f"{key} was {was} when the checkpoint was written and is {is_}" for key, (was, is_) in sorted(differing.items())
    ]


def _switched_on(old: Mapping[str, Any], new: Mapping[str, Any]) -> set[str]:
    """Blocks that are None in `old` and have keys in `new`."""
    off = {key for key, value in old.items() if value is None}
    return {key for key in off if any(other.startswith(f"{key}.") for other in new)}


def _flat(block: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in block.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{key}.")
        else:
            yield key, value
