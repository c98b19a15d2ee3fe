"""A second set of the model's weights ("shadow weights"), filled while sampling continues, then swapped in.

vLLM's own reload does everything during the pause: it allocates each layer, lets the layer's loader write into it
(which shards, fuses and casts), processes it into the form of its kernels, and copies the result. Here only the last
step runs during the pause:

    load              while sampling   checkpoint -> parameters of a mirror of the model, through vLLM's own loaders
    process           while sampling   the same processing as at the start (on a CPU: packed copies for oneDNN)
    load_into_model   during a pause   CPU: pointers are exchanged; GPU: pinned memory is copied to the device

A mirror is a tree of modules that shares everything with the model's except parameters and buffers. A loader that walks
from module to module therefore writes into the mirror. `check_loading` verifies this once per model.

Specific to vLLM 0.32.0: `LAYERWISE_INFO`, kept for vLLM's reload, describes the parameters before processing;
processing of plain linear and embedding layers changes only attributes of the layer. Other layers (experts) are
processed during the pause, as vLLM does it. Without this module tests/integration/inference/test_pause.py fails.
"""

import ctypes
import sys
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import _copy_and_restore_kernel_tensors, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS, materialize_layer, restore_layer_on_meta
from vllm.model_executor.model_loader.reload.sanitize import layer_ref_sentinel
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers

from prime_rl.core.page_locked_memory import lock_pages
from prime_rl.inference.vllm.patches import forget_packed_experts

Weights = Iterable[tuple[str, Tensor]]

_PROCESSED_EARLY = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
_ABSENT = object()
_ALIGNMENT = 256  # of each parameter in the host's buffer, bytes


class UnsupportedModel(Exception):
    """Shadow weights do not support this model; the message has the reason."""


def why_unsupported(config: VllmConfig, device: torch.device) -> str | None:
    """Return why a model of this configuration needs vLLM's own reload; None if it does not."""
    if config.model_config.quantization is not None:
        return f"weights are quantized ({config.model_config.quantization})"
    if config.lora_config is not None:
        return "adapters wrap its layers"
    return None if device.type in ("cpu", "cuda") else f"it runs on {device.type}"


class HostBuffer:
    """One page-locked buffer in host memory for all parameters of a mirror, reused for every version.

    A first mirror, whose parameters have no memory, determines the size; then `allocate` is called.
    """

    def __init__(self) -> None:
        self._offsets: dict[str, int] = {}
        self._size = 0
        self.buffer: Tensor | None = None

    def allocate(self) -> None:
        """Allocate the memory for all parameters; raises RunError if it cannot be locked."""
        buffer = torch.empty(self._size, dtype=torch.uint8)
        lock_pages(buffer)
        self.buffer = buffer

    def tensor(self, path: str, like: Tensor) -> Tensor:
        """Return a view of the buffer with the shape and strides of `like`; a meta tensor before `allocate`."""
        if self.buffer is None:
            self._offsets[path] = self._size
            self._size += -(-_extent(like) // _ALIGNMENT) * _ALIGNMENT
            return torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device="meta")
        begin = self._offsets[path]
        flat = self.buffer[begin : begin + _extent(like)].view(like.dtype)
        return flat.as_strided(like.size(), like.stride(), flat.storage_offset())


