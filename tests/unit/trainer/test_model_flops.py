"""Model FLOPs against explicit counts, and the measured peak against a matrix product."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from torch.distributed.fsdp import FSDPModule

from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.trainer import trainer_metrics
from prime_rl.trainer.fsdp import shard_policy
from prime_rl.trainer.model.policy_model import PolicyModel
from prime_rl.trainer.trainer_metrics import ModelFlops, peak_flops
from prime_rl.trainer.weights.policy_loading import load_policy
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


def test_flops_do_not_depend_on_sharding(tiny, world):
    config = TrainerModelConfig(name=str(tiny))
    policy = load_policy(config, seed=0)
    before = ModelFlops.of(policy)
    shard_policy(policy, config, world)
    assert ModelFlops.of(policy) == before
    assert [isinstance(block, FSDPModule) for block in policy.blocks] == [True, True]


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
    monkeypatch.setattr(trainer_metrics, "time", SimpleNamespace(perf_counter=time.thread_time))
    roof = peak_flops(torch.device("cpu"), torch.float32)
    a = torch.randn(1024, 1024)
    times = []
    for _ in range(5):
        begin = time.thread_time()
        a @ a
        times.append(time.thread_time() - begin)
    assert 0.1 < 2 * 1024**3 / min(times) / roof < 10


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H100 NVL", 835), ("NVIDIA H800", 989),
        ("NVIDIA H200", 989), ("NVIDIA H200 NVL", 835), ("NVIDIA GH200 480GB", 989), ("NVIDIA H20", 148),
        ("NVIDIA B200", 2250), ("NVIDIA GB200", 2500), ("NVIDIA B300 SXM6 AC", 2250),
        ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA A800-SXM4-80GB", 312), ("NVIDIA A40", 149.7), ("NVIDIA A10G", 70),
        ("NVIDIA A10", 125), ("NVIDIA L4", 121), ("NVIDIA L40", 181), ("NVIDIA L40S", 362), ("NVIDIA L20", 119.5),
        ("NVIDIA RTX A6000", 154.8), ("NVIDIA RTX 6000 Ada Generation", 364.2), ("NVIDIA GeForce RTX 3090", 71),
        ("NVIDIA GeForce RTX 4090", 165.2), ("NVIDIA GeForce RTX 5090", 209.5),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 503.8),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 438.9),
        ("AMD Instinct MI300X", 1307), ("AMD Instinct MI325X", 1307), ("AMD Instinct MI355X", 2517),
        ("AMD Instinct MI250X", 191.5), ("AMD Instinct MI210", 181),  # torch shows the two dies of an MI250X as devices
        # Other GPUs whose names contain those of the table.
        ("NVIDIA RTX A1000", None), ("NVIDIA RTX A4000", None), ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None), ("NVIDIA GeForce RTX 5090 Laptop GPU", None), ("NVIDIA GB10", None),
        ("Quadro RTX 6000", None), ("A new GPU", None),
    ],
)  # fmt: skip
def test_peak_of_a_gpu_is_that_of_its_data_sheet_or_unknown(name, tflops, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    device = torch.device("cuda", 0)
    assert peak_flops(device, torch.bfloat16) == (None if tflops is None else pytest.approx(tflops * 1e12))
    assert peak_flops(device, torch.float32) is None


def attention_flops(config, lengths):
    with torch.device("meta"):
        flops = ModelFlops.of(PolicyModel(transformers.AutoModelForCausalLM.from_config(config)))
    return flops.total(np.array(lengths), scored=0) - flops.body * sum(lengths)


LAYERS = {"num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


@pytest.mark.parametrize(
    ("config", "windowed"),
    [
        (transformers.Gemma3TextConfig(**LAYERS, sliding_window=6, layer_types=["sliding_attention"] * 4), 4),
        (transformers.Gemma2Config(**LAYERS, sliding_window=6), 2),
        (transformers.MistralConfig(**LAYERS, sliding_window=6), 4),
        (transformers.MistralConfig(**LAYERS, sliding_window=None), 0),
        (transformers.Qwen3Config(**LAYERS, sliding_window=6, use_sliding_window=False), 0),
        (transformers.Qwen3Config(**LAYERS, sliding_window=6, use_sliding_window=True, max_window_layers=3), 1),
    ],
)
def test_attention_flops_count_pairs_inside_the_window_only(config, windowed):
    """Four products of a head and token pair, forward and twice backward; continuous, so a pair counts a half less."""
    for length in (5, 6, 20):
        inside = length**2 / 2 if length <= 6 else 6 * length - 6**2 / 2
        pairs = windowed * inside + (4 - windowed) * length**2 / 2
        assert attention_flops(config, [length]) == pytest.approx(12 * 4 * 8 * pairs)


@pytest.mark.parametrize("kind", [transformers.DeepseekV3Config, transformers.DeepseekV2Config])
def test_attention_flops_of_latent_attention_use_the_dimensions_of_keys_and_values(kind):
    """DeepSeek-V3: keys of 128 + 64, values of 128; its `head_dim` is 64."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4}
    latent = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 16, "q_lora_rank": 16}
    config = kind(**sizes, **latent, first_k_dense_replace=2, intermediate_size=32, vocab_size=64)
    keys_and_values = 2 * (192 + 128)
    assert attention_flops(config, [10]) == pytest.approx(3 * 2 * 4 * keys_and_values * 10**2 / 2)
