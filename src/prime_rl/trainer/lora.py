"""Low-rank adapters (LoRA, Hu et al. 2021): frozen linear layers W with a trained addition (alpha / rank) B A.

An adapted layer keeps the names of its own weights and adds `lora_A.weight` and `lora_B.weight` below its name: files
of base weights load and are published under their own names, and adapters have the names that peft gives them. Only
adapters have gradients and optimizer state. At the start B is 0: the policy is exactly the base model.
"""

import re
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from loguru import logger
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from prime_rl.configs.lora import ALL_LINEAR, DEFAULT_TARGETS, LoRAConfig
from prime_rl.errors import ConfigError
from prime_rl.trainer.model import PolicyModel

_SHOWN = 12


class LowRank(nn.Module):
    """One factor of an adapter.

    Attributes:
        weight: float32; A is [rank, in], B is [out, rank].
    """

    def __init__(self, rows: int, columns: int, zero: bool, device: torch.device) -> None:
        super().__init__()
        self._zero = zero
        self.weight = nn.Parameter(torch.empty(rows, columns, dtype=torch.float32, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw A as torch draws a linear layer, uniform in +-1/sqrt(in); set B to 0."""
        if self._zero:
            nn.init.zeros_(self.weight)
        else:
            nn.init.kaiming_uniform_(self.weight, a=5**0.5)


class AdaptedLinear(nn.Linear):
    """A frozen linear layer and its adapter: y = W x + b + (alpha / rank) B A dropout(x).

    Attributes:
        lora_A, lora_B: the factors.
        config: rank, alpha, dropout and what is published; the same in all layers of a policy.
    """

    def __init__(self, base: nn.Linear, config: LoRAConfig) -> None:
        """Take over the weights of `base`; its device may be meta."""
        super().__init__(base.in_features, base.out_features, base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.config = config
        self.lora_A = LowRank(config.rank, base.in_features, zero=False, device=base.weight.device)
        self.lora_B = LowRank(base.out_features, config.rank, zero=True, device=base.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out]. Dropout acts where gradients are computed, whatever the mode of the module."""
        base = super().forward(x)
        if self.config.dropout and torch.is_grad_enabled():
            x = F.dropout(x, self.config.dropout)
        return base + F.linear(F.linear(x, self.lora_A.weight) * self.scale, self.lora_B.weight)

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return self.config.alpha / self.config.rank

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """Add the adapter to `weight`, this layer's whole W, in float32. All ranks call it together."""
        a, b = (_whole(factor.weight) for factor in (self.lora_A, self.lora_B))
        return torch.addmm(weight.float(), b, a, alpha=self.scale)


def add_adapters(policy: PolicyModel, config: LoRAConfig, compute_dtype: torch.dtype) -> None:
    """Freeze the policy and give its target layers adapters, in place, before it is sharded.

    Args:
        policy: with storage or on the meta device.
        config: which layers, and how.
        compute_dtype: of forward and backward: what `base_dtype` auto stands for.

    Raises:
        ConfigError: a target that the model does not have.
    """
    freeze(policy, compute_dtype if config.base_dtype == "auto" else getattr(torch, config.base_dtype))
    for name in _targets(policy, config):
        policy.causal_lm.set_submodule(name, AdaptedLinear(policy.causal_lm.get_submodule(name), config))
    if any(p.ndim > 2 for p in policy.parameters()):
        logger.warning("model.lora: experts that are kept as one stack of matrices get no adapter and stay frozen")


def freeze(policy: PolicyModel, dtype: torch.dtype) -> None:
    """Let the policy's parameters be constants of type `dtype`, in place."""
    policy.requires_grad_(False)
    for parameter in policy.parameters():
        # In place: whoever notes parameters for loading goes on knowing them.
        parameter.data = parameter.data.to(dtype)


def adapted_layers(policy: PolicyModel) -> dict[str, AdaptedLinear]:
    """Return the layers that have an adapter by their names in `policy.causal_lm`; empty without LoRA."""
    return {name: layer for name, layer in policy.causal_lm.named_modules() if isinstance(layer, AdaptedLinear)}


def _targets(policy: PolicyModel, config: LoRAConfig) -> list[str]:
    linear = list(_linear_layers(policy))
    chosen: set[str] = set()
    for target in config.target_modules:
        matched = {name for name in linear if _matches(name, target)}
        if not matched and config.target_modules != DEFAULT_TARGETS:
            raise ConfigError(
                f"model.lora.target_modules: no linear layer is called {target!r}; {_what_exists(linear)}"
            )
        chosen |= matched
    if not chosen:
        raise ConfigError(f"model.lora.target_modules: the model has none of the default; {_what_exists(linear)}")
    return [name for name in linear if name in chosen]


def _linear_layers(policy: PolicyModel) -> Iterator[str]:
    """Names of what can have an adapter; not of the head, whose matrix is used without its layer."""
    head = policy.causal_lm.get_output_embeddings()
    for name, module in policy.causal_lm.named_modules():
        if type(module) is nn.Linear and module is not head:
            yield name


def _matches(name: str, target: str) -> bool:
    plain = name == target or name.endswith(f".{target}")
    return target == ALL_LINEAR or plain or re.fullmatch(target, name) is not None


def _what_exists(linear: list[str]) -> str:
    """List the last parts of the names."""
    kinds = sorted({name.rpartition(".")[2] for name in linear})
    more = f" and {len(kinds) - _SHOWN} more" if len(kinds) > _SHOWN else ""
    return f"there are {', '.join(kinds[:_SHOWN])}{more}; or say {ALL_LINEAR}" if kinds else "it has no linear layer"


def _whole(tensor: Tensor) -> Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
