"""Offloads an optimizer's state to host memory; it is on the device only during the update, and no bit changes.

Parameters are updated in parts, the same on all ranks. During the update of one part, the state of the next part is
copied to the device and that of the previous part to the host. After a step all state is on the host, where checkpoints
read it. State that a checkpoint loads to the device moves to the host in the next step.
"""

from collections import deque
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

_PART_BYTES = 256 * 2**20
Part = tuple[dict[str, Any], list[nn.Parameter]]


def offload_state(optimizer: Optimizer, part_bytes: int = _PART_BYTES) -> None:
    """Replace `optimizer.step`, whose update of a parameter must not need another parameter.

    `part_bytes` is the size of the parameters that are updated together; a larger parameter is one part.
    """
    optimizer.step = _StepInParts(optimizer, part_bytes)


class _StepInParts:
    def __init__(self, optimizer: Optimizer, part_bytes: int) -> None:
        self._optimizer, self._update, self._part_bytes = optimizer, optimizer.step, part_bytes
        self._host: dict[tuple[nn.Parameter, str], Tensor] = {}
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        # The parts that are being copied to the host, and the events of their last copies. `record_stream` would keep
        # their memory until the host observes the completion; the host runs ahead, so that could be the whole state.
        self._leaving: deque[tuple[list[Tensor], torch.cuda.Event]] = deque()

    def __call__(self, closure: None = None) -> None:
        assert closure is None
        groups = self._optimizer.param_groups
        parts = list(_parts(groups, self._part_bytes))
        try:
            self._fetch(parts[0][1])
            for (group, part), following in zip_longest(parts, parts[1:]):
                if self._streams is not None:
                    torch.cuda.current_stream().wait_stream(self._streams[0])
                if following is not None:
                    self._fetch(following[1])
                self._optimizer.param_groups = [{**group, "params": part}]
                self._update()
                self._save(part)
        finally:
            self._optimizer.param_groups = groups
        if self._streams is not None:
            self._streams[1].synchronize()  # now the host may read the state
            self._leaving.clear()

    def _fetch(self, part: list[nn.Parameter]) -> None:
        """Copy the part's state to the device; scalars, such as step counts, stay where they are."""
        for parameter in part:
            for name, value in self._state(parameter):
                local, device = _local(value), _local(parameter).device
                if local.device != device or (parameter, name) in self._host:
                    here = torch.empty_like(local, device=device, pin_memory=False)
                    self._copy(here, local, 0)
                    self._optimizer.state[parameter][name] = _like(value, here)

    def _save(self, part: list[nn.Parameter]) -> None:
        sources = list[Tensor]()
        for parameter in part:
            for name, value in self._state(parameter):
                local = _local(value)
                host = self._host.get((parameter, name))
                if host is None:
                    host = torch.empty_like(local, device="cpu", pin_memory=local.is_cuda)
                    self._host[parameter, name] = host
                self._copy(host, local, 1)
                sources.append(local)
                self._optimizer.state[parameter][name] = _like(value, host)
        if self._streams is not None:
            self._leaving.append((sources, self._streams[1].record_event()))
            if len(self._leaving) > 1:  # later work, which may reuse this memory, waits
                torch.cuda.current_stream().wait_event(self._leaving.popleft()[1])

    def _state(self, parameter: nn.Parameter) -> list[tuple[str, Tensor]]:
        state = self._optimizer.state.get(parameter, {})
        return [(name, value) for name, value in state.items() if isinstance(value, Tensor) and value.ndim > 0]

    def _copy(self, target: Tensor, source: Tensor, stream: int) -> None:
        """Copy on stream 0 (to the device) or 1 (to the host); the caller keeps the device's tensor."""
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


def _parts(groups: list[dict[str, Any]], part_bytes: int) -> Iterator[Part]:
    """Split each group into parts of at most `part_bytes` of whole parameters, so that all ranks split alike."""
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
    """Return this rank's part, detached from the graph."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def _like(value: Tensor, local: Tensor) -> Tensor:
    """Return `local` as this rank's part of a tensor like `value`; FSDP creates its host shards in the same way."""
    if isinstance(value, DTensor):
        return DTensor(local, value._spec, requires_grad=False)
    return local
