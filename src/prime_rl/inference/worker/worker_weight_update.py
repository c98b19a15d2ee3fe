"""A vLLM worker's part of a switch: a thread reads, checks and prepares a version; the pause loads it.

    stage ----> staging ----> staged ----> load
                   |  \\
                   |   `----> failed       the files are not the published ones; the model is unchanged
                   `--------> (gone)       dropped, or overtaken by the next stage

One version per slot is staged at a time: the next one stops it at its next tensor, and full weights take over its
memory. If `shadow_weights` does not support the model (quantized, with adapters),
the checkpoint is verified, and vLLM's layer-wise reload reads and verifies it again during the pause.
"""

import atexit
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

from prime_rl.core.errors import translate_error
from prime_rl.inference.policy.delta_cache import NUM_THREADS, DeltaCache
from prime_rl.inference.policy.weight_checks import POLICY_ADAPTER, TensorLocation, read_locations
from prime_rl.inference.vllm import patches
from prime_rl.inference.vllm.drafts_on_cpu import repair_drafts_on_cpu
from prime_rl.inference.vllm.route_recorder import record_routes
from prime_rl.inference.worker.shadow_weights import HostBuffer, ShadowWeights, why_unsupported
from prime_rl.inference.worker.weight_receiver import WeightReceiver
from prime_rl.storage.artifact import ArtifactError, retry_until_complete, visibility_timeout
from prime_rl.storage.tensor_hashes import ITEM_BYTES, SAFETENSORS_NAMES, RawTensor
from prime_rl.storage.weights.transfer_channel import TransferDescriptor

logger = logging.getLogger(__name__)
# vLLM imports this module before it loads the model, and offers no earlier hook.
patches.keep_log_file()
patches.route_in_float32()
patches.compute_hybrid_models_on_cpu()

State = Literal["staging", "staged", "failed", "gone"]

_AHEAD_BYTES = 256 * 2**20

_END_SECONDS = 5.0
"""What the exit of a worker waits for each of its threads at most: one may wait for a file system that hangs."""

_DTYPES = {code: getattr(torch, name) for name, code in SAFETENSORS_NAMES.items()}


class Cancelled(Exception):
    """The version was dropped or overtaken."""


class WeightUpdateExtension:
    """Methods that vLLM adds to its worker class (`worker_extension_cls`); the server calls them by collective RPC."""

    def prepare_updates(self: Any, base: str, cache: str) -> None:
        """Set up the worker, with the directories of the loaded weights and of the delta cache; called once, first."""
        patches.die_with_parent()  # the engine, which may also be this process
        self.weight_update = WorkerWeightUpdate(self, Path(base), DeltaCache(Path(cache)))
        atexit.register(self.weight_update.end)
        patches.score_prompts_by_their_own_adapter(self.model_runner)
        patches.keep_seeds_of_chunked_prompts(self.model_runner)
        repair_drafts_on_cpu(self.model_runner.device)
        record_routes(self.model_runner)

    def call_weight_update(self: Any, method: str, *args: Any) -> Any:
        """Call a method of `WorkerWeightUpdate`."""
        return getattr(self.weight_update, method)(*args)

    def kv_cache_bytes(self: Any) -> int:
        """Bytes of this worker's KV cache: configured, or free according to vLLM's measurement."""
        return self.cache_config.kv_cache_memory_bytes or int(self.available_kv_cache_memory_bytes)


@dataclass
class StagedVersion:
    """A version that is being staged."""

    key: str
    directory: Path
    hashes: Mapping[str, str]
    number: int = 0  # of the adapter; 0 for full weights
    config: Mapping[str, Any] = field(default_factory=dict)  # peft's
    request: Mapping[str, Any] | None = None  # how to fetch tensors that are not in files
    cancelled: threading.Event = field(default_factory=threading.Event)
    state: State = "staging"
    error: str = ""
    seconds: float = 0.0
    bytes: int = 0
    shadow: ShadowWeights | None = None
    tensors: list[tuple[str, Tensor]] = field(default_factory=list)
    adapter: LoRAModel | None = None

    @property
    def slot(self) -> int:
        """Number of the slot; full weights are of the base slot."""
        return max(self.number, POLICY_ADAPTER)

    def check(self) -> None:
        """Raise Cancelled after `drop`."""
        if self.cancelled.is_set():
            raise Cancelled("the version was overtaken")


