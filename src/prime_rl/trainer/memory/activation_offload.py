"""Offloads the tensors that blocks save for the backward pass to host memory; values do not change.

At most `inflight` copies exist at a time: in the forward pass the device holds their sources, in the backward pass the
tensors that are needed next are prefetched.
"""

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

_MIN_BYTES = 32 * 1024  # for smaller tensors a copy costs more than it saves


@dataclass(slots=True, eq=False, weakref_slot=True)
class _OffloadedTensor:
    """A saved tensor on the host."""

    host: Tensor
    device: torch.device  # the original device
    # The tensor that was saved before it, which the backward pass needs next, if it still exists.
    previous: "weakref.ref[_OffloadedTensor] | None"
    uses: int = 1  # remaining uses in the backward pass
    copy: Tensor | None = None  # on the device, from its prefetch to its last use
    arrived: "torch.cuda.Event | None" = None  # of the completed copy; None on a CPU


class ActivationOffload:
    """Copies saved tensors to the host and back, on CUDA asynchronously. One object serves all blocks of a model."""

    def __init__(self, pin_memory: bool, inflight: int, min_bytes: int = _MIN_BYTES) -> None:
        """Offload tensors of at least `min_bytes`, with at most `inflight` copies at a time."""
        self._pin, self._inflight, self._min_bytes = pin_memory and torch.cuda.is_available(), inflight, min_bytes
        self._stream: torch.cuda.Stream | None = None
        # Sources of copies that may be incomplete. They keep their memory, so the address identifies them.
        self._leaving: deque[tuple[Tensor, tuple[Any, ...], torch.cuda.Event | None]] = deque()
        # Prefetched copies before their use, and the events of their completion.
        self._arriving: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        self._offloaded: dict[tuple[Any, ...], _OffloadedTensor] = {}
        self._last: weakref.ref[_OffloadedTensor] | None = None

    def wrap(self, block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `forward` of `block`, whose first positional argument is the hidden states.

        Weights, which FSDP frees and gathers, and the other arguments, which all blocks share, are not offloaded.
        """

        def offloading(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            shared = [*block.parameters(), *block.buffers(), *tree_leaves((args[1:], kwargs))]
            kept = {_address(one) for one in shared if isinstance(one, Tensor) and _is_plain(one)}
            with saved_tensors_hooks(partial(self._save, kept), self._load):
                return forward(*args, **kwargs)

        return offloading

    def _save(self, kept: set[int], tensor: Tensor) -> "Tensor | _OffloadedTensor":
        if not _is_plain(tensor) or tensor.nbytes < self._min_bytes or _address(tensor) in kept:
            return tensor
        if torch.empty_like(tensor, device="meta").stride() != tensor.stride():
            return tensor  # overlapping or with gaps: compiled code expects the saved strides
        key = (_address(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        if (known := self._offloaded.get(key)) is not None:
            known.uses += 1
            return known
        host = torch.empty_like(tensor, device="cpu", pin_memory=self._pin, requires_grad=False)
        copied = self._copy(host, tensor.detach(), tensor.device)
        offloaded = self._offloaded[key] = _OffloadedTensor(host, tensor.device, self._last)
        self._last = weakref.ref(offloaded)
        self._leaving.append((tensor, key, copied))
        while len(self._leaving) > self._inflight:
            self._release_oldest()
        return offloaded

    def _release_oldest(self) -> None:
        """Release the oldest source; work that may reuse its memory waits until the copy is complete."""
        _, key, copied = self._leaving.popleft()
        del self._offloaded[key]
        if copied is not None:
            torch.cuda.current_stream().wait_event(copied)

    def _load(self, saved: "Tensor | _OffloadedTensor") -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        while self._leaving:  # the forward pass is complete
            self._release_oldest()
        current: _OffloadedTensor | None = saved
        for _ in range(self._inflight):
            if current is not None and (current.uses > 0 or current is saved):
                self._prefetch(current)
            current = current.previous() if current is not None and current.previous is not None else None
        copy = saved.copy
        assert copy is not None
        if saved.arrived is not None:
            torch.cuda.current_stream(saved.device).wait_event(saved.arrived)
            self._arriving = deque(entry for entry in self._arriving if entry[1] is not saved.arrived)
        saved.uses -= 1
        if saved.uses <= 0:
            saved.copy = None
        return copy

    def _prefetch(self, offloaded: _OffloadedTensor) -> None:
        if offloaded.copy is None:
            offloaded.copy = torch.empty_like(offloaded.host, device=offloaded.device, pin_memory=False)
            offloaded.arrived = self._copy(offloaded.copy, offloaded.host, offloaded.device)
            if offloaded.arrived is not None:
                self._arriving.append((offloaded.copy, offloaded.arrived))
            if len(self._arriving) > self._inflight:  # later work may get the memory of an unused copy
                torch.cuda.current_stream(offloaded.device).wait_event(self._arriving.popleft()[1])

    def _copy(self, target: Tensor, source: Tensor, device: torch.device) -> "torch.cuda.Event | None":
        """Copy after the work that is queued so far; return the event of its completion, None on a CPU."""
        if device.type != "cuda":
            target.copy_(source)
            return None
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            return self._stream.record_event()


def _is_plain(tensor: Tensor) -> bool:
    """Return whether the tensor has its own memory; DTensors and other wrappers contain tensors."""
    return not is_traceable_wrapper_subclass(tensor) and tensor.layout == torch.strided


def _address(tensor: Tensor) -> int:
    """Identify the tensor's memory while a reference to it exists."""
    return tensor.untyped_storage()._cdata
