"""Low-rank adapters (LoRA, Hu et al. 2021): frozen linear layers W with a trained addition (alpha / rank) B A.

An adapted layer keeps the names of its own weights and adds `lora_A.weight` and `lora_B.weight`, the names that peft
uses. Only adapters have gradients and optimizer state. B is initialised with 0, so the policy starts as the base model.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from loguru import logger
from torch import Tensor, nn

from prime_rl.configs.training.model import ALL_LINEAR, DEFAULT_TARGETS, LoRAConfig
from prime_rl.core.errors import ConfigError
from prime_rl.trainer.model.policy_model import PolicyModel

_SHOWN = 12


class LowRank(nn.Module):
    """One factor of an adapter, float32: A is [rank, in], B is [out, rank]; None where no adapter is active."""

    weight: nn.Parameter | None

    def __init__(self, rows: int, columns: int, zero: bool, device: torch.device, is_own: bool = True) -> None:
        super().__init__()
        self._zero = zero
        own = nn.Parameter(torch.empty(rows, columns, dtype=torch.float32, device=device)) if is_own else None
        self.register_parameter("weight", own)
        if is_own:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise A as torch initialises a linear layer, uniform in +-1/sqrt(in), and B with 0."""
        if self._zero:
            nn.init.zeros_(self.weight)
        else:
            nn.init.kaiming_uniform_(self.weight, a=5**0.5)


class AdaptedLinear(nn.Linear):
    """A frozen linear layer with an adapter: y = W x + b + (alpha / rank) B A dropout(x)."""

    def __init__(self, base: nn.Linear, config: LoRAConfig, is_own: bool = True) -> None:
        """Use the weights of `base`, perhaps on the meta device; without `is_own` there is only room for factors."""
        super().__init__(base.in_features, base.out_features, base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.config = config  # the same in all layers of a policy
        device = base.weight.device
        self.lora_A = LowRank(config.rank, base.in_features, zero=False, device=device, is_own=is_own)
        self.lora_B = LowRank(base.out_features, config.rank, zero=True, device=device, is_own=is_own)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out]. Dropout is active if gradients are enabled, also in evaluation mode."""
        base = super().forward(x)
        a, b = self.lora_A.weight, self.lora_B.weight
        if a is None or b is None:
            return base
        if self.config.dropout and torch.is_grad_enabled():
            x = F.dropout(x, self.config.dropout)
        # FSDP casts the factors that it shards; the others are float32.
        return base + F.linear(F.linear(x, a.to(x.dtype)) * self.scale, b.to(x.dtype))

    @property
    def scale(self) -> float:
        """Factor of the adapter's output: alpha / rank."""
        return self.config.scale


class Adapter:
    """The trained factors of one model over a shared policy, whole on every rank, float32.

    The policy has room for one adapter at a time; `activate` puts this one there. FSDP does not know the factors, so
    ranks may run rows of different adapters in the same forward pass.

    Attributes:
        factors: name of a layer -> A [rank, in] and B [out, rank].
    """

    def __init__(self, rooms: Mapping[str, nn.Linear], config: LoRAConfig, seed: int, device: torch.device) -> None:
        """Initialise as `LowRank`, from `seed` alone, for the layers in `rooms`."""
        self.config, self._rooms = config, rooms
        self.factors: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}
        generator = torch.Generator().manual_seed(seed)
        for name, layer in rooms.items():
            a = torch.empty(config.rank, layer.in_features)
            nn.init.kaiming_uniform_(a, a=5**0.5, generator=generator)
            b = torch.zeros(layer.out_features, config.rank)
            self.factors[name] = nn.Parameter(a.to(device)), nn.Parameter(b.to(device))

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All factors, in the order of the layers."""
        return [factor for pair in self.factors.values() for factor in pair]

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Let the policy's layers use these factors for the length of the block, its backward pass included."""
        for name, layer in self._rooms.items():
            layer.lora_A.weight, layer.lora_B.weight = self.factors[name]
            layer.config = self.config
        try:
            yield
        finally:
            for layer in self._rooms.values():
                layer.lora_A.weight = layer.lora_B.weight = None


def add_adapters(policy: PolicyModel, config: LoRAConfig, compute_dtype: torch.dtype, shared: bool = False) -> None:
    """Freeze the policy, which may be on the meta device, and add adapters, in place, before it is sharded.

    `compute_dtype` is the dtype of the forward pass, for `base_dtype` auto. With `shared` there is only room for an
    `Adapter`, also on the output head. Raises ConfigError if the model does not have a target layer.
    """
    freeze(policy, compute_dtype if config.base_dtype == "auto" else getattr(torch, config.base_dtype))
    for name in _targets(policy, config):
        layer = policy.causal_lm.get_submodule(name)
        policy.causal_lm.set_submodule(name, AdaptedLinear(layer, config, is_own=not shared))
    if shared:
        head = policy.causal_lm.get_output_embeddings()
        head.lora_A = LowRank(config.rank, head.in_features, zero=False, device=head.weight.device, is_own=False)
        head.lora_B = LowRank(head.out_features, config.rank, zero=True, device=head.weight.device, is_own=False)
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


def adapter_rooms(policy: PolicyModel) -> dict[str, nn.Linear]:
    """Return name in `policy.causal_lm` -> layer, for the layers of a shared policy that have room for an adapter."""
    return {
        name: layer
        for name, layer in policy.causal_lm.named_modules()
        if isinstance(layer, nn.Linear) and "lora_A" in layer._modules
    }


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
