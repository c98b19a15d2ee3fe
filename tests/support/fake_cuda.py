"""Simulated CUDA devices: the trainer's code for GPUs runs on any machine, without values.

Tensors are FakeTensors with shape, dtype and device but no data, so a step takes as long as its Python code. Tests
check devices, dtypes and shapes of every operation, and the reads from the device. Streams and events of `torch.cuda`
are replaced; collectives are those of torch's fake process group.
"""

import contextlib
import traceback
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # registers collectives of fake tensors
import torch.nn.attention.varlen  # registers the kernel of packed rows
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from prime_rl.trainer import fsdp
from prime_rl.trainer.weights import policy_loading

DEVICE = torch.device("cuda", 0)
_META = torch.device("meta")
_MAKE_DTENSORS = ("distributed/tensor/_api.py", "distributed/tensor/_dispatch.py")
_READS = {"_local_scalar_dense", "nonzero", "masked_select", "equal"}
_NONDETERMINISTIC = {"histc", "cumsum", "median", "nll_loss_forward"}
# Values that the host reads: norms and losses (float64) are finite and large; flags are false.
_ANSWERS = {torch.float64: 2.0, torch.float32: 0.0, torch.bool: False}


class FakeStream:
    """Replaces torch.cuda.Stream: counts its work, and the work of other streams that it has waited for."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = DEVICE
        self.queued = 0
        self.waited: dict[FakeStream, int] = {}

    def wait_stream(self, other: "FakeStream") -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: "FakeEvent") -> None:
        for stream, number in event.after.items():
            self.waited[stream] = max(number, self.waited.get(stream, 0))

    def record_event(self, event: "FakeEvent | None" = None) -> "FakeEvent":
        event = event or FakeEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        _streams[0].wait_stream(self)

    def __enter__(self) -> "FakeStream":
        _streams.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _streams.pop()


class FakeEvent:
    """Replaces torch.cuda.Event: the work that was queued before it, in its stream and in awaited streams."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.after: dict[FakeStream, int] = {}

    def record(self, stream: FakeStream | None = None) -> None:
        stream = stream or current_stream()
        self.after = {**stream.waited, stream: stream.queued}

    def wait(self, stream: FakeStream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        _streams[0].wait_event(self)


_streams = [FakeStream()]


def current_stream(*_: Any) -> FakeStream:
    return _streams[-1]


class Device(TorchDispatchMode):
    """Simulates reads from the device and records them.

    Attributes:
        nondeterministic: for every call that `deterministic` refuses on CUDA, the function.
        reads: for every read from the device, the function of prime_rl or of a library.
        integer: the value of integers that the host reads.
        side_work: memory that work on other streams than the first uses; see `watch_memory`.
        most_bytes: largest size of such memory in use at the same time.
        early: number of times that such memory was freed before the first stream had waited for that work.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []
        self.nondeterministic: list[str] = []
        self.integer = 1
        self.side_work: list[tuple[StorageWeakRef, int, FakeStream, int]] | None = None
        self.most_bytes = self.early = 0

    def watch_memory(self) -> None:
        """Track memory that the first stream allocates and other streams use.

        It can be reused as soon as no tensor refers to it, independent of the streams' progress: the host runs ahead.
        """
        self.side_work = []

    def _track_memory(self, tensors: list[FakeTensor]) -> None:
        assert self.side_work is not None
        kept, stream = [], current_stream()
        for work in self.side_work:
            memory, _, other, number = work
            if not memory.expired():
                kept.append(work)
            elif _streams[0].waited.get(other, 0) < number:
                self.early += 1
        stream.queued += 1
        if stream is not _streams[0]:
            on_device = [tensor.untyped_storage() for tensor in tensors if _on_device(tensor)]
            kept += [(StorageWeakRef(memory), memory.nbytes(), stream, stream.queued) for memory in on_device]
        self.side_work = kept
        self.most_bytes = max(self.most_bytes, sum({memory.cdata: size for memory, size, *_ in kept}.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            # C++ code, mainly autograd, would look for a device thread and its streams.
            # A DTensor stores the result as its device, so it gets the true one.
            callers = (frame.f_code for frame, _ in islice(traceback.walk_stack(None), 6))
            for_dtensor = any(
                code.co_name == "_from_local_no_grad" or code.co_filename.endswith(_MAKE_DTENSORS) for code in callers
            )
            return _META if _on_device(args[0]) and not for_dtensor else args[0].fake_device
        tensors = [x for x in tree_leaves(args) if isinstance(x, FakeTensor)]
        if self.side_work is not None:
            self._track_memory(tensors)
        if any(map(_on_device, tensors)):  # scalars that C++ code converted to meta tensors
            for tensor in tensors:
                if tensor.fake_device == _META:
                    tensor.fake_device = DEVICE
        if kwargs.get("device") == _META and args and _on_device(args[0]):
            kwargs = {**kwargs, "device": DEVICE}
        name = func.overloadpacket.__name__
        if name in _NONDETERMINISTIC and _on_device(args[0]) and args[0].is_floating_point():
            self.nondeterministic.append(_caller())
        if name in _READS and _on_device(args[0]):
            self.reads.append(_caller())
        if name == "nonzero":  # all elements, because shapes must be known
            return args[0].new_empty((args[0].numel(), args[0].ndim), dtype=torch.int64)
        if name == "_local_scalar_dense":
            return _ANSWERS.get(args[0].dtype, self.integer)
        if name == "_pin_memory":  # like torch's allocator of pinned memory
            if _on_device(args[0]):
                raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
            return args[0].clone()
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)


def _on_device(tensor: Any) -> bool:
    return isinstance(tensor, FakeTensor) and tensor.fake_device.type == "cuda"


def _caller() -> str:
    for frame in reversed(traceback.extract_stack()):
        if any(part in frame.filename for part in ("/prime_rl/", "/transformers/", "/tests/unit/")):
            return f"{Path(frame.filename).name}:{frame.name}"
    return "elsewhere"


@staticmethod
def _one_group(tensors: list[list[Tensor]], with_indices: bool = False) -> Any:
    return {(DEVICE, None): (tensors, list(range(len(tensors[0]))))}


def without_fakes(function: Any) -> Any:
    """Wrap a function that computes with real values, such as coordinates in a mesh."""

    def real(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return real


@contextlib.contextmanager
def fake_cuda(ranks: int = 1) -> Iterator[Device]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeTensor, "is_cuda", property(lambda self: self.fake_device.type == "cuda"), raising=False)
        patch.setattr(torch.cuda, "Stream", FakeStream)
        patch.setattr(torch.cuda, "Event", FakeEvent)
        patch.setattr(torch.cuda, "current_stream", current_stream)
        patch.setattr(torch.cuda, "stream", lambda stream: stream)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        # After an import of vLLM torch concludes from `device_count` that CUDA is available.
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(torch.cuda, "set_device", lambda _: None)
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        patch.setattr(policy_loading, "_build_policy", without_fakes(policy_loading._build_policy))
        for name in ("freeze", "add_adapters"):
            patch.setattr(policy_loading, name, without_fakes(getattr(policy_loading, name)))
        for name in ("Mesh", "apply_expert_parallel"):
            patch.setattr(fsdp, name, without_fakes(getattr(fsdp, name)))
        patch.setattr(DeviceMesh, "_concatenate", staticmethod(without_fakes(DeviceMesh._concatenate)))
        patch.setattr(Optimizer, "_group_tensors_by_device_and_dtype", _one_group)
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        try:
            with FakeTensorMode(allow_non_fake_inputs=True), Device() as device:
                yield device
        finally:
            dist.destroy_process_group()
