"""I5: a second set of the model's weights, filled while the first is sampled from, then put in its place at once.

vLLM's own reload does everything while nothing is sampled: it allocates each layer anew, lets the layer's loader write
into it (which shards, fuses and casts), processes it into the form that its kernels want, and copies the result. All of
that can be done beforehand, but for the last step:

    load         while sampling goes on   checkpoint -> parameters of a mirror of the model, through vLLM's own loaders
    pack         while sampling goes on   the same processing as at the start (on a CPU: packed copies for oneDNN)
    put in place during the pause         CPU: pointers are exchanged; GPU: pinned memory is copied to the device

A mirror is a tree of modules that share everything with the model's except for parameters and buffers, so that a loader
which finds its way from module to module ends up in the mirror. That this holds is proved once for each model
(`prove`), on the weights that are loaded anyway, so that a write which went astray changes nothing.

What is specific to vLLM 0.32.0 here: parameters as they were before processing are described by `LAYERWISE_INFO`, which
its reload keeps; processing of plain linear and embedding layers changes nothing but attributes of the layer. Other
layers (experts) are processed during the pause, as vLLM does it. Without this module
tests/integration/inference/test_pause.py fails.
"""

import ctypes
import sys
from collections.abc import Iterable
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

from prime_rl.inference.patches import forget_packed_experts

Weights = Iterable[tuple[str, Tensor]]
Buffers = dict[tuple[str, ...], Tensor]

_PACKED_AHEAD = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
_ABSENT = object()


class Unsuitable(Exception):
    """A model whose weights cannot be put in place from a mirror; the message says why."""


def why_not(config: VllmConfig, device: torch.device) -> str | None:
    """Tell why a model of this configuration needs vLLM's own reload; None if it does not."""
    if config.model_config.quantization is not None:
        return f"weights are quantized ({config.model_config.quantization})"
    if config.lora_config is not None:
        return "adapters wrap its layers"
    if config.speculative_config is not None:
        return "a draft model is loaded beside it"
    return None if device.type in ("cpu", "cuda") else f"it runs on {device.type}"


