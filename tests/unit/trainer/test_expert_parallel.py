"""Experts on two ranks give the outputs and gradients of experts on one rank, also if a rank gets no token (I9)."""

import copy

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from prime_rl.configs.training.model import LoRAConfig
from prime_rl.trainer.fsdp import apply_expert_parallel
from prime_rl.trainer.memory_savings import checkpoint_forward
from prime_rl.trainer.model.lora import add_adapters
from prime_rl.trainer.model.policy_model import PolicyModel
from tests.unit.trainer.world import run_world

CONFIG = Qwen3MoeConfig(
    vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
    num_key_value_heads=1, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8,
    initializer_range=0.5,
)  # fmt: skip
TOKENS = 5
# Which experts the tokens choose: of both ranks; of the first alone, so that the second works on nothing.
ROUTES = [(0, 1, 2, 3), (0, 1)]


def run_experts(world, implementation, experts):
    """Compare the experts on all ranks with the same on one; return the number of tokens of this rank's experts."""
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(CONFIG)
    if implementation == "adapters":
        lora = LoRAConfig(rank=8, alpha=24, target_modules=["experts"], base_dtype="float32")
        add_adapters(PolicyModel(model), lora, torch.float32)
        for factor in (p for p in model.parameters() if p.requires_grad):
            torch.nn.init.normal_(factor, std=0.5)
    else:
        model.set_experts_implementation(implementation)
    alone = copy.deepcopy(model.model.layers[0].mlp.experts)
    (shared,) = apply_expert_parallel(model, init_device_mesh("cpu", (world.size,), mesh_dim_names=("ep",)))
    states = torch.randn(world.size, TOKENS, 8, requires_grad=True)
    chosen = torch.tensor(experts)[torch.randint(len(experts), (world.size, TOKENS, 1))]
    chosen = torch.cat([chosen, torch.tensor(experts).roll(1)[chosen % len(experts)]], -1)
    weights, slope = torch.rand(world.size, TOKENS, 2), torch.randn(world.size, TOKENS, 8)

    wanted = alone(states.flatten(0, 1), chosen.flatten(0, 1), weights.flatten(0, 1)).unflatten(0, states.shape[:2])
    (wanted * slope).sum().backward()
    expected, states.grad = states.grad[world.rank], None
    got = shared(states[world.rank], chosen[world.rank], weights[world.rank])
    (got * slope[world.rank]).sum().backward()
    torch.testing.assert_close(got, wanted[world.rank])
    torch.testing.assert_close(states.grad[world.rank], expected)
    for name, parameter in ((name, p) for name, p in shared.named_parameters() if p.requires_grad):
        assert parameter.grad is not None, "FSDP would reduce fewer tensors here than elsewhere"
        torch.testing.assert_close(parameter.grad.full_tensor(), alone.get_parameter(name).grad)
    return int((chosen // 2 == world.rank).sum())


def count_exchanges(world):
    """Return the exchanges of a step with full activations, and of one with selective recomputation."""
    torch.manual_seed(world.rank)
    counts = []
    for selective in (False, True):
        model = Qwen3MoeForCausalLM(CONFIG)
        apply_expert_parallel(model, init_device_mesh("cpu", (world.size,), mesh_dim_names=("ep",)))
        block = model.model.layers[0].mlp
        forward = checkpoint_forward(block.forward, selective=True) if selective else block.forward
        with CountExchanges() as exchanges:
            forward(torch.randn(1, TOKENS, 8, requires_grad=True)).sum().backward()
        counts.append(exchanges.count)
    return counts


class CountExchanges(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += "alltoall" in str(function) or "all_to_all" in str(function)
        return function(*args, **(kwargs or {}))


def run_all(world, _):
    tokens = [run_experts(world, name, experts) for experts in ROUTES for name in ("eager", "grouped_mm", "adapters")]
    return [tokens, count_exchanges(world)]


def test_experts_on_two_ranks_give_the_results_of_one_rank(tmp_path):
    """Each rank compares outputs and gradients; the answers show that the routes differ, and the exchanges.

    Selective recomputation repeats no exchange: the numbers of tokens, the tokens and their results; in the backward
    pass the gradients of the last two.
    """
    (_, one), (tokens, other) = run_world(2, run_all, None, tmp_path)
    assert [count > 0 for count in tokens] == 3 * [True] + 3 * [False]
    assert one == other == [5, 5]
