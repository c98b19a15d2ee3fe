"""Model FLOPs against counting by hand, and a roof that a matrix product meets."""

import time

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from prime_rl.configs.trainer import TrainerModelConfig
from prime_rl.trainer.model import load_policy
from prime_rl.trainer.parallel import World, shard
from prime_rl.trainer.perf import ModelFlops, peak_flops
from tests.support.tiny_model import make_tiny_model
from tests.unit.trainer.test_model import ARCHITECTURES, save


def test_flops_are_six_per_parameter_and_token_plus_attention(tmp_path):
    save(ARCHITECTURES["qwen3"](), tmp_path)  # hidden 32, 3 layers, 4 heads and 2 of key and value, of 16 each
    policy = load_policy(TrainerModelConfig(name=str(tmp_path)), seed=0)
    block = 32 * 64 * 2 + 32 * 32 * 2 + 3 * 32 * 48  # q and o, k and v, the three of the MLP
    forward = 2 * 7 * 32 * 64  # seven tokens meet the head
    for length in (5, 8):
        scores_and_values = 2 * (2 * 64 * length * length) / 2  # causal: half of the square
        forward += 3 * (2 * length * block + scores_and_values)
    assert ModelFlops.of(policy).total(np.array([5, 8]), scored=7) == pytest.approx(3 * forward)


def test_sharding_does_not_change_the_count(tmp_path):
    import torch.distributed as dist

    config = TrainerModelConfig(name=str(make_tiny_model(tmp_path)))
    policy = load_policy(config, seed=0)
    before = ModelFlops.of(policy)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    shard(policy, config, World(0, 1, torch.device("cpu")))
    after, sharded = ModelFlops.of(policy), [isinstance(block, FSDPModule) for block in policy.blocks]
    dist.destroy_process_group()
    assert after == before
    assert sharded == [True, True]


def test_only_active_experts_count(tmp_path):
    save(ARCHITECTURES["qwen3_moe"](), tmp_path)
    policy = load_policy(TrainerModelConfig(name=str(tmp_path)), seed=0)
    experts = 3 * 32 * 16 * 2  # two of four experts, three matrices each
    attention = 32 * 64 * 2 + 32 * 32 * 2
    router = 32 * 4
    assert ModelFlops.of(policy).body == 6 * 3 * (experts + attention + router)


def test_measured_roof_is_what_a_matrix_product_reaches():
    roof = peak_flops(torch.device("cpu"), torch.float32)
    a = torch.randn(1024, 1024)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - begin)
    assert 0.1 < 2 * 1024**3 / min(times) / roof < 10
