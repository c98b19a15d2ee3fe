"""A simulated device for vLLM's weight transfer: all of vLLM's code runs except the calls of CUDA and NCCL.

    NCCL communicator             a TCP store; a broadcast returns after all ranks have it, or after an abort
    device memory shared by IPC   a file in memory
    streams, current device       no operation

`python -m tests.support.cpu_transfer ARGUMENTS` is `uv run inference ARGUMENTS` with this device.
"""

import math
import tempfile
import threading
import time
import types
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

GPU = "GPU-of-the-test"
JOIN_TIMEOUT_SECONDS = 60
"""For the other ranks to join. NCCL has no limit; with one, no test leaves a thread behind."""
Patch = Callable[[Any, str, Any], None]


class Communicator:
    """Replaces the NCCL communicator of one rank.

    Attributes:
        corrupt: changes the bytes of each broadcast on the sending side.
    """

    corrupt: Callable[[bytearray], None] = staticmethod(lambda data: None)

    def __init__(self, host: str, port: int, rank: int, world_size: int, device: object = None) -> None:
        self._store = torch.distributed.TCPStore(
            host, port, is_master=rank == 0, timeout=timedelta(seconds=60), wait_for_workers=False, use_libuv=False
        )
        self.rank, self.size = rank, world_size
        self.count = 0
        self._aborted = threading.Event()
        self._store.set(f"here/{rank}", b"1")
        for other in range(world_size):
            self._wait(f"here/{other}", JOIN_TIMEOUT_SECONDS)

    def broadcast(self, tensor: Tensor, src: int, stream: object = None) -> None:
        """Like `PyNcclCommunicator.broadcast`; does nothing after an abort."""
        if self._aborted.is_set():
            return
        self.count += 1
        key = f"broadcast/{self.count}"
        if self.rank == src:
            data = bytearray(tensor.numpy().tobytes())
            self.corrupt(data)
            self._store.set(key, bytes(data))
            for rank in range(self.size):
                if rank != src:
                    self._wait(f"{key}/{rank}")
        else:
            self._wait(key)
            tensor.copy_(torch.frombuffer(bytearray(self._store.get(key)), dtype=torch.uint8))
            self._store.set(f"{key}/{self.rank}", b"1")

    def destroy(self) -> None:
        """Abort."""
        self._aborted.set()

    def _wait(self, key: str, timeout_seconds: float = math.inf) -> None:
        deadline = time.monotonic() + timeout_seconds
        while not self._aborted.wait(0.002) and not self._exists(key):
            if time.monotonic() > deadline:
                raise RuntimeError(f"no rank has set {key} in time")

    def _exists(self, key: str) -> bool:
        try:
            return self._store.check([key])
        except RuntimeError:
            return False  # the store's process has exited; NCCL would wait


class _Stream:
    def synchronize(self) -> None:
        """Do nothing: all work is synchronous."""


class _Memory:
    """Replaces device memory by files that other processes can open."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._paths: dict[int, str] = {}

    def empty(self, *size: Any, device: Any = None, **options: Any) -> Tensor:
        if device != "cuda":
            return torch.empty(*size, device=device, **options)
        with tempfile.NamedTemporaryFile(dir=self._directory, delete=False) as file:
            path = file.name
        tensor = torch.from_file(path, shared=True, size=size[0], dtype=torch.uint8)
        self._paths[tensor.data_ptr()] = path
        return tensor

    def reduce(self, tensor: Tensor) -> tuple[None, tuple[Any, ...]]:
        """Return torch's fifteen arguments of `rebuild_cuda_tensor`."""
        handle = self._paths[tensor.data_ptr()].encode()
        of_storage = (torch.storage.TypedStorage, torch.uint8, 3, handle, tensor.nbytes, 0, False)
        return None, (torch.Tensor, tensor.size(), tensor.stride(), 0, *of_storage, b"\x00\xffcounter", 8, b"", True)


def _rebuild(*arguments: Any) -> Tensor:
    cls, size, stride, _, storage, dtype, device, handle, nbytes, *_ = arguments
    assert (cls, storage, dtype, stride) == (torch.Tensor, torch.storage.TypedStorage, torch.uint8, (1,))
    assert device is None and isinstance(handle, bytes) and isinstance(arguments[11], bytes)
    assert tuple(size) == (nbytes,)
    return torch.from_file(handle.decode(), shared=True, size=nbytes, dtype=dtype)


class _Torch(types.ModuleType):
    """torch with a simulated device."""

    def __init__(self, memory: _Memory) -> None:
        super().__init__("torch")
        self.empty = memory.empty
        self.accelerator = types.SimpleNamespace(current_device_index=lambda: 3)
        self.cuda = types.SimpleNamespace(
            Stream=_Stream,
            stream=lambda stream: nullcontext(),
            current_stream=_Stream,
            is_available=lambda: False,
            get_device_properties=lambda index: types.SimpleNamespace(uuid=GPU),
            ipc_collect=lambda: None,
            synchronize=lambda: None,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def install(patch: Patch, directory: Path) -> None:
    """Replace the device in this process; `directory` holds shared memory."""
    import torch.multiprocessing.reductions
    from vllm.distributed.weight_transfer import ipc_engine, nccl_common, nccl_engine, packed_tensor

    memory = _Memory(str(directory))
    for module in (ipc_engine, nccl_common, nccl_engine, packed_tensor):
        patch(module, "torch", _Torch(memory))
    patch(nccl_common, "stateless_init_process_group", Communicator)
    patch(packed_tensor, "_get_streams", lambda device, count: (_Stream(),) * count)
    patch(packed_tensor, "reduce_tensor", memory.reduce)
    patch(torch.multiprocessing.reductions, "rebuild_cuda_tensor", _rebuild)


def main() -> None:
    """Run the inference server."""
    from prime_rl.entrypoints.inference import main as serve
    from prime_rl.inference import server

    prepare = server._prepare_vllm

    def prepare_and_install(*arguments: Any) -> Any:
        prepared = prepare(*arguments)  # sets the environment that vLLM reads during its import
        install(setattr, Path(tempfile.gettempdir()))
        return prepared

    setattr(server, "_prepare_vllm", prepare_and_install)  # noqa: B010
    serve()


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # a process that the server has spawned
    install(setattr, Path(tempfile.gettempdir()))
