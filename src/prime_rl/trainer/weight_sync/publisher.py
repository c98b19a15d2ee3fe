"""Publishes versions of the policy in the background: whole, by one rename, with the hash of each tensor (I4, I5).

Versions are published in order and none is skipped. An error has the same effect on every rank: the next `start`,
`check`, `wait` or `close` raises it. A version that is not complete in time raises too (I7).

A version's canary are the log-probabilities of a few fixed tokens, by which inference verifies the loaded weights
(I5, I6).
"""

import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase

from prime_rl.configs.training.broadcast import BroadcastConfig, FileBroadcastConfig
from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.core.errors import ConfigError, RunError, translate_error
from prime_rl.core.import_utils import package_versions
from prime_rl.core.types import PolicyVersion
from prime_rl.liveness.timeline_writer import TimelineWriter
from prime_rl.storage.artifact import WEIGHTS_FORMAT, begin_artifact, commit_artifact, fsync
from prime_rl.storage.tensor_hashes import content_hash
from prime_rl.storage.wait_for import DeadlineError, start_daemon_future
from prime_rl.storage.weights.canary import canary_tokens, parse_canary
from prime_rl.trainer.fsdp import reshard_policy
from prime_rl.trainer.micro_batch import MicroBatch, make_micro_batch
from prime_rl.trainer.model.lora import add_adapters
from prime_rl.trainer.model.policy_model import PolicyModel, build_policy
from prime_rl.trainer.parallel.device_mesh import local_tensor
from prime_rl.trainer.parallel.process_group import RankConsensus, World, wrap_rank_errors
from prime_rl.trainer.weight_sync.gather_plan import HostSnapshot, PublishedStateDict, make_plan
from prime_rl.trainer.weight_sync.memory_sender import MemoryTransport
from prime_rl.trainer.weight_sync.transport import (
    FilesystemTransport,
    Hashes,
    PieceExchange,
    WeightTransport,
    write_index,
)
from prime_rl.trainer.weights.adapter_files import ADAPTER_CONFIG

TRANSPORTS: dict[str, type[WeightTransport]] = {
    "filesystem": FilesystemTransport,
    "nccl": MemoryTransport,
    "ipc": MemoryTransport,
}
"""By `weight_broadcast.type`."""
_FILES = FileBroadcastConfig()
_UNFINISHED = re.compile(r"\.tmp-step_\d+-(\d+)")


