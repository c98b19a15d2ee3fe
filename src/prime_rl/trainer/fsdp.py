"""Sharding of a policy over all ranks with FSDP2, together with tensor, context and expert parallelism.

Tensor parallelism follows the plan that transformers has for a model. Column-wise matrices give each rank some of the
features (attention heads, MLP features); row-wise matrices use them and sum over the ranks (Shoeybi et al. 2019,
arXiv:1909.08053, section 3). Everything else (the embedding, the output head, experts, and the states between two such
matrices) is whole on every rank. Parameters are DTensors on the mesh of the group, which FSDP shards further over the
data ranks; modules compute with their local parts. Loss and gradients do not change (I9).

With expert parallelism, the ranks of a group divide the experts; loss and gradients do not change (I9). The ranks of
the group hold different tokens. Each layer sends every token, one copy per chosen expert, to the ranks that hold these
experts (all-to-all), gets the results back, and computes their weighted sum (Lepikhin et al. 2020, GShard,
arXiv:2006.16668). No token is dropped. An expert's gradient therefore covers the tokens of the whole group; FSDP sums
it over the remaining ranks.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise, product
from typing import Any

import torch
from loguru import logger
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import PreTrainedModel

from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.core.errors import ConfigError
from prime_rl.trainer.model.lora import LowRank
from prime_rl.trainer.model.policy_model import PolicyModel
from prime_rl.trainer.parallel.device_mesh import (
    ContextParallel,
    Layout,
    Mesh,
    all_to_all,
    check_context_parallel,
    gather_last,
    local_tensor,
    split_last,
    sum_backward,
    sum_forward,
)
from prime_rl.trainer.parallel.process_group import World

_MOST_PADDING = 1.1
"""Size of padded experts, relative to their own size, above which the layout is worth a warning."""


def shard_policy(policy: PolicyModel, config: TrainerModelConfig, world: World) -> PolicyModel:
    """Shard the policy over all ranks, in place: one FSDP unit for each block, one for the remaining modules.

    An untied embedding and output head are units as well, so that gathering them and reducing their gradients overlaps
    with other work. If they are tied, they are one parameter of the root unit.

    Nothing is read or moved: the parameters may be on the meta device. Raises ConfigError if the model cannot be
    divided as `config` requires.
    """
    layout = Layout.of(config, world.size)
    assert world.model_parallel_size == layout.model_parallel_size, "the world was created for another layout"
    mesh = Mesh(layout, world.device.type, world.timeout_seconds)
    causal_lm = policy.causal_lm
    if mesh.cp is not None:
        check_context_parallel(causal_lm.config.get_text_config(), config, layout.cp)
        policy.context_parallel = ContextParallel(mesh.cp.get_group())
    if mesh.tp is not None:
        apply_tensor_parallel(causal_lm, mesh.tp)
    dtype = compute_dtype(config.dtype, world.device)
    precision = partial(MixedPrecisionPolicy, param_dtype=dtype, reduce_dtype=getattr(torch, config.reduce_dtype))
    # With CPU offload, gradients and updates are on the host as well.
    on_host = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if config.fsdp_cpu_offload else OffloadPolicy()
    fsdp = partial(fully_shard, offload_policy=on_host)
    # For FSDP an integer is the number of parts into which a block's weights are resharded after the forward pass.
    ranks = layout.shard * layout.cp
    reshard = config.reshard_after_forward and (config.reshard_ranks or ranks)
    reshard = True if reshard == ranks else reshard
    if mesh.ep is not None:
        by_expert = partial(fsdp, mesh=mesh.expert_data, mp_policy=precision(), reshard_after_forward=bool(reshard))
        for experts in apply_expert_parallel(causal_lm, mesh.ep):
            by_expert(experts, shard_placement_fn=partial(_expert_placement, layout.expert_shard))
    fsdp = partial(fsdp, mesh=mesh.data)
    # FSDP cannot reshard other dimensions than the first to fewer ranks.
    placement = None if type(reshard) is int else partial(_expert_placement, ranks)
    for block in policy.blocks:
        fsdp(block, mp_policy=precision(), reshard_after_forward=reshard, shard_placement_fn=placement)
    if world.is_main:
        _warn_of_padding(policy.blocks[-1], layout)
    if mesh.ep is not None:
        _set_prefetch(policy.blocks)
    embedding, head = causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings()
    if embedding.weight is not head.weight:
        fsdp(embedding, mp_policy=precision(), reshard_after_forward=reshard)
        # The temperatures are float32. The head's backward pass follows directly, so its weight stays gathered.
        fsdp(head, mp_policy=precision(cast_forward_inputs=False), reshard_after_forward=False)
        register_fsdp_forward_method(head, "token_logprobs")
    # The root's inputs are token ids, temperatures and advantages, which must not be cast to bfloat16.
    fsdp(policy, mp_policy=precision(cast_forward_inputs=False), reshard_after_forward=False)
    for module in policy.modules():
        if isinstance(module, FSDPModule):  # sums, not means: parameters on different meshes then need no own factors
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    return policy


def _set_prefetch(blocks: Sequence[nn.Module]) -> None:
    """Gather the weights of a block and of its experts while the previous block runs.

    FSDP's implicit prefetch requires that the host runs ahead of the device. With expert parallelism the host waits in
    every layer.
    """
    units = [[module for module in block.modules() if isinstance(module, FSDPModule)] for block in blocks]
    for current, following in pairwise(units):
        current[0].set_modules_to_forward_prefetch(following)
        following[0].set_modules_to_backward_prefetch(current)


def _expert_placement(ranks: int, parameter: nn.Parameter) -> Shard | None:
    """Shard a stack of experts along the dimension that needs least padding; None is dimension 0.

    FSDP pads the shards along dimension 0: with more ranks than experts, each one gathers as if it held an expert, and
    some hold nothing. It requires that the ranks divide any other dimension.
    """
    if parameter.ndim != 3:
        return None
    num_experts, *matrix = local_tensor(parameter).shape
    if num_experts % ranks == 0:
        return None
    return next((Shard(dim) for dim, size in enumerate(matrix, 1) if size % ranks == 0), None)


def _warn_of_padding(block: nn.Module, layout: Layout) -> None:
    """Log one line if FSDP pads the experts of a sharded block considerably."""
    ranks = layout.expert_shard if layout.ep > 1 else layout.shard * layout.cp
    stacks = [parameter for parameter in block.parameters() if parameter.ndim == 3]
    uneven = [stack for stack in stacks if not any(getattr(placement, "dim", 0) for placement in stack.placements)]
    experts = max((len(stack) // layout.ep for stack in uneven), default=0)
    if experts and (padding := -(-experts // ranks) * ranks / experts) > _MOST_PADDING:
        logger.warning(
            f"the {ranks} ranks that shard {experts} experts divide no dimension of their weights: FSDP gathers "
            f"{padding:.1f} times their size, and some ranks hold less than others; set model.ep or "
            "model.dp_replicate, or use another number of GPUs"
        )


def reshard_policy(model: nn.Module) -> None:
    """Free the gathered weights after a forward pass without a backward pass, which would free them."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def compute_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Resolve `auto`: bfloat16 on CUDA, float32 on the CPU."""
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, dtype)


