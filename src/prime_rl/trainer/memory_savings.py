"""Recomputation and compilation of blocks, and offloading, as configured; results do not change (I8, I9).

Each option replaces the forward of a block, not the block: parameters keep their published names, and FSDP's hooks stay
outside, so the wrapped code sees gathered weights. From the inside out: recomputation, compilation (which plans the
recomputation), copies to the host.

`ActivationOffload` copies the tensors that blocks save for the backward pass to the host. At most `inflight` copies
exist at a time: in the forward pass the device holds their sources, in the backward pass the tensors that are needed
next are prefetched.

`offload_state` keeps an optimizer's state on the host; it is on the device only during the update, and no bit changes.
Parameters are updated in parts, the same on all ranks. During the update of one part, the state of the next part is
copied to the device and that of the previous part to the host. After a step all state is on the host, where checkpoints
read it. State that a checkpoint loads to the device moves to the host in the next step.
"""

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import psutil
import torch
from loguru import logger
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.core.page_locked_memory import lock_pages
from prime_rl.trainer.model.policy_model import PolicyModel

Forward = Callable[..., Any]

# Graphs for each kind of block: with and without gradient, with fixed and dynamic lengths.
_MAX_GRAPHS = 64
# Names of the operators of matrix products, of exchanges between ranks, and of the choice of experts: another choice
# in the recomputation would give the exchanges other sizes.
_COSTLY = {"mm", "addmm", "bmm", "baddbmm", "linear", "_grouped_mm", "_scaled_mm", "all_to_all_single", "topk"}


def host_bytes(config: TrainerConfig | SFTConfig, parameters: int, trained: int, share: float) -> float:
    """Host memory that this node will need in addition, at least, with a `share` of the ranks (docs/scaling.md)."""
    model, state = config.model, 8 if config.optim.type == "adamw" else 4
    copied = (
        state * model.optim_cpu_offload
        + (4 + state) * model.fsdp_cpu_offload  # gradients and state; the weights are loaded
        + (4 + state) * (config.ckpt is not None and config.ckpt.save_async)
    )
    broadcast = config.weight_broadcast.type if isinstance(config, TrainerConfig) else "filesystem"
    kept = 4 * parameters if broadcast == "nccl" else 0  # by rank 0, which warns
    return share * (model.dp_replicate * copied * trained + 2 * parameters) + kept


def warn_if_host_memory_is_short(config: TrainerConfig | SFTConfig, policy: PolicyModel, num_ranks: int) -> None:
    """Log a warning if this machine has less memory than its ranks will need. Only rank 0 needs to call it."""
    parameters = list(policy.parameters())
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    share = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks)) / num_ranks
    needed = host_bytes(config, sum(parameter.numel() for parameter in parameters), trained, share)
    free = psutil.virtual_memory().available
    if needed > free:
        logger.warning(
            "host memory: the trainer will need at least {:.1f} GiB on this machine, and {:.1f} GiB are available; "
            "turn off model.optim_cpu_offload, model.fsdp_cpu_offload or ckpt.save_async, or use more machines",
            needed / 2**30,
            free / 2**30,
        )


def prepare_blocks(policy: PolicyModel, config: TrainerModelConfig) -> None:
    """Wrap the forward of the blocks, after adapters were added and before they are sharded."""
    ao = config.ac_offloading
    offload = ActivationOffload(ao.pin_memory, ao.max_inflight_activations) if ao else None
    for i, block in enumerate(policy.blocks):
        forward = block.forward
        if config.ac is not None and i % config.ac.freq == 0:
            has_dropout = config.lora is not None and config.lora.dropout > 0
            forward = checkpoint_forward(forward, selective=config.ac.mode == "selective", random=has_dropout)
        if config.compile is not None:
            # Blocks of one kind share graphs: the first one is for the length of the first row, the second for all.
            torch._dynamo.config.recompile_limit = max(_MAX_GRAPHS, torch._dynamo.config.recompile_limit)
            forward = torch.compile(forward, fullgraph=config.compile.fullgraph)
        if offload is not None:
            forward = offload.wrap(block, forward)
        block.forward = forward


def prepare_optimizer(optimizer: Optimizer, config: TrainerModelConfig) -> Optimizer:
    """Set up offloading of the optimizer's state, before its first step; return the optimizer."""
    if config.optim_cpu_offload:
        offload_state(optimizer)
    return optimizer


def checkpoint_forward(forward: Forward, selective: bool = False, random: bool = False) -> Forward:
    """Save only the inputs of a block's `forward`, and recompute the rest in the backward pass.

    With `selective`, results of matrix products, attention and exchanges between ranks are saved as well: the selective
    recomputation of Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models", adapted
    to attention kernels that never store scores, whose results are small compared with their cost. `random` restores
    the random state for the recomputation, which only adapters with dropout need.
    """
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": random}
    if selective:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_costly)

    def run(*args: Any, **kwargs: Any) -> Any:
        if not selective or torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        with _CopiedChoices():
            return forward(*args, **kwargs)

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(run, *args, **options, **kwargs)

    return recomputed


class _CopiedChoices(TorchFunctionMode):
    """Copies the scores that a `topk` returns: many routers divide them in place, and saved results must not change."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if getattr(function, "__name__", "") == "topk":
            return torch.return_types.topk((result.values.clone(), result.indices))
        return result


def _keep_costly(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    """Save the results of costly operators, which are recognized by their names."""
    name = str(operator).split(".")[1]
    is_costly = name in _COSTLY or "attention" in name or "attn" in name
    return CheckpointPolicy.MUST_SAVE if is_costly else CheckpointPolicy.PREFER_RECOMPUTE


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
                    host = torch.empty_like(local, device="cpu", pin_memory=False)
                    if local.is_cuda:
                        lock_pages(host)  # kept for the whole run; torch's own would take up to twice the bytes
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
