"""Tensor parallelism by the plan that transformers has for a model; loss and gradients do not change (I9).

Column-wise matrices give each rank some of the features (attention heads, MLP features); row-wise matrices use them and
sum over the ranks (Shoeybi et al. 2019, arXiv:1909.08053, section 3). Everything else (the embedding, the output head,
experts, and the states between two such matrices) is whole on every rank. Parameters are DTensors on the mesh of the
group, which FSDP shards further over the data ranks; modules compute with their local parts.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import PreTrainedModel

from prime_rl.core.errors import ConfigError
from prime_rl.trainer.parallel.collectives import gather_last, split_last, sum_backward, sum_forward
from prime_rl.trainer.parallel.dtensor_slices import local_tensor

Forward = Callable[..., Any]


def apply_tensor_parallel(causal_lm: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Shard the matrices of the blocks over the ranks of `mesh`, in place; parameters may be on the meta device.

    Raises ConfigError if transformers has no plan for the model, the plan is not supported, or the ranks do not
    divide the heads or features.
    """
    text, ranks = causal_lm.config.get_text_config(), mesh.size()
    plan: dict[str, str] | None = getattr(text, "base_model_tp_plan", None)
    kind = type(causal_lm).__name__
    if not plan:
        raise ConfigError(f"model.tp: transformers has no tensor parallel plan for {kind}; set model.tp=1")
    for key in ("num_attention_heads", "num_key_value_heads"):
        if (heads := getattr(text, key, None)) and heads % ranks:
            raise ConfigError(f"model.tp {ranks} does not divide the {key} of {kind}, {heads}")
    for name, module in causal_lm.base_model.named_modules():
        pattern = plan_pattern(name)
        style = plan.get(pattern)
        if style is None or "experts" in pattern.split(".") or isinstance(module, nn.Embedding):
            continue
        if style not in _STYLES or not (isinstance(module, nn.Linear) or style == "replicated_with_grad_allreduce"):
            raise ConfigError(f"model.tp: {kind} uses the unsupported style {style!r} for {pattern}; set model.tp=1")
        _STYLES[style](module, mesh, f"model.tp {ranks}: {kind} {name}")


def plan_pattern(name: str) -> str:
    """Return the name in the spelling of plans: `layers.*.mlp` for `layers.3.mlp`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def shard_parameter(module: nn.Module, key: str, mesh: DeviceMesh, dim: int, what: str) -> None:
    """Replace a parameter by this rank's part along `dim`; ConfigError, beginning with `what`, if indivisible."""
    parameter = module._parameters.get(key)
    if parameter is None:
        return
    if parameter.shape[dim] % mesh.size():
        raise ConfigError(f"{what}.{key} has {parameter.shape[dim]} features, which {mesh.size()} ranks do not divide")
    part = distribute_tensor(parameter.detach(), mesh, [Shard(dim)], src_data_rank=None)
    module._parameters[key] = nn.Parameter(part, requires_grad=parameter.requires_grad)


@contextmanager
def local_parameters(module: nn.Module, change: Callable[[Tensor], Tensor] | None = None) -> Iterator[None]:
    """Replace the parameters of `module` by their local parts, to which `change` is applied."""
    kept = dict(module._parameters)
    for key, parameter in kept.items():
        if parameter is not None:
            local = local_tensor(parameter)
            module._parameters[key] = local if change is None else change(local)
    try:
        yield
    finally:
        module._parameters.update(kept)


def _colwise(module: nn.Module, mesh: DeviceMesh, what: str, gather: bool = False) -> None:
    shard_parameter(module, "weight", mesh, 0, what)
    shard_parameter(module, "bias", mesh, 0, what)
    inner, group = module.forward, mesh.get_group()

    def forward(states: Tensor) -> Tensor:
        with local_parameters(module):
            part = inner(sum_backward(states, group))
        return gather_last(part, group) if gather else part

    module.forward = forward


def _rowwise(module: nn.Module, mesh: DeviceMesh, what: str, split: bool = False) -> None:
    shard_parameter(module, "weight", mesh, 1, what)
    inner, group = module.forward, mesh.get_group()

    def forward(states: Tensor) -> Tensor:
        bias = module._parameters.get("bias")
        with local_parameters(module):
            module._parameters["bias"] = None  # added once, not by every rank
            summed = sum_forward(inner(split_last(states, group) if split else states), group)
        return summed if bias is None else summed + bias

    module.forward = forward


def _sum_gradients(module: nn.Module, mesh: DeviceMesh, what: str) -> None:
    """Sum the gradients of a norm over this rank's heads; its weight is whole on every rank."""
    inner, group = module.forward, mesh.get_group()

    def forward(*args: Any, **kwargs: Any) -> Any:
        with local_parameters(module, partial(sum_backward, group=group)):
            return inner(*args, **kwargs)

    module.forward = forward


_STYLES: dict[str, Callable[[nn.Module, DeviceMesh, str], None]] = {
    "colwise": _colwise,
    "colwise_gather_output": partial(_colwise, gather=True),
    "rowwise": _rowwise,
    "rowwise_split_input": partial(_rowwise, split=True),
    "replicated_with_grad_allreduce": _sum_gradients,
}
