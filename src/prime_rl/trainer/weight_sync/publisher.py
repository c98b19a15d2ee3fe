"""Publishes versions of the policy in the background: whole, by one rename, with the hash of each tensor (I4, I5).

Versions are published in order and none is skipped. An error has the same effect on every rank: the next `start`,
`check`, `wait` or `close` raises it. A version that is not complete in time raises too (I7).
"""

import math
import re
import shutil
import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase

from prime_rl.configs.training.broadcast import BroadcastConfig, FileBroadcastConfig
from prime_rl.core.daemon_futures import start_daemon_future
from prime_rl.core.errors import ConfigError, RunError
from prime_rl.core.os_errors import summarize_os_error
from prime_rl.core.types import PolicyVersion
from prime_rl.liveness.timeline_writer import TimelineWriter
from prime_rl.storage.artifact import WEIGHTS_FORMAT, begin_artifact, commit_artifact, fsync
from prime_rl.storage.tensor_hashes import content_hash
from prime_rl.storage.wait_for import DeadlineError
from prime_rl.trainer.checkpoints.rank_consensus import RankConsensus
from prime_rl.trainer.model.policy_model import PolicyModel
from prime_rl.trainer.parallel.process_group import World, wrap_rank_errors
from prime_rl.trainer.policy_canary import canary_row, measure_canary
from prime_rl.trainer.weight_sync.delta import DeltaTransport
from prime_rl.trainer.weight_sync.filesystem import FilesystemTransport, write_index
from prime_rl.trainer.weight_sync.gather_plan import HostSnapshot, make_plan
from prime_rl.trainer.weight_sync.memory import MemoryTransport
from prime_rl.trainer.weight_sync.published_state_dict import PublishedStateDict
from prime_rl.trainer.weight_sync.transport import Hashes, PieceExchange, WeightTransport
from prime_rl.trainer.weights.adapter_files import ADAPTER_CONFIG

_FILES = FileBroadcastConfig()
_GIB = 2**30
_UNFINISHED = re.compile(r"\.tmp-step_\d+-(\d+)")


@dataclass(slots=True)
class _Job:
    """The publication of one version.

    Attributes:
        target: the path in the run directory.
        directory: where the version is written; `target` links to it if it differs.
        version: branch and step.
        transport: delivers the version.
        started: time of `Publisher.start`.
        canary: a function that returns the log-probabilities of the canary; None if none is published.
        last: no version follows.
        copied: set when the weights may change.
        done: done when the version is published or has failed.
        seconds, bytes: duration and size, once published.
        activity: what the job is doing, for messages.
    """

    target: Path
    directory: Path
    version: PolicyVersion
    transport: WeightTransport
    started: float
    canary: Future[Callable[[], list[float]]] | None
    last: bool
    copied: threading.Event = field(default_factory=threading.Event)
    done: Future[None] = field(default_factory=Future)
    seconds: float | None = None
    bytes: int | None = None
    activity: str = "copying the weights"