class WorkerWeightUpdate:
    """The staged versions of one of vLLM's workers, which has loaded the weights in the directory `base`."""

    def __init__(self, worker: Any, base: Path, cache: DeltaCache) -> None:
        self._worker, self._base, self._cache = worker, base, cache
        self._receiver = WeightReceiver(worker)
        self._versions: dict[str, StagedVersion] = {}  # at most one per slot
        self._last_thread: threading.Thread | None = None  # newest one of the base slot, also of a dropped version
        self._threads: list[threading.Thread] = []  # that may run
        self._slots = AdapterSlots(worker.model_runner) if worker.vllm_config.lora_config is not None else None
        self._kept: frozenset[str] | None = None
        self._unsupported: str | None = None
        self._on_cuda = worker.device.type == "cuda"
        self._host = HostBuffer() if self._on_cuda else None
        if reason := why_unsupported(worker.vllm_config, worker.device):
            self._use_reload(reason)

    def stage(
        self,
        key: str,
        directory: str,
        hashes: Mapping[str, str],
        request: Mapping[str, Any] | None = None,
        number: int = 0,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Start to read (or to fetch, if there is a `request`) and check a version; drops the staged one of its slot.

        An adapter has a `number` and peft's `config`.
        """
        version = StagedVersion(key, Path(directory), hashes, number, config or {}, request)
        is_base = version.slot == POLICY_ADAPTER
        previous = self._last_thread if is_base else None
        for other in self._staged_in(version.slot):
            self.drop(other.key)
        self._versions[key] = version
        thread = self._start_thread("stage", self._stage, version, previous)
        if is_base:
            self._last_thread = thread

    def empty_adapter(self, number: int) -> None:
        """Replace an adapter by one that adds nothing. Must be called during a pause, unless the number is new."""
        if self._slots is not None:
            self._slots.empty(number)

    def remove_adapter(self, number: int) -> None:
        """Remove an adapter that no request uses, and what is staged for it."""
        for version in self._staged_in(number):
            self.drop(version.key)
        if self._slots is not None:
            self._slots.remove(number)

    def state(self, key: str) -> dict[str, Any]:
        """Return state, seconds and size of a version."""
        version = self._versions.get(key) or StagedVersion(key, Path(), {}, state="gone")
        return {"state": version.state, "error": version.error, "stage_s": version.seconds, "bytes": version.bytes}

    def drop(self, key: str) -> None:
        """Drop a version, if it is there. Its thread ends at its next tensor."""
        if (version := self._versions.pop(key, None)) is not None:
            version.cancelled.set()

    def load(self, key: str) -> None:
        """Load a version into the model. Must be called during a pause; raises RuntimeError if it is not staged."""
        version = self._versions.get(key)
        if version is None or version.state != "staged":
            raise RuntimeError(f"{key} is not staged")
        del self._versions[key]
        if version.adapter is not None and self._slots is not None:
            self._slots.load(version.adapter)
            return
        if version.shadow is None:
            tensors = version.tensors  # each is released as soon as it is loaded
            held = (tensors.pop(0) for _ in range(len(tensors)))
            self._reload(held if version.request is not None else self._weights(version))
            return
        with set_current_vllm_config(self._worker.vllm_config):  # for layers of experts, which are processed now
            version.shadow.load_into_model(self._kept or frozenset())
        runner = self._worker.model_runner
        runner.reset_encoder_cache()
        runner.reset_mm_cache()
        self._start_thread("free", version.shadow.free_replaced)

    def end(self) -> None:
        """Drop all versions and wait for the threads, before the interpreter ends.

        A thread that holds or frees tensors while it ends would abort the process.
        """
        for key in [*self._versions]:
            self.drop(key)
        for thread in self._threads:
            thread.join(_END_SECONDS)

    def measure(self) -> dict[str, Any]:
        """Measure the shortest possible switch: copying the bytes, and vLLM's own processing.

        Returns:
            Size in `bytes`; seconds `copy_s` to copy the parameters once into allocated memory, and `process_s` for
            `process_weights_after_loading` of all plain layers (not of experts; 0 on a GPU). Or `error`, if vLLM's
            reload does both at once, or a version is staged, whose memory this would overwrite on a GPU.
        """
        reason = self._unsupported
        if self._staged_in(POLICY_ADAPTER) or (self._last_thread is not None and self._last_thread.is_alive()):
            reason = "a version is staged; try again after the switch"
        if reason:
            return {"error": f"copying and processing cannot be measured: {reason}"}
        shadow = self._make_shadow()
        parameters = list(shadow.mirror.parameters())
        for parameter in parameters:
            parameter.data.normal_()
        targets = [torch.zeros_like(parameter.data, device=self._worker.device) for parameter in parameters]
        start = time.perf_counter()
        for target, source in zip(targets, [parameter.data for parameter in parameters], strict=True):
            target.copy_(source, non_blocking=True)
        self._synchronize()
        copy_seconds = time.perf_counter() - start
        del targets, target, parameters, parameter, source  # processing frees what it packs, if nothing else holds it
        start = time.perf_counter()
        shadow.process(lambda: None)
        self._synchronize()
        return {"bytes": shadow.bytes, "copy_s": copy_seconds, "process_s": time.perf_counter() - start}

    def _start_thread(self, name: str, work: Callable[..., None], *args: Any) -> threading.Thread:
        thread = threading.Thread(target=work, args=args, name=name, daemon=True)
        self._threads = [*filter(threading.Thread.is_alive, self._threads), thread]
        thread.start()
        return thread

    def _staged_in(self, slot: int) -> list[StagedVersion]:
        return [version for version in self._versions.values() if version.slot == slot]

    def _stage(self, version: StagedVersion, previous: threading.Thread | None) -> None:
        if previous is not None:
            # Both write to the same memory, so this waits also for a dropped version. The caller has a deadline.
            previous.join()
            del previous  # it references the thread before it
        start = time.perf_counter()
        try:
            if self._on_cuda:
                torch.cuda.set_device(self._worker.device)  # a new thread uses the first device otherwise
            with torch.inference_mode(False), torch.no_grad():
                if version.number:
                    factors = list(self._weights(version))
                    version.bytes = sum(tensor.nbytes for _, tensor in factors)
                    version.adapter = self._build(version, factors)
                else:
                    self._check_support(version)
                    try:
                        self._stage_weights(version)
                    except (ArtifactError, OSError) as error:
                        if version.request is not None or not self._cache.distrust(version.directory):
                            raise
                        logger.warning("rebuilding the copy of %s: %s", version.directory, error)
                        version.bytes = 0
                        self._stage_weights(version)
            version.seconds = time.perf_counter() - start
            version.state = "staged"
        except Exception as error:
            if isinstance(error, Cancelled):
                version.state = "gone"
                return
            version.error = str(error) or type(error).__name__
            if version.request is not None:
                version.error = f"{version.directory} could not be fetched: {version.error}"
            version.state = "failed"
            logger.warning("staging %s failed", version.directory, exc_info=error)

    def _stage_weights(self, version: StagedVersion) -> None:
        weights = self._weights(version)
        if not self._unsupported:
            version.shadow = self._make_shadow()
            version.shadow.load(weights)
            version.bytes = version.shadow.bytes
            version.shadow.process(version.check)
            return
        # vLLM's reload needs the whole checkpoint. It reads files again, from the page cache, which all workers share;
        # tensors that are not in files are held by each worker.
        if version.request is not None:
            self._check_memory(TransferDescriptor.parse(version.request))
        for name, tensor in weights:
            version.bytes += tensor.nbytes
            if version.request is not None:
                version.tensors.append((name, tensor))

    def _check_memory(self, offer: TransferDescriptor) -> None:
        parallel = self._worker.vllm_config.parallel_config
        workers = parallel.world_size * max(parallel.data_parallel_size_local, 1)
        size = sum(math.prod(shape) * ITEM_BYTES[dtype] for dtype, shape in offer.tensors.values())
        free = psutil.virtual_memory().available
        if size * workers > free:
            raise ArtifactError(
                f"{workers} workers of this node would each hold {size / 2**30:.1f} GiB until the switch "
                f"({self._unsupported}), and {free / 2**30:.1f} GiB of memory are free; "
                "set weight_broadcast.type = filesystem"
            )

    def _weights(self, version: StagedVersion) -> Iterator[tuple[str, Tensor]]:
        if version.request is not None:
            return self._receiver.receive(version.request, version.hashes, version.check)
        return read_verified(version.directory, version.hashes, version.check, self._cache)

    def _build(self, version: StagedVersion, factors: list[tuple[str, Tensor]]) -> LoRAModel:
        if self._slots is None:
            raise ArtifactError("this server does not accept adapters; start it with enable_lora = true")
        unsupported = f"{version.directory} contains an unsupported adapter"
        kinds = (ValueError, KeyError, TypeError)  # of vLLM's parser
        with translate_error(kinds, lambda error: ArtifactError(f"{unsupported}: {error}")):
            return self._slots.build(version.number, version.config, factors)

    def _check_support(self, version: StagedVersion) -> None:
        """Once per model: check that a shadow copy receives every tensor of a checkpoint."""
        if self._unsupported or self._kept is not None:
            return
        try:
            self._kept = self._make_shadow().check_loading(read_verified(self._base, None, version.check))
        except Exception as reason:  # a model's loader may raise anything on a shadow copy
            if isinstance(reason, Cancelled | ArtifactError | OSError):
                raise
            self._use_reload(f"{type(reason).__name__}: {reason}")

    def _use_reload(self, reason: str) -> None:
        self._unsupported = reason
        logger.warning("weights are switched by vLLM's reload, with a longer pause: %s", reason)

    def _make_shadow(self) -> ShadowWeights:
        model = self._worker.model_runner.get_model()
        dtype = self._worker.model_config.dtype
        if self._host is not None and self._host.buffer is None:
            ShadowWeights(model, dtype, self._host)  # determines the size of the buffer
            self._host.allocate()
        return ShadowWeights(model, dtype, self._host)

    def _synchronize(self) -> None:
        if self._on_cuda:
            torch.cuda.synchronize()

    def _reload(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        # vLLM warns of every layer without a tensor (rotary tables, a tied head); the names were checked before.
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
        model = self._worker.model_runner.get_model()
        if self._worker.device.type == "cpu":
            patches.forget_packed_experts(model)
        self._worker.reload_weights(weights_iterator=weights)
        patches.repack_tied_head(model)
        self.empty_adapter(POLICY_ADAPTER)  # the reload has emptied all slots


class AdapterSlots:
    """The adapters of one worker, whose model runner has LoRA enabled, always built from verified tensors.

    vLLM computes every layer with a few adapters, each in a slot with a number; each request has the number of its
    adapter. A run's adapter keeps its number from version to version, so requests in flight continue with the new
    one. At the base model it is an adapter that adds nothing. vLLM would read a missing adapter, unverified, from the
    path in a request; here it gets the adapter from memory, also after vLLM has emptied its slots (a reload, a profile
    run).

    Specific to vLLM 0.32.0: its adapter manager and parser. Without this class
    tests/integration/inference/test_adapters.py fails.
    """

    def __init__(self, runner: Any) -> None:
        self._loader = runner.lora_manager
        self._manager = self._loader._adapter_manager
        self._adapters: dict[int, LoRAModel] = {}
        self._loader._load_adapter = lambda request: self._adapters[request.lora_int_id]

    def build(self, number: int, config: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]]) -> LoRAModel:
        """Build an adapter from peft's configuration and factors, in the form of a slot. Does not change the model.

        Raises:
            ValueError: vLLM does not support the adapter, or one of its layers.
        """
        helper = PEFTHelper.from_dict({**config, "vllm_max_position_embeddings": self._loader.max_position_embeddings})
        helper.validate_legal(self._loader.lora_config)
        model = self._manager.model
        renames = getattr(model, "hf_to_vllm_mapper", None)
        lora = LoRAModel.from_lora_tensors(
            lora_model_id=number,
            tensors=dict(tensors),
            peft_helper=helper,
            device="cpu",
            dtype=self._loader.lora_config.lora_dtype,
            model_vocab_size=self._loader.vocab_size,
            weights_mapper=renames and renames.get_rename_mapper(),
            skip_prefixes=getattr(model, "lora_skip_prefixes", None),
        )
        # Fuses the factors of fused layers (query, key, value ...) and multiplies by the scale.
        self._manager._create_merged_loras_inplace(lora)
        if unknown := sorted(lora.loras.keys() - self._manager.modules.keys()):
            raise ValueError(f"vLLM does not support adapters for layer {unknown[0]} of this model")
        return lora

    def load(self, lora: LoRAModel) -> None:
        """Use the adapter for requests with its number. Must be called during a pause, unless there are none."""
        self._adapters[lora.id] = lora
        self._manager.remove_adapter(lora.id)
        self._loader.add_adapter(LoRARequest(f"adapter {lora.id}", lora.id, "in memory"))

    def empty(self, number: int) -> None:
        """Replace an adapter by one that adds nothing; as `load`."""
        self.load(self._manager.create_dummy_lora(number, 1, self._loader.embedding_modules))

    def remove(self, number: int) -> None:
        """Remove an adapter that no request uses."""
        self._manager.remove_adapter(number)
        self._adapters.pop(number, None)


def read_verified(
    directory: Path,
    hashes: Mapping[str, str] | None,
    check: Callable[[], None] = lambda: None,
    cache: DeltaCache | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Read all tensors of the safetensors files in `directory`, file by file and in their order there.

    Each tensor is read once into private memory and hashed there, so the hashed bytes are the loaded bytes (I5), even
    if a file changes in between. Several threads read ahead of the loader, up to a limit in bytes.

    Args:
        directory: of safetensors files; with `cache`, of any published version.
        hashes: name -> hash that each tensor must have (`RawTensor.digest`); None checks nothing.
        check: called before each tensor; may raise to stop.
        cache: rebuilds a version that was published as a delta.

    Raises:
        ArtifactError: a file is missing, truncated or malformed, or a tensor has another hash; names the file.
        OSError: a file cannot be read.
    """
    if cache is not None:
        directory = cache.complete(directory, check)
    locations = retry_until_complete(partial(read_locations, directory), visibility_timeout(directory), check)
    with ThreadPoolExecutor(NUM_THREADS, "read-weights") as pool:
        pending: deque[tuple[TensorLocation, Future[Tensor]]] = deque()
        ahead = 0
        try:
            for location in locations:
                check()
                pending.append((location, pool.submit(_read, location, hashes)))
                ahead += location.size
                while ahead > _AHEAD_BYTES and len(pending) > 1:
                    done, future = pending.popleft()
                    ahead -= done.size
                    yield done.name, future.result()
            while pending:
                check()
                done, future = pending.popleft()
                yield done.name, future.result()
        finally:
            for _, future in pending:
                future.cancel()


def _read(location: TensorLocation, hashes: Mapping[str, str] | None) -> Tensor:
    """Read one tensor. Not by mmap: a mapped file that is truncated would kill the process with SIGBUS."""
    data = np.fromfile(location.file, np.uint8, location.size, offset=location.begin)
    if missing := location.size - data.size:
        raise ArtifactError(f"{location.file} is truncated: tensor {location.name} lacks {missing} bytes")
    tensor = RawTensor(location.dtype, location.shape, data)
    if hashes is not None and tensor.digest(location.name) != hashes.get(location.name):
        raise ArtifactError(f"{location.file} differs from its manifest: tensor {location.name} has another hash")
    if location.size == 0:
        return torch.empty(location.shape, dtype=_DTYPES[location.dtype])
    return torch.from_numpy(data).view(_DTYPES[location.dtype]).reshape(location.shape)
