"""Model FLOPs against explicit counts, and the measured peak against a matrix product."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch
import transformers
from loguru import logger

from prime_rl.configs.trainer import TrainerConfig
from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.storage.batch import Progress
from prime_rl.trainer.fsdp import shard_policy
from prime_rl.trainer.memory_savings import host_bytes, warn_if_host_memory_is_short
from prime_rl.trainer.model.policy_model import PolicyModel
from prime_rl.trainer.train_step import StepResult
from prime_rl.trainer.trainer_metrics import ModelFlops, StepReporter, StepTimer, peak_flops
from prime_rl.trainer.weights.policy_loading import load_policy
from tests.unit.trainer.test_policy_model import ARCHITECTURES, save


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    """Hidden 32, 3 layers, 4 heads and 2 of key and value, of 16 each."""
    path = tmp_path_factory.mktemp("qwen3")
    save(ARCHITECTURES["qwen3"](), path)
    return path


def test_flops_are_six_per_parameter_and_token_plus_attention(qwen3):
    policy = load_policy(TrainerModelConfig(name=str(qwen3)), seed=0)
    block = 32 * 64 * 2 + 32 * 32 * 2 + 3 * 32 * 48  # q and o, k and v, the three of the MLP
    forward = 2 * 7 * 32 * 64  # seven tokens meet the head
    for length in (5, 8):
        scores_and_values = 2 * (2 * 64 * length * length) / 2  # causal: half of the square
        forward += 3 * (2 * length * block + scores_and_values)
    trained = ModelFlops.of(policy)
    assert trained.total(np.array([5, 8]), scored=7) == pytest.approx(3 * forward)
    policy.requires_grad_(False)
    frozen = ModelFlops.of(policy)  # without the gradient of the weights
    assert (frozen.body, frozen.head) == pytest.approx((trained.body * 2 / 3, trained.head * 2 / 3))
    assert frozen.attention == trained.attention


def flops_of(config):
    with torch.device("meta"):
        return ModelFlops.of(PolicyModel(transformers.AutoModelForCausalLM.from_config(config)))


def test_upstream_flops_equal_published_formula():
    """Qwen3-0.6B on one H100 (989 TFLOP/s), one sequence a row: 11.90k tokens/s were published as 11.1 % at 16,384
    tokens, 10.15k as 26.8 % at 65,536."""
    config = transformers.Qwen3Config(
        vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
    )  # fmt: skip
    for length, tokens_per_second, mfu in ((16_384, 11_900, 0.111), (65_536, 10_150, 0.268)):
        measured = flops_of(config).total_upstream(np.array([length])) / length * tokens_per_second / 989e12
        assert measured == pytest.approx(mfu, abs=0.0005)


def test_flops_do_not_depend_on_sharding(qwen3, world):
    config = TrainerModelConfig(name=str(qwen3))
    policy = load_policy(config, seed=0)
    before = ModelFlops.of(policy)
    shard_policy(policy, config, world)
    assert ModelFlops.of(policy) == before


def test_reporter_of_a_model_that_cannot_be_counted_reports_no_mfu(qwen3, world, monkeypatch):
    policy = load_policy(TrainerModelConfig(name=str(qwen3)), seed=0)
    monkeypatch.setattr(ModelFlops, "of", Mock(side_effect=RuntimeError("is a per-layer attribute")))
    monitor, warnings = Mock(), []
    sink = logger.add(warnings.append, level="WARNING")
    config = TrainerConfig(model={"name": str(qwen3)})
    reporter = StepReporter(policy, config, world, monitor, Mock(synchronize_seconds=0.0))
    logger.remove(sink)
    timer = StepTimer()
    timer.lap("train")
    reporter.report(0, StepResult(1.0, 1.0, 0, {}, {}), timer, np.array([8]), 7, Progress())
    ((_, metrics), _) = monitor.log.call_args
    assert metrics["perf/mfu"] is metrics["perf/mfu_simple"] is None and metrics["loss"] == 1
    assert len(warnings) == 1 and "perf/mfu has no value" in warnings[0]


@pytest.mark.parametrize(
    ("keys", "num_bytes"),
    [
        ({}, 200),
        ({"model": {"optim_cpu_offload": True}}, 200 + 8 * 10),
        ({"model": {"fsdp_cpu_offload": True}, "ckpt": {"save_async": True}}, 200 + 2 * 12 * 10),
        ({"ckpt": {"save_async": True}, "optim": {"type": "sgd"}}, 200 + 8 * 10),
        ({"weight_broadcast": {"type": "nccl"}}, 200 + 400),
    ],
)
def test_host_bytes_are_those_of_the_settings(keys, num_bytes):
    assert host_bytes(TrainerConfig(**keys), parameters=100, trained=10, share=1.0) == num_bytes


@pytest.mark.parametrize(("available", "warns"), [(10**6, False), (1000, True)])
def test_host_memory_below_the_need_logs_a_warning(available, warns, qwen3, monkeypatch, said):
    monkeypatch.setattr("psutil.virtual_memory", lambda: Mock(available=available))
    policy = load_policy(TrainerModelConfig(name=str(qwen3)), seed=0)
    warn_if_host_memory_is_short(TrainerConfig(), policy, num_ranks=1)
    assert any("host memory: the trainer will need" in line for line in said()) == warns


SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 16}


@pytest.mark.parametrize(
    ("config", "num_experts", "shared"),
    [
        (transformers.Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=16), 4, 0),
        # `n_routed_experts` alone
        (transformers.Dots1Config(**SIZES, n_routed_experts=8, moe_intermediate_size=16, n_shared_experts=1), 8, 1),
        # biases of the experts, which are no products
        (transformers.GptOssConfig(**SIZES, num_local_experts=8), 8, 0),
    ],
)
def test_flops_count_active_experts_only(config, num_experts, shared):
    config.update({"num_hidden_layers": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 0})
    attention, router, expert = 32 * 32 * 2 + 32 * 16 * 2, 32 * num_experts, 3 * 32 * 16
    assert flops_of(config).body == 6 * ((2 + shared) * expert + attention + router)


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H100 NVL", 835), ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835), ("NVIDIA GH200 480GB", 989), ("NVIDIA H20", 148), ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500), ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA A10G", 70), ("NVIDIA A10", 125),
        ("NVIDIA L4", 121), ("NVIDIA L40", 181), ("NVIDIA L40S", 362), ("NVIDIA RTX A6000", 154.8),
        ("NVIDIA RTX 6000 Ada Generation", 364.2), ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 438.9), ("AMD Instinct MI300X", 1307),
        ("AMD Instinct MI250X", 191.5),  # torch shows the two dies of an MI250X as devices
        # Other GPUs whose names contain those of the table.
        ("NVIDIA RTX A1000", None), ("NVIDIA RTX A4000", None), ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None), ("NVIDIA GB10", None), ("Quadro RTX 6000", None), ("A new GPU", None),
    ],
)  # fmt: skip
def test_peak_of_a_gpu_is_that_of_its_data_sheet_or_unknown(name, tflops, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    device = torch.device("cuda", 0)
    assert peak_flops(device, torch.bfloat16) == (None if tflops is None else pytest.approx(tflops * 1e12))
    assert peak_flops(device, torch.float32) is None


def attention_flops(config, lengths):
    flops = flops_of(config)
    return flops.total(np.array(lengths), scored=0) - flops.body * sum(lengths)


FOUR_LAYERS = {**SIZES, "num_hidden_layers": 4}


@pytest.mark.parametrize(
    ("config", "windowed"),
    [
        (transformers.Gemma3TextConfig(**FOUR_LAYERS, sliding_window=6, layer_types=["sliding_attention"] * 4), 4),
        (transformers.Gemma2Config(**FOUR_LAYERS, sliding_window=6), 2),
        (transformers.MistralConfig(**FOUR_LAYERS, sliding_window=6), 4),
        (transformers.MistralConfig(**FOUR_LAYERS, sliding_window=None), 0),
        (transformers.Qwen3Config(**FOUR_LAYERS, sliding_window=6, use_sliding_window=False), 0),
        (transformers.Qwen3Config(**FOUR_LAYERS, sliding_window=6, use_sliding_window=True, max_window_layers=3), 1),
    ],
)
def test_attention_flops_count_pairs_inside_the_window_only(config, windowed):
    """Four products of a head and token pair, forward and twice backward; continuous, so a pair counts a half less."""
    for length in (5, 6, 20):
        inside = length**2 / 2 if length <= 6 else 6 * length - 6**2 / 2
        pairs = windowed * inside + (4 - windowed) * length**2 / 2
        assert attention_flops(config, [length]) == pytest.approx(12 * 4 * 8 * pairs)


def test_attention_flops_count_the_heads_of_each_layer():
    layers = ["sliding_attention", "full_attention"]
    config = transformers.Gemma4TextConfig(
        **SIZES, num_hidden_layers=2, layer_types=layers, sliding_window=6, global_head_dim=16
    )
    assert attention_flops(config, [20]) == pytest.approx(12 * 4 * (8 * (6 * 20 - 6**2 / 2) + 16 * 20**2 / 2))


@pytest.mark.parametrize("kind", [transformers.DeepseekV3Config, transformers.DeepseekV2Config])
def test_attention_flops_of_latent_attention_use_the_dimensions_of_keys_and_values(kind):
    """DeepSeek-V3: keys of 128 + 64, values of 128; its `head_dim` is 64."""
    config = kind(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=2, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128, kv_lora_rank=16, q_lora_rank=16, first_k_dense_replace=2,
        intermediate_size=32, vocab_size=64,
    )  # fmt: skip
    keys_and_values = 2 * (192 + 128)
    assert attention_flops(config, [10]) == pytest.approx(3 * 2 * 4 * keys_and_values * 10**2 / 2)
