"""Keys that trade time for memory in the trainer; none of them changes what is computed."""

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from prime_rl.configs.base import BaseConfig
from prime_rl.configs.optim import OptimConfig

if TYPE_CHECKING:
    from prime_rl.configs.trainer import TrainerModelConfig


class CompileConfig(BaseConfig):
    """torch.compile of each transformer block."""

    fullgraph: bool = False
    """Fail where a block does not compile as one graph."""


class ActivationCheckpointConfig(BaseConfig):
    """Recompute activations in the backward pass instead of keeping them."""

    mode: Literal["full", "selective"] = "full"
    """full keeps only a block's input; selective keeps the results of attention and matrix products as well."""

    freq: int = Field(1, ge=1)
    """Recompute every freq-th block; 1 saves most memory."""


class ActivationOffloadConfig(BaseConfig):
    """Keep what blocks save for the backward pass in host memory until then."""

    pin_memory: bool = True
    """Use page-locked host memory, which is copied while the GPU computes; only on CUDA."""

    max_inflight_activations: int = Field(5, ge=1)
    """Tensors on their way at once: more hide the copies better and take more GPU memory."""


def check_memory(model: "TrainerModelConfig", optim: OptimConfig) -> None:
    """Refuse what does not go together.

    Raises:
        ValueError: naming the keys.
    """
    if model.fsdp_cpu_offload and optim.type == "muon":
        raise ValueError(
            "model.fsdp_cpu_offload updates on the CPU, where Muon's matrix products take longer than the step; use "
            "model.optim_cpu_offload, or optim.type 'adamw'"
        )
    if model.fsdp_cpu_offload and model.optim_cpu_offload:
        raise ValueError(
            "model.fsdp_cpu_offload keeps the optimizer's state in host memory already; leave out "
            "model.optim_cpu_offload"
        )