@dataclass(slots=True)
class _Job:
    """The publication of one version.

    Attributes:
        target: the path in the run directory.
        directory: where the version is written; `target` links to it if it differs.
        version: branch and step.
        started: time of `Publisher.start`.
        canary: future of a function that returns the log-probabilities of the canary; None if none is published.
        last: no version follows.
        copied: set when the weights may change.
        done: done when the version is published or has failed.
        seconds, bytes: duration and size, once published.
        activity: what the job is doing, for messages.
    """

    target: Path
    directory: Path
    version: PolicyVersion
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
        base_logprobs: Sequence[float] = (),
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
            base_logprobs: the canary's log-probabilities under the base model, published with each canary.
            canary_model: builds the model that scores the canary while training continues (`unsharded_copy`). If it
                returns None, the policy scores the canary in `start`.
            timeline: gets a phase for each version, from the copy of the weights until it is complete.

        Raises:
            ConfigError: `directory` has too little free space, or the transport does not support several ranks.
        """
        self._policy, self._world, self._timeline = policy, world, timeline
        self._timeout_seconds = options.timeout_seconds
        self._state_dict = PublishedStateDict(policy, dtype)
        group = world.new_group()
        self._ranks = RankConsensus(world, group)
        self._plan = make_plan(self._state_dict, self._ranks, shard_bytes, num_writers)
        exchange = PieceExchange(self._plan, self._state_dict, world, self._ranks, group)
        self._transport = TRANSPORTS[options.type].create(options, exchange)
        self._snapshot: HostSnapshot | None = None
        self._companions = self._state_dict.companions(tokenizer) if world.is_main else {}
        row = canary_row(policy.vocabulary)
        # A list: reading the row's tokens from CUDA would wait for all queued training.
        self._canary_tokens: list[int] = row.tokens.tolist()
        self._canary = None if canary is None else (row.to(world.device), canary)
        self._base_logprobs = list(base_logprobs)
        self._make_canary_model = canary_model
        self._canary_model: PolicyModel | None = None
        self._scorer = ThreadPoolExecutor(1, "canary")
        self._guarded = False
        self._job: _Job | None = None
        self._finished: _Job | None = None
        self._publish_wait_seconds = self._copy_wait_seconds = self._canary_seconds = 0.0

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
        self._publish_wait_seconds = time.perf_counter() - started
        directory = target
        if self._transport.directory is not None and not last:  # several runs may share it
            run = xxhash.xxh3_64_hexdigest(str(target.parent.resolve()).encode())
            directory = self._transport.directory.resolve() / f"prime_rl-{run}" / target.name
        if self._snapshot is None:
            self._snapshot = HostSnapshot(self._plan, self._world.rank, self._world.device)
        if self._canary is not None and self._canary_model is None:
            self._canary_model = self._make_canary_model()
        on_host = self._snapshot.enqueue(self._state_dict.tensors())
        job = _Job(target, directory, version, time.perf_counter(), self._score_canary(), last)
        # With one rank, the process stays alive until the version is published, also after an error.
        end = self._timeout_seconds if self._world.size == 1 else 0.0
        job.done = start_daemon_future(partial(self._run, job, on_host), "publication", exit_wait_seconds=end)
        self._job = job
        if not self._guarded:
            self._await_copy()

    @property
    def is_writing(self) -> bool:
        """Whether a version is not complete yet."""
        return self._job is not None and not self._job.done.done()

    def check(self) -> None:
        """Raise RunError if a version could not be written or sent, or not in time."""
        self._transport.check()
        job, late = self._job, time.perf_counter() - self._timeout_seconds
        if job is not None and (job.done.done() or late > job.started):
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
        self._transport.close()

    def metrics(self) -> dict[str, float | None]:
        """Metrics of the latest publication and of the latest complete version; see `metric_table.TRAINER`."""
        waited, self._copy_wait_seconds = self._copy_wait_seconds, 0.0
        is_done = self._job is not None and self._job.done.done() and self._job.done.exception() is None
        done = self._job if is_done else self._finished
        return {
            "time/publish_wait": self._publish_wait_seconds,
            "weight_sync/canary": self._canary_seconds,
            "weight_sync/copy_wait": waited,
            "weight_sync/seconds": done.seconds if done else None,
            "weight_sync/bytes": done.bytes if done else None,
        }

    def _await_copy(self) -> None:
        """Wait until the weights may change: they are copied (on CUDA the device waits) and the canary is scored."""
        job, snapshot = self._job, self._snapshot
        if job is None or snapshot is None:
            return
        started = time.perf_counter()
        snapshot.delay_device_work()
        self._wait_in_time(job, job.copied.wait)
        if (canary := job.canary) is not None:
            self._wait_in_time(job, lambda seconds: not futures.wait([canary], seconds).not_done)
        self._copy_wait_seconds += time.perf_counter() - started

    def _wait_in_time(self, job: _Job, wait: Callable[[float], bool]) -> None:
        """Wait for a part of `job` within the job's timeout; raise DeadlineError with its activity."""
        if not wait(max(0.0, job.started + self._timeout_seconds - time.perf_counter())):
            raise DeadlineError(
                f"waited {self._timeout_seconds:.0f} s for {job.target} to be written "
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
        self._canary_seconds = time.perf_counter() - started
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
        with wrap_rank_errors(self._world.timeout_seconds):
            self._write(job, self._snapshot.buffer)
        if self._state_dict.adapters_alone and self._world.device.type == "cpu":
            # Small enough to allocate again: several runs then need it only while they publish.
            self._snapshot = None
        job.seconds = time.perf_counter() - job.started
        if self._timeline is not None:
            self._timeline.add("write version", started, time.time(), version=job.version.step)

    def _write(self, job: _Job, buffer: Tensor) -> None:
        """Publish the version; every rank raises the same error, or none."""
        temporary, transport = None, self._transport
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
        if not self._transport.is_delta:  # a delta uses those of its base
            for name, content in self._companions.items():
                (temporary / name).write_bytes(content)
        return temporary

    def _commit(self, job: _Job, temporary: Path, parts: list[Hashes]) -> tuple[int, str]:
        hashes = {name: tensors for part in parts for name, tensors in part.items()}
        if not self._transport.is_delta:
            write_index(temporary, hashes)
        tensors = {name: digest for file in hashes.values() for name, digest in file.items()}
        fields: dict[str, Any] = {"format": WEIGHTS_FORMAT, "branch": job.version.branch, "step": job.version.step}
        fields |= {"tensors": tensors, "hash": content_hash(tensors), **self._canary_fields(job)}
        fields["packages"] = package_versions()
        fields |= self._transport.manifest_fields()
        if self._state_dict.adapters_alone:
            # The scale and the layers are part of the version, but not of the tensors' hashes.
            fields["adapter"] = xxhash.xxh3_128_hexdigest(self._companions[ADAPTER_CONFIG])
        manifest = commit_artifact(temporary, job.directory, fields)
        if job.directory != job.target:
            job.target.symlink_to(job.directory)
            fsync(job.target.parent)
        return self._transport.bytes_in_memory + sum(manifest["files"].values()), manifest["hash"]

    def _canary_fields(self, job: _Job) -> dict[str, Any]:
        if self._canary is None or job.canary is None:
            return {}
        job.activity = "scoring the canary"
        dtype = str(self._canary[1]).removeprefix("torch.")
        canary = {"token_ids": self._canary_tokens, "logprobs": job.canary.result()(), "dtype": dtype}
        return {"canary": {**canary, "base_logprobs": self._base_logprobs}}


def canary_row(vocabulary: int, tokens: NDArray[np.int64] | None = None) -> MicroBatch:
    """Return `tokens`, by default the canary of a vocabulary size, as a row."""
    tokens = canary_tokens(vocabulary) if tokens is None else tokens
    return make_micro_batch(tokens, np.arange(len(tokens)) > 0, [len(tokens)])


@torch.no_grad()
def measure_canary(policy: PolicyModel, row: MicroBatch) -> Callable[[], list[float]]:
    """Score the tokens of `row` at temperature 1, as training does. All ranks call it together.

    Returns a function that waits for the device and returns [T - 1], the log-probability of each token but the first.
    Any thread may call it; it does not wait for work that is queued later.
    """
    logprobs = policy(row)[0][1:]
    reshard_policy(policy)
    if not logprobs.is_cuda:
        return logprobs.tolist
    host = torch.empty_like(logprobs, device="cpu", pin_memory=True).copy_(logprobs, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read() -> list[float]:
        copied.synchronize()
        return list(host.tolist())

    return read


def check_base_canaries(
    policy: PolicyModel, world: World, manifest: Mapping[str, Any], name: str, dtype: torch.dtype
) -> None:
    """Compare the untrained policy with the base model of each server that sampled batch 0. All ranks call it.

    `manifest` is that of batch 0, whose `base_canaries` are the servers' results, if any; `dtype` is the precision of
    the forward pass. Raises ConfigError if they differ by more than rounding or an entry is malformed, and RunError if
    the check failed on another rank.
    """
    error = None
    for entry in manifest.get("base_canaries", []):
        url = entry.get("url", "inference")
        problem = f"batch 0: base_canaries of {url} are malformed"
        with translate_error((ValueError, KeyError, TypeError), lambda error: ConfigError(f"{problem}: {error!r}")):  # noqa: B023
            ids = entry["token_ids"][: len(entry["logprobs"]) + 1]  # the server truncates to max_model_len
            served = parse_canary({"canary": {**entry, "token_ids": ids}})
        assert served is not None
        if max(served.token_ids) >= policy.vocabulary:
            raise ConfigError(
                f"model.name: inference at {url} has a larger vocabulary than {name}, which has {policy.vocabulary} "
                "tokens; give both the same model"
            )
        row = canary_row(policy.vocabulary, np.array(served.token_ids)).to(world.device)
        mine = replace(served, logprobs=tuple(measure_canary(policy, row)()), dtype=str(dtype).removeprefix("torch."))
        compared = mine.compare_base(served, entry.get("tolerance"))
        if not compared.passes and error is None:
            error = ConfigError(
                f"model.name: version 0 of inference at {url} is not the trainer's {name}: the {compared.which} "
                f"difference between log-probabilities of its canary is {compared.difference:.3g}, more than "
                f"{compared.tolerance:.3g}; check that both load the same files, and set model.max_model_len to the "
                "server's max_model_len"
            )
    world.raise_on_all_ranks(error, "the comparison with version 0 of inference")


def unsharded_copy(
    policy: PolicyModel, config: TrainerModelConfig, world: World, dtype: torch.dtype
) -> PolicyModel | None:
    """Build an unsharded copy of the model that shares the storage of the sharded policy's weights.

    A sharded policy cannot run two forward passes at once, because gathered weights are part of its state. On a CPU the
    writer thread therefore scores the canary with this copy while the next step runs; only updates must wait. None if
    there are several ranks, if forward uses another dtype than the weights, or on CUDA, which runs the passes one after
    the other anyway.
    """
    if world.size > 1 or world.device.type != "cpu":
        return None
    if any(parameter.is_floating_point() and parameter.dtype != dtype for parameter in policy.parameters()):
        return None
    copy = build_policy(config)
    if config.lora is not None:
        add_adapters(copy, config.lora, dtype)
    for name, parameter in policy.named_parameters(remove_duplicate=False):
        owner, _, leaf = name.rpartition(".")
        local = local_tensor(parameter)
        copy.get_submodule(owner)._parameters[leaf] = nn.Parameter(local.detach(), requires_grad=False)
    for name, buffer in policy.named_buffers(remove_duplicate=False):
        owner, _, leaf = name.rpartition(".")
        copy.get_submodule(owner)._buffers[leaf] = buffer
    return copy
