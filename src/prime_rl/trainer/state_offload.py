"""An optimizer's state in host memory: on the device only while its parameters are updated; no bit changes.

Parameters are updated a part at a time, all ranks in the same parts. While one part is updated, the state of the next
is on its way, and that of the part before on its way back. After a step all state is on the host, where a checkpoint
reads it; state that a checkpoint put on the device goes to the host with the next step.
"""

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

_PART_BYTES = 256 * 2**20
Part = tuple[dict[str, Any], list[nn.Parameter]]


def keep_state_on_host(optimizer: Optimizer, part_bytes: int = _PART_BYTES) -> None:
    """Make `optimizer.step` do so, in place.

    Args:
        optimizer: any of torch's kind whose update of a parameter needs no other parameter.
        part_bytes: of parameters that are updated together; one that is larger is a part of its own.
    """
    optimizer.step = _StepInParts(optimizer, part_bytes)


class _StepInParts:
    def __init__(self, optimizer: Optimizer, part_bytes: int) -> None:
        self._optimizer, self._update, self._part_bytes = optimizer, optimizer.step, part_bytes
        self._host: dict[tuple[nn.Parameter, str], Tensor] = {}
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None

    def __call__(self, closure: None = None) -> None:
        assert closure is None
        groups = self._optimizer.param_groups
        parts = list(_parts(groups, self._part_bytes))
        try:
            self._fetch(parts[0][1])
            for (group, part), following in zip_longest(parts, parts[1:]):
                self._wait_for_fetch()
                if following is not None:
                    self._fetch(following[1])
                self._optimizer.param_groups = [{**group, "params": part}]
                self._update()
                self._stow(part)
        finally:
            self._optimizer.param_groups = groups
        if self._streams is not None:
            self._streams[1].synchronize()  # from here on the host may read it

    def _fetch(self, part: list[nn.Parameter]) -> None:
        """Send for the part's state. What has no dimension, a count of steps, stays where the optimizer made it."""
        for parameter in part:
            for name, value in self._state(parameter):
                local, device = _local(value), _local(parameter).device
                if local.device != device or (parameter, name) in self._host:
                    here = torch.empty_like(local, device=device, pin_memory=False)
                    self._copy(here, local, 0)
                    self._optimizer.state[parameter][name] = _like(value, here)

    def _stow(self, part: list[nn.Parameter]) -> None:
        for parameter in part:
            for name, value in self._state(parameter):
                local = _local(value)
                host = self._host.get((parameter, name))
                if host is None:
                    host = torch.empty_like(local, device="cpu", pin_memory=local.is_cuda)
                    self._host[parameter, name] = host
                self._copy(host, local, 1)
                self._optimizer.state[parameter][name] = _like(value, host)

    def _state(self, parameter: nn.Parameter) -> list[tuple[str, Tensor]]:
        state = self._optimizer.state.get(parameter, {})
        return [(name, value) for name, value in state.items() if isinstance(value, Tensor) and value.ndim > 0]

    def _copy(self, target: Tensor, source: Tensor, stream: int) -> None:
        """Copy on one of two streams, one for each direction; the device's tensor is not reused before."""
        device = source.device if source.is_cuda else target.device
        if device.type != "cuda":
            target.copy_(source)
            return
        if self._streams is None:
            self._streams = (torch.cuda.Stream(device), torch.cuda.Stream(device))
        side = self._streams[stream]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            target.copy_(source, non_blocking=True)
        (source if source.is_cuda else target).record_stream(side)

    def _wait_for_fetch(self) -> None:
        if self._streams is not None:
            torch.cuda.current_stream().wait_stream(self._streams[0])


def _parts(groups: list[dict[str, Any]], part_bytes: int) -> Iterator[Part]:
    """Cut each group into parts of at most `part_bytes`, counted whole, so that all ranks cut alike; at least one."""
    for group in groups:
        part, size = list[nn.Parameter](), 0
        for parameter in group["params"]:
            bytes_ = parameter.numel() * parameter.element_size()
            if part and size + bytes_ > part_bytes:
                yield group, part
                part, size = [], 0
            part.append(parameter)
            size += bytes_
        yield group, part


def _local(tensor: Tensor) -> Tensor:
    """This rank's part, without a place in the graph."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def _like(value: Tensor, local: Tensor) -> Tensor:
    """`local` in the place of this rank's part of `value`. FSDP makes its shards on the host in the same way."""
    if isinstance(value, DTensor):
        return DTensor(local, value._spec, requires_grad=False)
    return local
