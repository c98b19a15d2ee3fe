"""I4, I5: a policy version is published whole, by one rename, with the hash of every tensor in its manifest.

Training goes on meanwhile. Every rank copies its own shards to host memory; a thread of its own then exchanges and
writes them over a process group of its own, each rank some of the files. Versions are written one after the other and
none is left out: a version waits until the one before is complete. What goes wrong ends the same way on every rank, at
the next `check`, `start`, `wait` or `close`. I7: a version that is not written in time does so too; a disk that hangs
keeps nobody waiting, not even the end of the process.
"""

import re
import shutil
import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase

from prime_rl.configs.broadcast import TransferConfig
from prime_rl.errors import ConfigError, RunError
from prime_rl.run.artifact import WEIGHTS_FORMAT, begin, commit, fsync
from prime_rl.run.surroundings import describe
from prime_rl.run.tensors import content_hash
from prime_rl.run.wait import DeadlineError
from prime_rl.trainer.adapter_files import ADAPTER_CONFIG
from prime_rl.trainer.checkpoints.agreement import Agreement
from prime_rl.trainer.model import PolicyModel
from prime_rl.trainer.parallel import World, lost_ranks_told
from prime_rl.trainer.publication.canary import canary_row, measure_canary
from prime_rl.trainer.publication.deltas import Deltas
from prime_rl.trainer.publication.files import Hashes, write_files, write_index
from prime_rl.trainer.publication.plan import make_plan
from prime_rl.trainer.publication.snapshot import Snapshot
from prime_rl.trainer.publication.sources import Sources
from prime_rl.trainer.publication.transfer import Transfer
from prime_rl.types import PolicyVersion

_GIB = 2**30
_UNFINISHED = re.compile(r"\.tmp-step_\d+-(\d+)")


@dataclass(slots=True)
class _Job:
    """One version on its way.

    Attributes:
        copied: set when the weights may change.
        canary: what gives its log-probabilities.
        done: set when it is published, or has failed with `error`.
        doing: what is being done for it, for messages.
    """

    target: Path
    place: Path
    fields: dict[str, Any]
    started: float
    copied: threading.Event = field(default_factory=threading.Event)
    canary: Future[Callable[[], list[float]]] = field(default_factory=Future)
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    seconds: float | None = None
    bytes: int | None = None
    last: bool = False
    doing: str = "the weights are copied"


