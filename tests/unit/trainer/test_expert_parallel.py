"""Experts on two ranks give the outputs and gradients of experts on one rank, also if a rank gets no token (I9)."""

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from prime_rl.trainer.parallel.expert_parallel import apply_expert_parallel
from tests.unit.trainer.world import run_world

CONFIG = {
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "initializer_range": 0.5,
}
TOKENS = 5
# Which experts the tokens choose: of both ranks; of the first alone, so that the second works on nothing.
ROUTES = {"both": (0, 1, 2, 3), "first": (0, 1)}


def run_experts(world, argument):
    implementation, experts = argument
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**CONFIG))
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
    for name, parameter in shared.named_parameters():
        assert parameter.grad is not None, "FSDP would reduce fewer tensors here than elsewhere"
        torch.testing.assert_close(parameter.grad.full_tensor(), alone.get_parameter(name).grad)
    return int((chosen // 2 == world.rank).sum())


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("route", ROUTES)
def test_experts_on_two_ranks_give_the_results_of_one_rank(route, implementation, tmp_path):
    tokens = run_world(2, run_experts, (implementation, ROUTES[route]), tmp_path)
    assert (tokens[1] == 0) == (route == "first")
