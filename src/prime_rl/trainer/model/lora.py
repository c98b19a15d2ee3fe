"""Low-rank adapters (LoRA, Hu et al. 2021): frozen linear layers W with a trained addition (alpha / rank) B A.

An adapted layer keeps the names of its own weights and adds `lora_A.weight` and `lora_B.weight`, the names that peft
uses. Only adapters have gradients and optimizer state. B is initialised with 0, so the policy starts as the base model.
"""

import re

import torch
import torch.nn.functional as F
from loguru import logger
from torch import Tensor, nn

from prime_rl.configs.training.lora import ALL_LINEAR, DEFAULT_TARGETS, LoRAConfig
from prime_rl.core.errors import ConfigError
from prime_rl.trainer.model.policy_model import PolicyModel

_SHOWN = 12


class LowRank(nn.Module):
    """One factor of an adapter, float32: A is [rank, in], B is [out, rank]."""

    def __init__(self, rows: int, columns: int, zero: bool, device: torch.device) -> None:
        super().__init__()
        self._zero = zero
        self.weight = nn.Parameter(torch.empty(rows, columns, dtype=torch.float32, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise A as torch initialises a linear layer, uniform in +-1/sqrt(in), and B with 0."""
        if self._zero:
            nn.init.zeros_(self.weight)
        else:
            nn.init.kaiming_uniform_(self.weight, a=5**0.5)


class AdaptedLinear(nn.Linear):
    """A frozen linear layer with an adapter: y = W x + b + (alpha / rank) B A dropout(x)."""

    def __init__(self, base: nn.Linear, config: LoRAConfig) -> None:
        """Use the weights of `base`, which may be on the meta device."""
        super().__init__(base.in_features, base.out_features, base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.config = config  # the same in all layers of a policy
        self.lora_A = LowRank(config.rank, base.in_features, zero=False, device=base.weight.device)
        self.lora_B = LowRank(base.out_features, config.rank, zero=True, device=base.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out]. Dropout is active if gradients are enabled, also in evaluation mode."""
        base = super().forward(x)
        if self.config.dropout and torch.is_grad_enabled():
            x = F.dropout(x, self.config.dropout)
        return base + F.linear(F.linear(x, self.lora_A.weight) * self.scale, self.lora_B.weight)

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return self.config.alpha / self.config.rank


def add_adapters(policy: PolicyModel, config: LoRAConfig, compute_dtype: torch.dtype) -> None:
    """Freeze the policy, which may be on the meta device, and add adapters, in place, before it is sharded.

    `compute_dtype` is the dtype of the forward pass, for `base_dtype` auto. Raises ConfigError if the model does not
    have a target layer.
    """
    freeze(policy, compute_dtype if config.base_dtype == "auto" else getattr(torch, config.base_dtype))
    for name in _targets(policy, config):
        policy.causal_lm.set_submodule(name, AdaptedLinear(policy.causal_lm.get_submodule(name), config))
    if any(p.ndim > 2 for p in policy.parameters()):
        logger.warning("model.lora: stacked experts get no adapter and stay frozen")


def freeze(policy: PolicyModel, dtype: torch.dtype) -> None:
    """Convert the policy's parameters to constants of type `dtype`, in place."""
    policy.requires_grad_(False)
    for parameter in policy.parameters():
        # In place, because the loader identifies parameters by their identity.
        parameter.data = parameter.data.to(dtype)


def adapted_layers(policy: PolicyModel) -> dict[str, AdaptedLinear]:
    """Return name in `policy.causal_lm` -> layer, for the layers with an adapter."""
    return {name: layer for name, layer in policy.causal_lm.named_modules() if isinstance(layer, AdaptedLinear)}


def _targets(policy: PolicyModel, config: LoRAConfig) -> list[str]:
    # Without the output head, whose forward is not used.
    head, modules = policy.causal_lm.get_output_embeddings(), policy.causal_lm.named_modules()
    linear = [name for name, module in modules if type(module) is nn.Linear and module is not head]
    chosen: set[str] = set()
    for target in config.target_modules:
        matched = {
            name
            for name in linear
            if target == ALL_LINEAR or f".{name}".endswith(f".{target}") or re.fullmatch(target, name)
        }
        if not matched and config.target_modules != DEFAULT_TARGETS:
            raise ConfigError(f"model.lora.target_modules: no linear layer matches {target!r}; {_available(linear)}")
        chosen |= matched
    if not chosen:
        raise ConfigError(f"model.lora.target_modules: the model has none of the default targets; {_available(linear)}")
    return [name for name in linear if name in chosen]


def _available(linear: list[str]) -> str:
    """Describe the layers by the last parts of their names."""
    kinds = sorted({name.rpartition(".")[2] for name in linear})
    more = f" and {len(kinds) - _SHOWN} more" if len(kinds) > _SHOWN else ""
    return f"available: {', '.join(kinds[:_SHOWN])}{more}, or {ALL_LINEAR}" if kinds else "it has no linear layer"