class Publisher:
    """Writes versions of one policy in Hugging Face layout, or its adapters in peft's."""

    def __init__(
        self,
        policy: PolicyModel,
        tokenizer: PreTrainedTokenizerBase,
        dtype: torch.dtype,
        world: World,
        shard_bytes: int = 2 * 1024**3,
        *,
        directory: Path | None = None,
        canary: torch.dtype | None = None,
        full_interval: int | None = None,
        transfer: TransferConfig | None = None,
        timeout_s: float = 1200,
        twin: Callable[[], PolicyModel | None] = lambda: None,
    ) -> None:
        """Plan the work and reserve host memory for one version. All ranks call it together.

        Args:
            policy: sharded; its parameters are read at each publication.
            tokenizer: published beside the weights.
            dtype: of the published floating-point tensors.
            world: the ranks that hold the shards.
            shard_bytes: a file of weights ends when it has reached this size.
            directory: where versions are written, with a link to each at its target; None is at the target itself.
            canary: precision of the policy's forward pass, if versions are to say what it makes of the canary.
            full_interval: which versions are full, the others being deltas; None makes all of them full.
            transfer: how versions but the last go from memory to memory; None writes all of them to files.
            timeout_s: longest time to write one version.
            twin: makes, at the first publication, what scores the canary while training goes on (`plain_twin`); where
                it gives None the policy does so itself, in `start`.

        Raises:
            ConfigError: `directory` has no room for two versions, or `transfer` is not possible here.
        """
        self._policy, self._world, self._directory, self._timeout_s = policy, world, directory, timeout_s
        self._sources = Sources(policy, dtype)
        self._deltas = Deltas(full_interval, world)
        tensors = self._sources.tensors()
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=world.timeout_s))
        self._ranks = Agreement(world, self._group)
        self._plan = make_plan(
            self._sources.blocks,
            tensors,
            {name: self._sources.host_dtype(name, tensor) for name, tensor in tensors.items()},
            lambda mine: self._ranks.gather(lambda: mine),
            shard_bytes,
            single=self._sources.adapters_alone,
        )
        self._ranks.on_lead(self._check_room)
        if transfer is not None and self._sources.adapters_alone:
            raise ConfigError(
                "model.lora.publish = 'adapter' with weight_broadcast.type = "
                f"{transfer.type!r}: adapters are small and travel through files; use 'filesystem'"
            )
        self._transfer = None if transfer is None else Transfer(transfer, world, self._ranks)
        self._snapshot: Snapshot | None = None
        self._companions = self._sources.companions(tokenizer) if world.leads else {}
        self._canary = None if canary is None else (canary_row(policy.vocabulary).to(world.device), canary)
        self._make_twin = twin
        self._twin: PolicyModel | None = None
        self._scorer = ThreadPoolExecutor(1, "canary")
        self._guarded = False
        self._job: _Job | None = None
        self._finished: _Job | None = None
        self._publish_wait_s = self._copy_wait_s = self._canary_s = 0.0

    def guard(self, optimizer: Optimizer) -> None:
        """Let updates of `optimizer` wait until the weights are copied, so that `start` need not."""
        optimizer.register_step_pre_hook(lambda *_: self._await_copy())
        self._guarded = True

    def publish(self, target: Path, version: PolicyVersion) -> None:
        """Publish the current weights as `version` at `target`, and return when that is done; as `start` otherwise."""
        self.start(target, version)
        self.wait()

    def start(self, target: Path, version: PolicyVersion, last: bool = False) -> None:
        """Begin to publish the current weights as `version` at `target`. All ranks call it together.

        Waits until the version before is complete. On return training may go on.

        Args:
            target: the directory to appear; it must not exist yet.
            version: which one.
            last: none follows: it is written at its target, wherever the others were.

        Raises:
            RunError: the version before could not be written.
        """
        begun = time.perf_counter()
        self.wait()
        self._publish_wait_s = time.perf_counter() - begun
        fields: dict[str, Any] = {"format": WEIGHTS_FORMAT, "branch": version.branch, "step": version.step}
        place = target if last or self._directory is None else self._home(target) / target.name
        if self._snapshot is None:
            self._snapshot = Snapshot(self._plan, self._world.rank, self._world.device)
            self._twin = None if self._canary is None else self._make_twin()
        job = self._job = _Job(target, place, fields, time.perf_counter(), last=last)
        on_host = self._snapshot.enqueue(self._sources.tensors())
        # A daemon: it may wait for a disk that hangs, or for ranks that are gone, and nothing may wait for it then.
        threading.Thread(target=self._run, args=(job, on_host), name="publication", daemon=True).start()
        if self._world.size == 1:  # whatever ends training, the process stays until the version is there
            threading.Thread(target=job.done.wait, args=(self._timeout_s,), name="publication-end").start()
        if self._canary is not None:
            begun = time.perf_counter()
            if self._twin is None:
                self._score(job, self._policy)
            else:
                self._scorer.submit(self._score, job, self._twin)
            self._canary_s = time.perf_counter() - begun
        if not self._guarded:
            self._await_copy()

    def check(self) -> None:
        """Raise what has gone wrong so far.

        Raises:
            RunError: a version could not be written: the disk is full or not writable, or its target exists already;
                or it could not be sent.
        """
        if self._transfer is not None:
            self._transfer.check()
        if self._job is not None and self._job.done.is_set():
            self.wait()

    def wait(self) -> None:
        """Wait until every version that was started is complete.

        Raises:
            RunError: as `check`.
            DeadlineError: one was not complete in time.
        """
        if self._job is None:
            return
        self._in_time(self._job, self._job.done.wait)
        job, self._job = self._job, None
        if job.error is not None:
            raise job.error
        self._finished = job

    def close(self) -> None:
        """Wait until all versions are complete and nothing is being sent any more.

        Raises:
            RunError: as `check`.
        """
        self.wait()
        if self._transfer is not None:
            self._transfer.close()

    def metrics(self) -> dict[str, float | None]:
        """Return seconds that training spent on the latest version, and the seconds and bytes of writing.

        `time/publish_wait` for the version before to be complete, `publish/canary` on the forward pass of the canary,
        where no twin does it, `publish/copy_wait` before the update of the step, for copy and twin's canary of the
        version before. `publish/seconds`, from the start to the rename, and `publish/bytes` are of the latest version
        that is complete.
        """
        waited, self._copy_wait_s = self._copy_wait_s, 0.0
        if self._job is not None and self._job.done.is_set() and self._job.error is None:
            self._finished = self._job
        done = self._finished
        return {
            "time/publish_wait": self._publish_wait_s,
            "publish/canary": self._canary_s,
            "publish/copy_wait": waited,
            "publish/seconds": done.seconds if done else None,
            "publish/bytes": done.bytes if done else None,
        }

    def _await_copy(self) -> None:
        """The weights are about to change: wait until they are copied (on CUDA the device waits, not this thread) and a
        twin has scored the canary.
        """
        if self._job is None or self._snapshot is None:
            return
        begun = time.perf_counter()
        self._snapshot.hold_back()
        job = self._job
        self._in_time(job, job.copied.wait)
        if self._twin is not None:
            self._in_time(job, lambda seconds: not futures.wait([job.canary], seconds).not_done)
        self._copy_wait_s += time.perf_counter() - begun

    def _in_time(self, job: _Job, wait: Callable[[float], bool]) -> None:
        """Wait for a part of `job`, until it has taken as long as it may.

        Raises:
            DeadlineError: says what it was at.
        """
        if not wait(max(0.0, job.started + self._timeout_s - time.perf_counter())):
            raise DeadlineError(
                f"waited {self._timeout_s:.0f} s for {job.target} to be written (weight_broadcast.timeout): {job.doing}"
            )

    def _score(self, job: _Job, policy: PolicyModel) -> None:
        assert self._canary is not None
        try:
            job.canary.set_result(measure_canary(policy, self._canary[0]))
        except BaseException as error:
            job.canary.set_exception(error)  # the thread that writes waits for it
            raise

    def _run(self, job: _Job, on_host: list[tuple[Tensor, Tensor]]) -> None:
        """Do what is left of `job`, in a thread of its own."""
        assert self._snapshot is not None
        try:
            with torch.no_grad():
                for place, shard in on_host:
                    place.copy_(shard)
            job.copied.set()
            self._snapshot.finish()
            who = "" if self._world.size == 1 else "another rank, or "
            job.doing = f"{who}the disk of {job.place.parent} does not answer"
            with lost_ranks_told(self._world.timeout_s):
                self._write(job, self._snapshot.buffer)
        except BaseException as error:  # noqa: BLE001  raised again by `wait`, in the thread that can end the run
            job.error = error
        finally:
            job.copied.set()
            job.seconds = time.perf_counter() - job.started
            job.done.set()

    def _write(self, job: _Job, buffer: Tensor) -> None:
        """Write the version; every rank ends with the same error, or none."""
        temporary, rank = None, self._world.rank
        self._deltas.begin(job.target.name, PolicyVersion(job.fields["branch"], job.fields["step"]), job.last)
        try:
            temporary = self._ranks.on_lead(lambda: self._begin(job))
            if self._transfer is not None and not job.last:
                parts = self._transfer.take(self._plan, self._sources, buffer, self._group, job.target.name)
            else:
                parts = self._ranks.gather(
                    lambda: write_files(
                        temporary, self._plan, self._sources, buffer, rank, self._group, self._deltas.write
                    )
                )
            job.bytes, content = self._ranks.on_lead(lambda: self._commit(job, temporary, parts))
            self._deltas.complete(content)
        except RunError as error:
            if self._world.leads and temporary is not None:
                shutil.rmtree(temporary, ignore_errors=True)
            raise RunError(f"cannot publish {job.target}: {error}") from error

    def _begin(self, job: _Job) -> Path:
        if job.target.exists() or job.target.is_symlink():
            raise RunError(f"{job.target} exists already; an artifact is never written twice")
        for directory in {job.target.parent, job.place.parent}:
            directory.mkdir(parents=True, exist_ok=True)
            if self._finished is None:
                _clear_unfinished(directory)
        if job.place != job.target:
            shutil.rmtree(job.place, ignore_errors=True)  # of a line that a resume has left
        temporary = begin(job.place)
        if not self._deltas.active:  # those of a delta's base are the same
            for name, content in self._companions.items():
                (temporary / name).write_bytes(content)
        return temporary

    def _commit(self, job: _Job, temporary: Path, parts: list[Hashes]) -> tuple[int, str]:
        hashes = {name: tensors for part in parts for name, tensors in part.items()}
        if not self._deltas.active:
            write_index(temporary, hashes)
        tensors = {name: digest for file in hashes.values() for name, digest in file.items()}
        fields = {**job.fields, "tensors": tensors, "hash": content_hash(tensors), **self._canary_fields(job)}
        fields |= self._deltas.fields()
        if self._transfer is not None and not job.last:
            fields |= self._transfer.fields()
        if self._sources.adapters_alone:
            # Scale and layers are not in the tensors' hashes, and are as much part of the version.
            fields["adapter"] = xxhash.xxh3_128_hexdigest(self._companions[ADAPTER_CONFIG])
        manifest = commit(temporary, job.place, fields)
        if job.place != job.target:
            job.target.symlink_to(job.place)
            fsync(job.target.parent)
        sent = 0 if self._transfer is None or job.last else self._transfer.bytes
        return sent + sum(manifest["files"].values()), manifest["hash"]

    def _canary_fields(self, job: _Job) -> dict[str, Any]:
        if self._canary is None:
            return {}
        row, dtype = self._canary
        job.doing = "the canary is scored"
        answer = {"token_ids": row.tokens.tolist(), "logprobs": job.canary.result()()}
        return {"canary": {**answer, "dtype": str(dtype).removeprefix("torch.")}}

    def _home(self, target: Path) -> Path:
        """A folder of this run's own in the directory that several may use."""
        assert self._directory is not None
        run = xxhash.xxh3_64_hexdigest(str(target.parent.resolve()).encode())
        return self._directory.resolve() / f"prime_rl-{run}"

    def _check_room(self) -> None:
        """The version that is being written and the one that is sampled from must fit."""
        if self._directory is None:
            return
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self._directory).free
        except OSError as error:
            raise ConfigError(f"weight_broadcast.directory: {describe(error)}") from None
        count, word = self._deltas.room
        needed = count * self._plan.total_bytes
        if free < needed:
            raise ConfigError(
                f"weight_broadcast.directory: {self._directory} has {free / _GIB:.1f} GiB free, and {word} versions "
                f"take {needed / _GIB:.1f} GiB; make room, or leave the key out to use the run directory"
            )


def _clear_unfinished(directory: Path) -> None:
    """Remove what processes that are no more have not finished."""
    for entry in directory.iterdir():
        match = _UNFINISHED.fullmatch(entry.name)
        if match and not Path(f"/proc/{match[1]}").exists():
            shutil.rmtree(entry, ignore_errors=True)