class Publisher:
    """Writes versions of one policy in Hugging Face layout, or its adapters in peft's."""

    def __init__(
        self,
        policy: PolicyModel,
        tokenizer: PreTrainedTokenizerBase,
        dtype: torch.dtype,
        world: World,
        options: BroadcastConfig = _FILES,
        *,
        shard_bytes: int = 2 * 1024**3,
        num_writers: int | None = None,
        canary: torch.dtype | None = None,
        canary_model: Callable[[], PolicyModel | None] = lambda: None,
        timeline: TimelineWriter | None = None,
    ) -> None:
        """Plan the publication; the host memory for one version is allocated at the first one. All ranks call it.

        Args:
            policy: sharded; its parameters are read at each publication.
            tokenizer: published with the weights.
            dtype: of the published floating-point tensors.
            world: the ranks that hold the shards.
            options: how versions reach inference. The last one is always written to files.
            shard_bytes: a file of weights ends when it reaches this size.
            num_writers: the first ranks, which write the files; None is all.
            canary: precision of the policy's forward pass, to publish the canary; None publishes none.
            canary_model: builds the model that scores the canary while training continues (`unsharded_copy`). If it
                returns None, the policy scores the canary in `start`.
            timeline: gets a phase for each version, from the copy of the weights until it is complete.

        Raises:
            ConfigError: `directory` has too little free space, or the transport does not support several ranks.
        """
        files = options if isinstance(options, FileBroadcastConfig) else _FILES
        self._policy, self._world, self._timeline = policy, world, timeline
        self._directory, self._timeout_s = files.directory, options.timeout_seconds
        self._state_dict = PublishedStateDict(policy, dtype)
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=world.timeout_s))
        self._ranks = RankConsensus(world, group)
        self._plan = make_plan(self._state_dict, self._ranks, shard_bytes, num_writers)
        exchange = PieceExchange(self._plan, self._state_dict, world, self._ranks, group)
        self._files = (
            DeltaTransport(files.delta.full_interval, exchange) if files.delta else FilesystemTransport(exchange)
        )
        self._ranks.on_main(self._check_free_space)
        self._memory = None if isinstance(options, FileBroadcastConfig) else MemoryTransport(options, exchange)
        self._snapshot: HostSnapshot | None = None
        self._companions = self._state_dict.companions(tokenizer) if world.is_main else {}
        row = canary_row(policy.vocabulary)
        # A list: reading the row's tokens from CUDA would wait for all queued training.
        self._canary_tokens: list[int] = row.tokens.tolist()
        self._canary = None if canary is None else (row.to(world.device), canary)
        self._make_canary_model = canary_model
        self._canary_model: PolicyModel | None = None
        self._scorer = ThreadPoolExecutor(1, "canary")
        self._guarded = False
        self._job: _Job | None = None
        self._finished: _Job | None = None
        self._publish_wait_s = self._copy_wait_s = self._canary_s = 0.0

    def guard(self, optimizer: Optimizer) -> None:
        """Make updates of `optimizer` wait until the weights are copied; without it `start` waits."""
        optimizer.register_step_pre_hook(lambda *_: self._await_copy())
        self._guarded = True

    def publish(self, target: Path, version: PolicyVersion) -> None:
        """Publish the current weights as `version` at `target`, and wait until they are published."""
        self.start(target, version)
        self.wait()

    def start(self, target: Path, version: PolicyVersion, last: bool = False) -> None:
        """Start to publish the current weights as `version` at `target`. All ranks call it together.

        Waits until the previous version is complete. Training may continue when it returns.

        Args:
            target: the directory of the version; it must not exist yet.
            version: branch and step.
            last: no version follows. The last version is always written to files at its target.

        Raises:
            RunError: the previous version could not be published.
        """
        started = time.perf_counter()
        self.wait()
        self._publish_wait_s = time.perf_counter() - started
        directory = target
        if self._directory is not None and not last:  # several runs may share it
            run = xxhash.xxh3_64_hexdigest(str(target.parent.resolve()).encode())
            directory = self._directory.resolve() / f"prime_rl-{run}" / target.name
        transport = self._files if last or self._memory is None else self._memory
        if self._snapshot is None:
            self._snapshot = HostSnapshot(self._plan, self._world.rank, self._world.device)
            self._canary_model = None if self._canary is None else self._make_canary_model()
        on_host = self._snapshot.enqueue(self._state_dict.tensors())
        job = _Job(target, directory, version, transport, time.perf_counter(), self._score_canary(), last)
        # With one rank, the process stays alive until the version is published, also after an error.
        end = self._timeout_s if self._world.size == 1 else 0.0
        job.done = start_daemon_future(partial(self._run, job, on_host), "publication", exit_wait_seconds=end)
        self._job = job
        if not self._guarded:
            self._await_copy()

    def check(self) -> None:
        """Raise RunError if a version could not be written or sent."""
        if self._memory is not None:
            self._memory.check()
        if self._job is not None and self._job.done.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the current version is complete. Raises as `check`, or DeadlineError after the timeout."""
        job = self._job
        if job is None:
            return
        self._wait_in_time(job, lambda seconds: not futures.wait([job.done], seconds).not_done)
        self._job = None
        job.done.result()
        self._finished = job

    def close(self) -> None:
        """Wait until all versions are complete and all transfers have finished. Raises as `wait`."""
        self.wait()
        if self._memory is not None:
            self._memory.close()

    def metrics(self) -> dict[str, float | None]:
        """Metrics of the latest publication and of the latest complete version; see `trainer_metric_table`."""
        waited, self._copy_wait_s = self._copy_wait_s, 0.0
        is_done = self._job is not None and self._job.done.done() and self._job.done.exception() is None
        done = self._job if is_done else self._finished
        return {
            "time/publish_wait": self._publish_wait_s,
            "weight_sync/canary": self._canary_s,
            "weight_sync/copy_wait": waited,
            "weight_sync/seconds": done.seconds if done else None,
            "weight_sync/bytes": done.bytes if done else None,
        }

    def _await_copy(self) -> None:
        """Wait until the weights may change: they are copied (on CUDA the device waits) and the canary is scored."""
        job = self._job
        if job is None or self._snapshot is None:
            return
        started = time.perf_counter()
        self._snapshot.delay_device_work()
        self._wait_in_time(job, job.copied.wait)
        if (canary := job.canary) is not None:
            self._wait_in_time(job, lambda seconds: not futures.wait([canary], seconds).not_done)
        self._copy_wait_s += time.perf_counter() - started

    def _wait_in_time(self, job: _Job, wait: Callable[[float], bool]) -> None:
        """Wait for a part of `job` within the job's timeout; raise DeadlineError with its activity."""
        if not wait(max(0.0, job.started + self._timeout_s - time.perf_counter())):
            raise DeadlineError(
                f"waited {self._timeout_s:.0f} s for {job.target} to be written "
                f"(weight_broadcast.timeout_seconds): {job.activity}"
            )

    def _score_canary(self) -> "Future[Callable[[], list[float]]] | None":
        """Score the canary, in a thread if there is a model for it."""
        if self._canary is None:
            return None
        started, row = time.perf_counter(), self._canary[0]
        if self._canary_model is not None:
            scored = self._scorer.submit(measure_canary, self._canary_model, row)
        else:
            scored = Future()
            scored.set_result(measure_canary(self._policy, row))
        self._canary_s = time.perf_counter() - started
        return scored

    def _run(self, job: _Job, on_host: list[tuple[Tensor, Tensor]]) -> None:
        """Copy the weights and publish them, in the writer thread."""
        assert self._snapshot is not None
        started = time.time()
        try:
            with torch.no_grad():
                for target, shard in on_host:
                    target.copy_(shard)
        finally:
            job.copied.set()
        self._snapshot.finish()
        other = "" if self._world.size == 1 else "another rank or "
        job.activity = f"waiting for {other}the disk of {job.directory.parent}"
        with wrap_rank_errors(self._world.timeout_s):
            self._write(job, self._snapshot.buffer)
        job.seconds = time.perf_counter() - job.started
        if self._timeline is not None:
            self._timeline.add("write version", started, time.time(), version=job.version.step)

    def _write(self, job: _Job, buffer: Tensor) -> None:
        """Publish the version; every rank raises the same error, or none."""
        temporary, transport = None, job.transport
        transport.begin(job.target.name, job.version, job.last)
        try:
            temporary = self._ranks.on_main(lambda: self._begin(job))
            parts = transport.deliver(temporary, buffer, job.target.name)
            job.bytes, content = self._ranks.on_main(lambda: self._commit(job, temporary, parts))
            transport.complete(content)
        except RunError as error:
            if self._world.is_main and temporary is not None:
                shutil.rmtree(temporary, ignore_errors=True)
            raise RunError(f"cannot publish {job.target}: {error}") from error

    def _begin(self, job: _Job) -> Path:
        if job.target.exists() or job.target.is_symlink():
            raise RunError(f"{job.target} exists already; an artifact is never written twice")
        for directory in {job.target.parent, job.directory.parent}:
            directory.mkdir(parents=True, exist_ok=True)
            for entry in directory.iterdir() if self._finished is None else ():
                match = _UNFINISHED.fullmatch(entry.name)
                if match and not Path(f"/proc/{match[1]}").exists():
                    shutil.rmtree(entry, ignore_errors=True)  # of a process that has exited
        if job.directory != job.target:
            shutil.rmtree(job.directory, ignore_errors=True)  # of a branch that a resume rolled back
        temporary = begin_artifact(job.directory)
        if not job.transport.is_delta:  # a delta uses those of its base
            for name, content in self._companions.items():
                (temporary / name).write_bytes(content)
        return temporary

    def _commit(self, job: _Job, temporary: Path, parts: list[Hashes]) -> tuple[int, str]:
        hashes = {name: tensors for part in parts for name, tensors in part.items()}
        if not job.transport.is_delta:
            write_index(temporary, hashes)
        tensors = {name: digest for file in hashes.values() for name, digest in file.items()}
        fields: dict[str, Any] = {"format": WEIGHTS_FORMAT, "branch": job.version.branch, "step": job.version.step}
        fields |= {"tensors": tensors, "hash": content_hash(tensors), **self._canary_fields(job)}
        fields |= job.transport.manifest_fields()
        if self._state_dict.adapters_alone:
            # The scale and the layers are part of the version, but not of the tensors' hashes.
            fields["adapter"] = xxhash.xxh3_128_hexdigest(self._companions[ADAPTER_CONFIG])
        manifest = commit_artifact(temporary, job.directory, fields)
        if job.directory != job.target:
            job.target.symlink_to(job.directory)
            fsync(job.target.parent)
        return job.transport.bytes_in_memory + sum(manifest["files"].values()), manifest["hash"]

    def _canary_fields(self, job: _Job) -> dict[str, Any]:
        if self._canary is None or job.canary is None:
            return {}
        job.activity = "scoring the canary"
        dtype = str(self._canary[1]).removeprefix("torch.")
        return {"canary": {"token_ids": self._canary_tokens, "logprobs": job.canary.result()(), "dtype": dtype}}

    def _check_free_space(self) -> None:
        if self._directory is None:
            return
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self._directory).free
        except OSError as error:
            raise ConfigError(f"weight_broadcast.directory: {summarize_os_error(error)}") from None
        count = self._files.num_versions
        needed = count * sum(math.prod(s.shape) * s.dtype.itemsize for s in self._plan.sources)
        if free < needed:
            raise ConfigError(
                f"weight_broadcast.directory: {self._directory} has {free / _GIB:.1f} GiB free, but {count} versions "
                f"need {needed / _GIB:.1f} GiB; free some space, or omit the key to use the run directory"
            )
