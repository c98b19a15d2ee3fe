"""A rank's pieces of one version in host memory, in the published precision.

Weights stand still from one update to the next. So the copy may be taken while the next step's forward and backward
already run, on a CUDA stream or a thread of its own; it must be complete before the update (`Publisher.guard`).
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from prime_rl.errors import RunError
from prime_rl.trainer.publication.plan import Plan, view


class Snapshot:
    """The buffer of one rank, used again for every version.

    Attributes:
        buffer: uint8, page-locked where the weights are on CUDA.
    """

    def __init__(self, plan: Plan, rank: int, device: torch.device) -> None:
        """Reserve the memory; `device` is where the rank computes."""
        self.buffer = torch.empty(plan.buffer_bytes[rank], dtype=torch.uint8)
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._stream, self._copied = torch.cuda.Stream(device), torch.cuda.Event()
            _lock_pages(self.buffer)
        else:
            self.buffer.zero_()  # so that the pages are there before the first version
        self._places = {
            source.name: view(self.buffer, source.dtype, piece.box[1], piece.begin)
            for source in plan.sources
            for piece in source.pieces
            if piece.rank == rank
        }

    def enqueue(self, tensors: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Start copying what is on CUDA, behind all work that is queued there.

        Returns:
            Pairs of place and shard of what is not on CUDA, for the caller to copy.
        """
        shards = {name: _local(tensor) for name, tensor in tensors.items() if name in self._places}
        on_host = [(self._places[name], shard) for name, shard in shards.items() if not shard.is_cuda]
        if self._stream is not None and self._copied is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for name, shard in shards.items():
                    if shard.is_cuda:
                        # The device rounds first: half the bytes cross the bus.
                        self._places[name].copy_(shard.to(self._places[name].dtype), non_blocking=True)
                self._copied.record(self._stream)
        return on_host

    def hold_back(self) -> None:
        """Let work that is queued on CUDA from now on wait for the copy; the caller does not wait."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def finish(self) -> None:
        """Wait until what `enqueue` has started is there."""
        if self._copied is not None:
            self._copied.synchronize()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _lock_pages(buffer: Tensor) -> None:
    """Lock the buffer's pages in memory; torch's own page-locked memory rounds sizes up to powers of two."""
    if buffer.nbytes and (code := int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))):
        raise RunError(
            f"cannot lock {buffer.nbytes / 2**30:.1f} GiB of host memory for a copy of the weights (CUDA error {code})"
        )
