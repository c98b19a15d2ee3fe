"""Low-rank adapters (LoRA, Hu et al. 2021): frozen linear layers W with a trained addition (alpha / rank) B A.

An adapted layer keeps the names of its own weights and adds `lora_A.weight` and `lora_B.weight`, the names that peft
uses. Only adapters have gradients and optimizer state. B is initialised with 0, so the policy starts as the base model.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from loguru import logger
from torch import Tensor, nn
from transformers.integrations.moe import _grouped_linear

from prime_rl.configs.training.model import ALL_LINEAR, DEFAULT_TARGETS, EXPERTS, LoRAConfig
from prime_rl.core.errors import ConfigError
from prime_rl.trainer.model.policy_model import PolicyModel
from prime_rl.trainer.parallel.device_mesh import local_tensor

_SHOWN = 12


class LowRank(nn.Module):
    """One factor of an adapter, float32: A is [rank, in], B is [out, rank]; None where no adapter is active.

    The factors of a stack of experts have the experts as an additional first dimension.
    """

    weight: nn.Parameter | None

    def __init__(self, *shape: int, zero: bool, device: torch.device, is_own: bool = True) -> None:
        super().__init__()
        self._zero = zero
        own = nn.Parameter(torch.empty(shape, dtype=torch.float32, device=device)) if is_own else None
        self.register_parameter("weight", own)
        if is_own:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise A as torch initialises a linear layer, uniform in +-1/sqrt(in), and B with 0."""
        assert self.weight is not None
        if self._zero:
            nn.init.zeros_(self.weight)
        elif self.weight.ndim == 2:
            nn.init.kaiming_uniform_(self.weight, a=5**0.5)
        else:
            bound = self.weight.shape[-1] ** -0.5
            nn.init.uniform_(self.weight, -bound, bound)


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

    def merge(self, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Return the sum of the whole weight [out, in] and the whole adapter, float32."""
        return torch.addmm(weight.float(), b, a, alpha=self.scale)


class ExpertsAdapter(nn.Module):
    """The adapters of one stack of experts' matrices: y = W x + (alpha / rank) B A dropout(x) for each expert.

    A is [experts, rank, in] and B is [experts, out, rank]. It belongs to the module of the experts, next to the stack,
    which has the name of the adapter without its ending.
    """

    ENDING = "_lora"

    def __init__(self, stack: nn.Parameter, config: LoRAConfig, is_transposed: bool) -> None:
        """`is_transposed`: the stack is [experts, in, out], not [experts, out, in]."""
        super().__init__()
        self.config, self._is_transposed = config, is_transposed
        count, rows, columns = stack.shape if not is_transposed else stack.mT.shape
        self.lora_A = LowRank(count, config.rank, columns, zero=False, device=stack.device)
        self.lora_B = LowRank(count, rows, config.rank, zero=True, device=stack.device)

    @property
    def scale(self) -> float:
        """Factor of the adapter's output: alpha / rank."""
        return self.config.scale

    def forward(self, tokens: Tensor, ends: Tensor) -> Tensor:
        """Map tokens [n, in], sorted by experts whose last tokens precede `ends` [experts], to [n, out]."""
        a, b = (local_tensor(factor.weight).to(tokens.dtype) for factor in (self.lora_A, self.lora_B))
        if self.config.dropout:
            tokens = F.dropout(tokens, self.config.dropout, training=torch.is_grad_enabled())
        return _grouped_linear(_grouped_linear(tokens, a, ends) * self.scale, b, ends)

    def merge(self, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Return the sum of the whole stack and the whole adapters, float32."""
        sum_ = weight.mT if self._is_transposed else weight
        sum_ = torch.baddbmm(sum_.float(), b, a, alpha=self.scale)
        return sum_.mT.contiguous() if self._is_transposed else sum_


def run_experts(experts: Any, states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Run tokens through experts with adapters; a replacement of the forward of transformers' modules.

    Args:
        experts: the module, with the names and options of transformers' `use_experts_implementation`.
        states: [n, hidden].
        chosen: experts of each token, [n, k].
        weights: of these experts, [n, k].
    """
    expert_ids, order = chosen.flatten().sort(stable=True)
    counts = expert_ids.new_zeros(len(experts.down_proj)).scatter_add(0, expert_ids, torch.ones_like(expert_ids))
    ends = counts.cumsum(0, dtype=torch.int32)

    def project(tokens: Tensor, key: str) -> Tensor:
        bias = getattr(experts, f"{key}_bias")[expert_ids] if experts.has_bias else None
        base = _grouped_linear(tokens, getattr(experts, key), ends, bias, experts.is_transposed)
        return base + getattr(experts, key + ExpertsAdapter.ENDING)(tokens, ends)

    up = project(states[order // chosen.shape[1]], "gate_up_proj" if experts.has_gate else "up_proj")
    results = project(experts._apply_gate(up) if experts.has_gate else experts.act_fn(up), "down_proj")
    results = results * weights.flatten()[order, None]
    results = torch.empty_like(results).index_copy(0, order, results).unflatten(0, chosen.shape)
    return results.sum(1).to(states.dtype)


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
    stacks = _stacks(policy)
    if EXPERTS in config.target_modules:
        if not stacks:
            raise ConfigError(
                f"model.lora.target_modules: the model has no experts that can have adapters, {EXPERTS!r}"
            )
        for experts, keys in stacks:
            for key in keys:
                adapter = ExpertsAdapter(experts.get_parameter(key), config, bool(experts.is_transposed))
                experts.add_module(key + ExpertsAdapter.ENDING, adapter)
            experts.forward = partial(run_experts, experts)
    elif stacks:
        logger.warning(f"model.lora: the experts stay frozen; {EXPERTS!r} in model.lora.target_modules adapts them")


def freeze(policy: PolicyModel, dtype: torch.dtype) -> None:
    """Convert the policy's parameters to constants of type `dtype`, in place."""
    policy.requires_grad_(False)
    for parameter in policy.parameters():
        # In place, because the loader identifies parameters by their identity.
        parameter.data = parameter.data.to(dtype)


def adapted_layers(policy: PolicyModel) -> dict[str, AdaptedLinear]:
    """Return name in `policy.causal_lm` -> layer, for the linear layers with an adapter."""
    return {name: layer for name, layer in policy.causal_lm.named_modules() if isinstance(layer, AdaptedLinear)}


def adapted_experts(policy: PolicyModel) -> dict[str, ExpertsAdapter]:
    """Return name in `policy.causal_lm` -> adapters, for the stacks of experts that have them."""
    return {name: layer for name, layer in policy.causal_lm.named_modules() if isinstance(layer, ExpertsAdapter)}


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
    has_defaults = {*DEFAULT_TARGETS} <= {*config.target_modules}
    for target in (one for one in config.target_modules if one != EXPERTS):
        matched = {
            name
            for name in linear
            if target == ALL_LINEAR or f".{name}".endswith(f".{target}") or re.fullmatch(target, name)
        }
        if not matched and not (has_defaults and target in DEFAULT_TARGETS):
            raise ConfigError(f"model.lora.target_modules: no linear layer matches {target!r}; {_available(linear)}")
        chosen |= matched
    if not chosen and EXPERTS not in config.target_modules:
        raise ConfigError(f"model.lora.target_modules: the model has none of the default targets; {_available(linear)}")
    return [name for name in linear if name in chosen]


def _stacks(policy: PolicyModel) -> list[tuple[Any, list[str]]]:
    """Return the modules with experts whose forward `run_experts` can replace, and the names of their stacks."""
    modules = [module for module in policy.causal_lm.modules() if hasattr(module, "_apply_gate")]
    return [(module, [key for key, p in module.named_parameters(recurse=False) if p.ndim == 3]) for module in modules]


def _available(linear: list[str]) -> str:
    """Describe the layers by the last parts of their names."""
    kinds = sorted({name.rpartition(".")[2] for name in linear})
    more = f" and {len(kinds) - _SHOWN} more" if len(kinds) > _SHOWN else ""
    return f"available: {', '.join(kinds[:_SHOWN])}{more}, or {ALL_LINEAR}" if kinds else "it has no linear layer"
