"""Model FLOPs against explicit counts, and the measured peak against a matrix product."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from torch.distributed.fsdp import FSDPModule

from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.trainer import model_flops
from prime_rl.trainer.fsdp import shard_policy
from prime_rl.trainer.model.policy_model import PolicyModel
from prime_rl.trainer.model_flops import ModelFlops, peak_flops
from prime_rl.trainer.parallel.process_group import World
from prime_rl.trainer.weights.policy_loading import load_policy
from tests.support.tiny_model import make_tiny_model
from tests.unit.trainer.test_policy_model import ARCHITECTURES, save


def test_flops_are_six_per_parameter_and_token_plus_attention(tmp_path):
    save(ARCHITECTURES["qwen3"](), tmp_path)  # hidden 32, 3 layers, 4 heads and 2 of key and value, of 16 each
    policy = load_policy(TrainerModelConfig(name=str(tmp_path)), seed=0)
    block = 32 * 64 * 2 + 32 * 32 * 2 + 3 * 32 * 48  # q and o, k and v, the three of the MLP
    forward = 2 * 7 * 32 * 64  # seven tokens meet the head
    for length in (5, 8):
        scores_and_values = 2 * (2 * 64 * length * length) / 2  # causal: half of the square
        forward += 3 * (2 * length * block + scores_and_values)
    assert ModelFlops.of(policy).total(np.array([5, 8]), scored=7) == pytest.approx(3 * forward)


def test_flops_of_frozen_parameters_omit_their_gradient(tmp_path):
    save(ARCHITECTURES["qwen3"](), tmp_path)
    policy = load_policy(TrainerModelConfig(name=str(tmp_path)), seed=0)
    trained = ModelFlops.of(policy)
    policy.requires_grad_(False)
    frozen = ModelFlops.of(policy)
    assert (frozen.body, frozen.head) == pytest.approx((trained.body * 2 / 3, trained.head * 2 / 3))
    assert frozen.attention == trained.attention


def test_upstream_flops_equal_published_formula(tmp_path):
    """Qwen3-0.6B on one H100 (989 TFLOP/s), one sequence a row: 11.90k tokens/s were published as 11.1 % at 16,384
    tokens, 10.15k as 26.8 % at 65,536."""
    config = transformers.Qwen3Config(
        vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        flops = ModelFlops.of(PolicyModel(transformers.AutoModelForCausalLM.from_config(config)))
    for length, tokens_per_second, mfu in ((16_384, 11_900, 0.111), (65_536, 10_150, 0.268)):
        measured = flops.total_upstream(np.array([length])) / length * tokens_per_second / 989e12
        assert measured == pytest.approx(mfu, abs=0.0005)


def test_flops_do_not_depend_on_sharding(tmp_path):
    import torch.distributed as dist

    config = TrainerModelConfig(name=str(make_tiny_model(tmp_path)))
    policy = load_policy(config, seed=0)
    before = ModelFlops.of(policy)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    shard_policy(policy, config, World(0, 1, torch.device("cpu")))
    after, sharded = ModelFlops.of(policy), [isinstance(block, FSDPModule) for block in policy.blocks]
    dist.destroy_process_group()
    assert after == before
    assert sharded == [True, True]


def test_flops_count_active_experts_only(tmp_path):
    save(ARCHITECTURES["qwen3_moe"](), tmp_path)
    policy = load_policy(TrainerModelConfig(name=str(tmp_path)), seed=0)
    experts = 3 * 32 * 16 * 2  # two of four experts, three matrices each
    attention = 32 * 64 * 2 + 32 * 32 * 2
    router = 32 * 4
    assert ModelFlops.of(policy).body == 6 * 3 * (experts + attention + router)


def test_flops_count_experts_for_all_configuration_names():
    """dots.llm1 has `n_routed_experts` alone; GPT-OSS has biases of its experts, which are no products."""
    sizes = {
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    experts = {"num_experts_per_tok": 2, "intermediate_size": 48, "moe_intermediate_size": 16, "n_routed_experts": 8}
    dots = transformers.Dots1Config(**sizes, **experts, first_k_dense_replace=0, n_shared_experts=1)
    shared = 3 * 32 * 16
    attention, router = 32 * 32 * 2 + 32 * 16 * 2, 32 * 8
    gpt_oss = transformers.GptOssConfig(**sizes, num_experts_per_tok=2, intermediate_size=16, num_local_experts=8)
    for config, beside in ((dots, shared), (gpt_oss, 0)):
        with torch.device("meta"):
            flops = ModelFlops.of(PolicyModel(transformers.AutoModelForCausalLM.from_config(config)))
        assert flops.body == 6 * (2 * 3 * 32 * 16 + attention + router + beside)


def test_measured_peak_equals_matrix_product(monkeypatch):
    """On the clock of this thread, which does not count the time in which other processes have the core."""
    monkeypatch.setattr(model_flops, "time", SimpleNamespace(perf_counter=time.thread_time))
    roof = peak_flops(torch.device("cpu"), torch.float32)
    a = torch.randn(1024, 1024)
    times = []
    for _ in range(5):
        begin = time.thread_time()
        a @ a
        times.append(time.thread_time() - begin)
    assert 0.1 < 2 * 1024**3 / min(times) / roof < 10
