"""Keys of the trainer that trade time for memory without changing the result."""

from typing import Literal

from pydantic import Field

from prime_rl.loading.base_config import BaseConfig


class CompileConfig(BaseConfig):
    """torch.compile of each transformer block."""

    fullgraph: bool = False
    """Fail if a block does not compile as one graph."""


class ActivationCheckpointConfig(BaseConfig):
    """Recompute activations in the backward pass instead of storing them."""

    mode: Literal["full", "selective"] = "full"
    """full stores only a block's input; selective also stores the results of attention and matrix products."""

    freq: int = Field(1, ge=1)
    """Recompute every n-th block; 1 saves most memory."""


class ActivationOffloadConfig(BaseConfig):
    """Store the saved tensors of the blocks in host memory until the backward pass."""

    pin_memory: bool = True
    """Use page-locked host memory, so that copies overlap with computation (CUDA only)."""

    max_inflight_activations: int = Field(5, ge=1)
    """Maximum number of concurrent copies: more hide the copies better and use more GPU memory."""