class ShadowWeights:
    """A mirror of a model's modules with separate parameters.

    Args:
        model: as vLLM built and loaded it.
        dtype: of activations, an argument of the processing of attention layers.
        host: memory for the parameters, reused for every version; None if the model is on the CPU.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, host: HostBuffer | None = None) -> None:
        self._model, self._dtype, self._host = model, dtype, host
        self._mirrors: dict[int, nn.Module] = {}
        self._tensors: dict[int, Tensor] = {}
        self._pairs: list[tuple[str, nn.Module, nn.Module]] = []
        self._processed: list[tuple[nn.Module, dict[str, Any]]] = []
        self._loaded = set[str]()
        self._replaced: list[Any] = []
        self.mirror = self._mirror_module("", model)
        self._tensors.clear()  # processing frees parameters, if nothing else references them
        self.bytes = sum(parameter.nbytes for parameter in self.mirror.parameters())

    def check_loading(self, base: Weights) -> frozenset[str]:
        """Load the weights that the model already has, and check that the mirror received all of them.

        A write that missed the mirror therefore leaves the model unchanged. Returns the parameters that no checkpoint
        fills, which keep their values; raises UnsupportedModel if another one was not, or only partly, written.
        """
        for parameter in self.mirror.parameters():
            if not parameter.is_floating_point():
                raise UnsupportedModel(f"it has parameters of {parameter.dtype}")
            parameter.data.fill_(torch.nan)
        self.load(base)
        kept = set()
        for name, parameter in self.mirror.named_parameters():
            if not parameter.data.sum().isnan():
                continue
            layer = self.mirror.get_submodule(name.rpartition(".")[0])
            if name in self._loaded or not parameter.data.isnan().all() or _is_late(layer):
                raise UnsupportedModel(f"{name} is not loaded through the module that holds it")
            kept.add(name)
        return frozenset(kept)

    def load(self, weights: Weights) -> None:
        """Fill the parameters from a checkpoint's tensors, sharded, fused and cast as at the start."""
        loaded = self.mirror.load_weights(weights)
        if loaded is None:
            raise UnsupportedModel("its loader does not return the names of the loaded parameters")
        self._loaded = set(loaded)

    def process(self, check: Callable[[], None]) -> None:
        """Process all plain layers of a model on a CPU; on a GPU there is nothing to process before the pause.

        `check` is called before each layer and may raise to stop.
        """
        if self._host is not None:
            return
        for _, live, mirror in self._pairs:
            method: Any = getattr(mirror, "quant_method", None)
            if type(method) in _PROCESSED_EARLY:
                check()
                before = dict(vars(mirror))
                method.process_weights_after_loading(mirror)
                changed = {k: v for k, v in vars(mirror).items() if before.get(k, _ABSENT) is not v}
                self._processed.append((live, changed))

    def load_into_model(self, kept: frozenset[str]) -> None:
        """Load these weights into the model. Must be called during a pause; a failure leaves undefined weights."""
        if self._host is None:
            forget_packed_experts(self._model)
        # Layers of Mamba-2 compute with a view of a parameter.
        viewed = {buffer.untyped_storage().data_ptr() for buffer in self._model.buffers()}
        for prefix, live, mirror in self._pairs:
            if _is_late(mirror):
                _process_late(live, mirror)
            else:
                self._replace_parameters(prefix, live, mirror, kept, viewed)
            for name, buffer in mirror._buffers.items():
                if buffer is not None and _join(prefix, name) in self._loaded:
                    live._buffers[name].copy_(buffer)
        for live, changed in self._processed:
            self._replaced.append({name: vars(live).get(name) for name in changed})
            vars(live).update(changed)
        for _, live, _ in self._pairs:
            if is_deferred_attention_layer(live):
                live.process_weights_after_loading(self._dtype)
        if self._host is not None:
            torch.cuda.synchronize()  # the next version overwrites the host's memory

    def free_replaced(self) -> None:
        """Free the replaced tensors one by one, after the pause: returning memory to the system takes time."""
        self._processed.clear()
        while self._replaced:
            self._replaced.pop()
        # glibc keeps freed blocks below 32 MB for the thread that allocated them.
        if self._host is None and sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
            libc.malloc_trim(0)

    def _replace_parameters(
        self, prefix: str, live: nn.Module, mirror: nn.Module, kept: frozenset[str], viewed: set[int]
    ) -> None:
        for name, new in mirror._parameters.items():
            parameter = live._parameters[name]
            if new is None or parameter is None or _join(prefix, name) in kept:
                continue
            if self._host is None and not (parameter.numel() and parameter.untyped_storage().data_ptr() in viewed):
                self._replaced.append(parameter.data)
                parameter.data = new.data
            else:
                parameter.data.copy_(new.data, non_blocking=True)

    def _mirror_module(self, prefix: str, live: nn.Module) -> nn.Module:
        if id(live) in self._mirrors:
            return self._mirrors[id(live)]
        mirror: nn.Module = object.__new__(type(live))
        vars(mirror).update(vars(live))
        self._mirrors[id(live)] = mirror
        self._pairs.append((prefix, live, mirror))
        saved = get_layerwise_info(live).restore_metadata[0]
        unsaved = {n: p for n, p in live._parameters.items() if n not in saved and (p is None or n in SKIP_TENSORS)}
        vars(mirror)["_parameters"] = {
            name: None if like is None else self._parameter(_join(prefix, name), live, mirror, name, like)
            for name, like in {**saved, **unsaved}.items()
        }
        vars(mirror)["_buffers"] = {
            name: buffer
            if buffer is None or name in live._non_persistent_buffers_set
            else self._tensors.setdefault(id(buffer), buffer.clone())
            for name, buffer in live._buffers.items()
        }
        vars(mirror)["_modules"] = {
            name: None if child is None else self._mirror_module(_join(prefix, name), child)
            for name, child in live._modules.items()
        }
        return mirror

    def _parameter(self, path: str, live: nn.Module, mirror: nn.Module, name: str, like: Tensor) -> Tensor:
        """Make the counterpart of a parameter before processing; shared parameters have one counterpart."""
        key = id(live._parameters.get(name, like))
        if key not in self._tensors:
            if self._host is None:
                tensor = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device="cpu")
            else:
                tensor = self._host.tensor(path, like)
            tensor.__class__ = like.__class__
            tensor.__dict__ = {k: _rebind(v, live, mirror) for k, v in vars(like).items()}
            self._tensors[key] = tensor
        return self._tensors[key]


def _extent(like: Tensor) -> int:
    """Number of bytes from the first to the last element."""
    if not like.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(like.size(), like.stride(), strict=True))
    return (last + 1) * like.element_size()


def _is_late(layer: nn.Module) -> bool:
    method = getattr(layer, "quant_method", None)
    return (
        isinstance(method, QuantizeMethodBase)
        and type(method) not in _PROCESSED_EARLY
        and any(True for parameter in layer._parameters.values() if parameter is not None)
    )


def _process_late(live: nn.Module, mirror: nn.Module) -> None:
    """Process one layer as vLLM's reload does, from loaded parameters."""
    info = get_layerwise_info(live)
    info.kernel_tensors = get_layer_params_buffers(live)
    info.kernel_non_persistent_buffers = set(live._non_persistent_buffers_set)
    restore_layer_on_meta(live, info)
    materialize_layer(live, info)
    for name, parameter in mirror._parameters.items():
        if parameter is not None:
            live._parameters[name].data.copy_(parameter.data)
    vars(live).pop("_already_called_process_weights_after_loading", None)
    live.quant_method.process_weights_after_loading(live)
    if hasattr(live, "update_param_tp_status"):
        live.update_param_tp_status()
    _copy_and_restore_kernel_tensors(live, info)
    info.reset()


def _rebind(value: Any, live: nn.Module, mirror: nn.Module) -> Any:
    """Bind a loader that is a method of the layer to the mirror."""
    if isinstance(value, MethodType) and (value.__self__ is layer_ref_sentinel or value.__self__ is live):
        return value.__func__.__get__(mirror)
    return value


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
