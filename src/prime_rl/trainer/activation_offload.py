"""What blocks save for the backward pass waits for it in host memory; it comes back bit for bit.

At most `inflight` tensors are on their way at a time: while copies to the host run beside the forward pass, the device
still holds their sources, and while the backward pass uses one tensor, those that were saved just before it are on
their way back.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from prime_rl.configs.memory import ActivationOffloadConfig

_LEAST_BYTES = 32 * 1024  # below, a copy costs more than it saves


class _Stowed:
    """A saved tensor on the host.

    Attributes:
        host: its values.
        device: where it was.
        uses: how often the backward pass will still ask for it.
        before: the one saved before it, which the backward pass needs next, while that is alive.
        copy: back on the device, from the moment it is sent for to its last use.
        arrived: when the copy is complete; None on a CPU.
    """

    __slots__ = ("__weakref__", "arrived", "before", "copy", "device", "host", "uses")

    def __init__(self, host: Tensor, device: torch.device, before: "weakref.ref[_Stowed] | None") -> None:
        self.host, self.device, self.before = host, device, before
        self.uses = 1
        self.copy: Tensor | None = None
        self.arrived: torch.cuda.Event | None = None


class ActivationOffload:
    """Copies saved tensors to the host and back, beside the computation on CUDA. On a CPU it copies all the same.

    One object serves all blocks of a model, in the order in which they run.
    """

    def __init__(self, pin_memory: bool, inflight: int, least_bytes: int = _LEAST_BYTES) -> None:
        """Take tensors of `least_bytes` and more; `inflight` of them may be on their way."""
        self._pin, self._inflight, self._least_bytes = pin_memory and torch.cuda.is_available(), inflight, least_bytes
        self._stream: torch.cuda.Stream | None = None
        # Sources whose copy may not be complete. While one is here its memory is its own, so its address identifies it.
        self._leaving: deque[tuple[Tensor, tuple[Any, ...], torch.cuda.Event | None]] = deque()
        self._stowed: dict[tuple[Any, ...], _Stowed] = {}
        self._last: weakref.ref[_Stowed] | None = None

    @classmethod
    def of(cls, config: ActivationOffloadConfig) -> "ActivationOffload":
        """As configured."""
        return cls(config.pin_memory, config.max_inflight_activations)

    def around(self, block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `forward` of `block`, whose first positional argument are the hidden states.

        Weights stay: FSDP frees and gathers them by itself. So do the other arguments, which all blocks share.
        """

        def offloading(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            shared = [*block.parameters(), *block.buffers(), *_tensors(args[1:]), *_tensors(kwargs.values())]
            kept = {_address(tensor) for tensor in shared if _is_plain(tensor)}
            with saved_tensors_hooks(partial(self._stow, kept), self._fetch):
                return forward(*args, **kwargs)

        return offloading

    def _stow(self, kept: set[int], tensor: Tensor) -> "Tensor | _Stowed":
        if not _is_plain(tensor) or tensor.nbytes < self._least_bytes or _address(tensor) in kept:
            return tensor
        if torch.empty_like(tensor, device="meta").stride() != tensor.stride():
            return tensor  # overlaps itself or has gaps: compiled code counts on the strides that it saved
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        if (known := self._stowed.get(key)) is not None:
            known.uses += 1
            return known
        host = torch.empty_like(tensor, device="cpu", pin_memory=self._pin, requires_grad=False)
        departed = self._copy(host, tensor.detach(), tensor.device)
        stowed = self._stowed[key] = _Stowed(host, tensor.device, self._last)
        self._last = weakref.ref(stowed)
        self._leaving.append((tensor, key, departed))
        while len(self._leaving) > self._inflight:
            self._let_go()
        return stowed

    def _let_go(self) -> None:
        """Give the oldest source up; work that may reuse its memory waits until it has been copied."""
        _, key, departed = self._leaving.popleft()
        del self._stowed[key]
        if departed is not None:
            torch.cuda.current_stream().wait_event(departed)

    def _fetch(self, saved: "Tensor | _Stowed") -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        while self._leaving:  # the forward pass is over
            self._let_go()
        wanted: _Stowed | None = saved
        for _ in range(self._inflight):
            if wanted is not None and (wanted.uses > 0 or wanted is saved):
                self._send_back(wanted)
            wanted = wanted.before() if wanted is not None and wanted.before is not None else None
        copy = saved.copy
        assert copy is not None
        if saved.arrived is not None:
            torch.cuda.current_stream(saved.device).wait_event(saved.arrived)
        saved.uses -= 1
        if saved.uses <= 0:
            saved.copy = None
        return copy

    def _send_back(self, stowed: _Stowed) -> None:
        if stowed.copy is None:
            stowed.copy = torch.empty_like(stowed.host, device=stowed.device, pin_memory=False)
            stowed.arrived = self._copy(stowed.copy, stowed.host, stowed.device)

    def _copy(self, target: Tensor, source: Tensor, device: torch.device) -> "torch.cuda.Event | None":
        """Copy beside the computation, after what it has been given so far; return when it is done, None if it is."""
        if device.type != "cuda":
            target.copy_(source)
            return None
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            if target.is_cuda:
                target.record_stream(self._stream)
            return self._stream.record_event()


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    """Tensors among arguments, and in tuples among them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


def _is_plain(tensor: Tensor) -> bool:
    """Whether it is memory of its own; DTensors and the like are views of something else."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