def apply_expert_parallel(causal_lm: PreTrainedModel, mesh: DeviceMesh) -> list[nn.Module]:
    """Divide the experts of every layer over the ranks of `mesh`, in place, and return the modules with experts.

    Parameters may be on the meta device. Raises ConfigError if transformers has no plan for experts of the model,
    or the ranks do not divide them.
    """
    plan = getattr(causal_lm.config.get_text_config(), "base_model_ep_plan", None) or {}
    modules: list[nn.Module] = []
    for name, module in causal_lm.base_model.named_modules():
        keys = [key for key in module._parameters if plan.get(plan_pattern(f"{name}.{key}")) == "grouped_gemm"]
        what = f"model.ep {mesh.size()}: {type(causal_lm).__name__} {name}"
        for key in keys:
            shard_parameter(module, key, mesh, 0, what)
        if keys:
            for factor in (child for child in module.modules() if isinstance(child, LowRank)):
                shard_parameter(factor, "weight", mesh, 0, what)
            _dispatch_tokens(module, mesh.get_group())
            modules.append(module)
    if not modules:
        raise ConfigError(
            f"model.ep: transformers has no plan for experts in a {type(causal_lm).__name__}; set model.ep=1"
        )
    return modules


def _dispatch_tokens(experts: Any, group: ProcessGroup) -> None:
    inner = experts.forward
    experts.num_experts //= group.size()  # the number of local experts, which the original forward uses

    def forward(states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Args: states [n, hidden]; experts chosen for each token, and their weights, both [n, k]."""
        pairs = chosen.flatten()
        order = pairs.argsort(stable=True)
        # scatter_add, because bincount waits for the device to read the largest entry.
        counts = pairs.new_zeros(experts.num_experts * group.size()).scatter_add(0, pairs, torch.ones_like(pairs))
        received = all_to_all(counts, group)
        # The only wait for the device in a layer: the sizes of the messages.
        num_sent, num_received = torch.stack([counts, received]).unflatten(1, (group.size(), -1)).sum(2).tolist()
        tokens = all_to_all(states[order // chosen.shape[1]], group, num_received, num_sent)
        expert_ids = torch.arange(experts.num_experts, device=states.device).repeat(group.size())
        expert_ids = expert_ids.repeat_interleave(received, output_size=len(tokens))
        results = all_to_all(_run_experts(experts, inner, tokens, expert_ids), group, num_sent, num_received)
        results = torch.empty_like(results).index_copy(0, order, results).unflatten(0, chosen.shape)
        return (results * weights[..., None]).sum(1).to(states.dtype)

    experts.forward = forward


def _run_experts(experts: nn.Module, inner: Any, tokens: Tensor, expert_ids: Tensor) -> Tensor:
    """Run each token through its expert.

    Without tokens, run one token of zeros: this rank must take part in the collectives of the backward pass.
    """
    count = len(tokens)
    if count == 0:
        tokens, expert_ids = torch.cat([tokens, tokens.new_zeros(1, tokens.shape[1])]), expert_ids.new_zeros(1)
    with local_parameters(experts):
        return inner(tokens, expert_ids[:, None], tokens.new_ones(len(tokens), 1))[:count]


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
    for layer, key in product(text.per_layer_config, ("num_attention_heads", "num_key_value_heads")):
        if (heads := getattr(layer, key, None)) and heads % ranks:
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
