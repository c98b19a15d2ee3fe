"""Page-locked host memory, for asynchronous copies between host and GPU."""

from typing import TYPE_CHECKING

from prime_rl.core.errors import RunError

if TYPE_CHECKING:
    from torch import Tensor


def lock_pages(buffer: "Tensor") -> None:
    """Page-lock an existing buffer; torch's own page-locked memory rounds sizes up to powers of two.

    Raises:
        RunError: the system does not allow that much locked memory.
    """
    import torch

    if buffer.nbytes and (code := int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))):
        raise RunError(
            f"cannot lock {buffer.nbytes / 2**30:.1f} GiB of host memory for copies of the model (CUDA error {code})"
        )