class Standby:
    """A mirror of a model's modules with parameters of its own.

    Args:
        model: as vLLM built and loaded it.
        dtype: of activations, which attention layers ask for when they are processed.
        pinned: pinned host memory by parameter, kept from version to version; None where the model is on the CPU.

    Attributes:
        mirror: the modules.
        bytes: size of their parameters.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, pinned: Buffers | None = None) -> None:
        self._model = model
        self._dtype = dtype
        self._pinned = pinned
        self._mirrors: dict[int, nn.Module] = {}
        self._tensors: dict[int, Tensor] = {}
        self._pairs: list[tuple[str, nn.Module, nn.Module]] = []
        self._packed: list[tuple[nn.Module, dict[str, Any]]] = []
        self._loaded = set[str]()
        self._retired: list[Any] = []
        self.mirror = self._reflect("", model)
        self._tensors.clear()  # packing lets go of a parameter, and its memory is wanted back
        self.bytes = sum(parameter.nbytes for parameter in self.mirror.parameters())

    def prove(self, base: Weights) -> frozenset[str]:
        """Load the weights that the model has already, and see that each of them arrived here.

        Returns:
            Parameters that no checkpoint fills, which keep what they are.

        Raises:
            Unsuitable: a parameter was not, or not wholly, written.
        """
        for parameter in self.mirror.parameters():
            if not parameter.is_floating_point():
                raise Unsuitable(f"it has parameters of {parameter.dtype}")
            parameter.data.fill_(torch.nan)
        self.load(base)
        kept = set()
        for name, parameter in self.mirror.named_parameters():
            if not parameter.data.sum().isnan():
                continue
            if name in self._loaded or not parameter.data.isnan().all() or self._is_processed_late(name):
                raise Unsuitable(f"{name} is not loaded through the module that holds it")
            kept.add(name)
        return frozenset(kept)

    def load(self, weights: Weights) -> None:
        """Fill the parameters from a checkpoint's tensors, sharded, fused and cast as at the start."""
        loaded = self.mirror.load_weights(weights)
        if loaded is None:
            raise Unsuitable("its loader does not tell what it has loaded")
        self._loaded = set(loaded)

    def pack(self) -> None:
        """Process what can be processed before the pause: all plain layers of a model on a CPU."""
        if self._pinned is not None:
            return  # their processing does nothing there
        for _, live, mirror in self._pairs:
            method: Any = getattr(mirror, "quant_method", None)
            if type(method) in _PACKED_AHEAD:
                before = dict(vars(mirror))
                method.process_weights_after_loading(mirror)
                changed = {k: v for k, v in vars(mirror).items() if before.get(k, _ABSENT) is not v}
                self._packed.append((live, changed))

    def put_in_place(self, kept: frozenset[str]) -> None:
        """Give the model these weights. Nothing may be sampled meanwhile; a failure leaves neither old nor new ones."""
        if self._pinned is None:
            forget_packed_experts(self._model)
        for prefix, live, mirror in self._pairs:
            if _is_late(mirror):
                _process_late(live, mirror)
            else:
                self._replace_parameters(prefix, live, mirror, kept)
            for name, buffer in mirror._buffers.items():
                if buffer is not None and _join(prefix, name) in self._loaded:
                    live._buffers[name].copy_(buffer)
        for live, changed in self._packed:
            self._retired.append({name: vars(live).get(name) for name in changed})
            vars(live).update(changed)
        for _, live, _ in self._pairs:
            if is_deferred_attention_layer(live):
                live.process_weights_after_loading(self._dtype)
        if self._pinned is not None:
            torch.cuda.synchronize()  # the host's memory is filled again for the next version

    def retire(self) -> None:
        """Free what was replaced, piece by piece: returning memory to the system takes time that sampling needs."""
        self._packed.clear()
        while self._retired:
            self._retired.pop()
        if self._pinned is None:
            _trim()

    def _replace_parameters(self, prefix: str, live: nn.Module, mirror: nn.Module, kept: frozenset[str]) -> None:
        for name, new in mirror._parameters.items():
            parameter = live._parameters[name]
            if new is None or parameter is None or _join(prefix, name) in kept:
                continue
            if self._pinned is None:
                self._retired.append(parameter.data)
                parameter.data = new.data
            else:
                parameter.data.copy_(new.data, non_blocking=True)

    def _is_processed_late(self, name: str) -> bool:
        return _is_late(self.mirror.get_submodule(name.rpartition(".")[0]))

    def _reflect(self, prefix: str, live: nn.Module) -> nn.Module:
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
            name: buffer if buffer is None or name in live._non_persistent_buffers_set else self._copy(buffer)
            for name, buffer in live._buffers.items()
        }
        vars(mirror)["_modules"] = {
            name: None if child is None else self._reflect(_join(prefix, name), child)
            for name, child in live._modules.items()
        }
        return mirror

    def _parameter(self, path: str, live: nn.Module, mirror: nn.Module, name: str, like: Tensor) -> Tensor:
        """Make the counterpart of a parameter, as it was before processing; one for those that are one."""
        key = id(live._parameters.get(name, like))
        if key not in self._tensors:
            tensor = self._memory(path, like)
            tensor.__class__ = like.__class__
            tensor.__dict__ = {k: _rebind(v, live, mirror) for k, v in vars(like).items()}
            self._tensors[key] = tensor
        return self._tensors[key]

    def _memory(self, path: str, like: Tensor) -> Tensor:
        if self._pinned is None:
            return torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device="cpu")
        key = (path, str(like.dtype), str(tuple(like.size())))
        if key not in self._pinned:
            self._pinned[key] = torch.empty_strided(
                like.size(), like.stride(), dtype=like.dtype, device="cpu", pin_memory=True
            )
        return self._pinned[key].detach()

    def _copy(self, buffer: Tensor) -> Tensor:
        key = id(buffer)
        if key not in self._tensors:
            self._tensors[key] = buffer.clone()
        return self._tensors[key]


def _is_late(layer: nn.Module) -> bool:
    method = getattr(layer, "quant_method", None)
    return (
        isinstance(method, QuantizeMethodBase)
        and type(method) not in _PACKED_AHEAD
        and any(True for parameter in layer._parameters.values() if parameter is not None)
    )


def _process_late(live: nn.Module, mirror: nn.Module) -> None:
    """What vLLM's reload does with one layer, from parameters that are loaded already."""
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
    """Let a loader that is a method of the layer be the mirror's method."""
    if isinstance(value, MethodType) and (value.__self__ is layer_ref_sentinel or value.__self__ is live):
        return value.__func__.__get__(mirror)
    return value


def _trim() -> None:
    """Give freed memory back: glibc keeps blocks below 32 MB for the thread that had them, and that one has ended."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
