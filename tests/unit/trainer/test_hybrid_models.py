"""Recurrent and convolutional layers have a new state for each segment of a packed row (I8)."""

from functools import partial

import numpy as np
import pytest
import torch
import transformers

from prime_rl.configs.training.model import ActivationCheckpointConfig, CompileConfig, TrainerModelConfig
from prime_rl.core.errors import ConfigError
from prime_rl.trainer.memory_savings import prepare_blocks
from prime_rl.trainer.model.varlen_attention import segment_batches
from prime_rl.trainer.packing_check import check_packing
from prime_rl.trainer.trainer_metrics import ModelFlops
from prime_rl.trainer.weights.policy_loading import build_policy, load_policy, make_policy
from tests.unit.trainer.test_policy_model import SMALL, pack, save, segments

TYPES = ["linear_attention", "full_attention", "linear_attention"]
DELTA = {
    "layer_types": TYPES, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16
}  # fmt: skip
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 16, "mamba_n_groups": 2}
NEMOTRON = {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"], "mamba_num_heads": 4,
    "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 16, "head_dim": 8, "n_routed_experts": 4,
    "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16,
}  # fmt: skip
HYBRID = {
    "qwen3_5_text": lambda: transformers.Qwen3_5TextConfig(**SMALL, **DELTA, head_dim=16),
    "bamba": lambda: transformers.BambaConfig(**SMALL, **MAMBA, attn_layer_indices=[1]),
    "lfm2": lambda: transformers.Lfm2Config(**SMALL, layer_types=["conv", "full_attention", "conv"]),
    "nemotron_h": lambda: transformers.NemotronHConfig(**SMALL, **NEMOTRON),
    # The tests of the others are extended.
    "qwen3_next": lambda: transformers.Qwen3NextConfig(**SMALL, **DELTA, **EXPERTS, head_dim=16),
    "olmo_hybrid": lambda: transformers.OlmoHybridConfig(**SMALL, **DELTA),
    "granitemoehybrid": lambda: transformers.GraniteMoeHybridConfig(
        **SMALL, **MAMBA, layer_types=TYPES, logits_scaling=2.0, num_local_experts=4, shared_intermediate_size=16
    ),
    "falcon_h1": lambda: transformers.FalconH1Config(
        **SMALL, **MAMBA, mamba_d_ssm=64, head_dim=8, lm_head_multiplier=0.5, ssm_out_multiplier=0.7
    ),
    "mamba2": lambda: transformers.Mamba2Config(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_heads=4, head_dim=16, state_size=8, n_groups=2,
        chunk_size=16,
    ),
    "kimi_linear": lambda: transformers.KimiLinearConfig(
        **{**SMALL, "num_key_value_heads": 4}, layer_types=TYPES, num_local_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
        linear_head_dim=8, linear_num_heads=4,
    ),
}  # fmt: skip
LENGTHS = [300, 1, 7, 64, 65, 130, 2, 66]


def gradients(model):
    return {key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None}


def check_against_transformers(policy, reference, lengths):
    """Compare a packed row's values and gradients with those of transformers for each segment alone."""
    parts = segments(64, lengths)
    weights = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(1))
    packed, _ = policy(pack(parts))
    (packed * weights).sum().backward()
    for part, got, weight in zip(parts, packed.split(lengths), weights.split(lengths), strict=True):
        every = torch.log_softmax(reference(torch.from_numpy(part)[None], use_cache=False).logits[0], -1)
        alone = every[:-1].gather(1, torch.from_numpy(part[1:, None]))[:, 0]
        assert (got[1:] - alone).norm() <= 1e-6 * alone.norm()
        (alone * weight[1:]).sum().backward()
    found, wanted = gradients(policy.causal_lm), gradients(reference)
    assert found.keys() == wanted.keys()
    whole = torch.stack([gradient.norm() for gradient in wanted.values()]).norm()
    for key, gradient in wanted.items():
        difference = (found[key] - gradient).norm()
        assert difference <= 1e-6 * whole, key
        assert difference <= 3e-4 * gradient.norm(), key  # small sums of large terms: 6e-5 on some CPUs


@pytest.mark.extended(after=4)
@pytest.mark.parametrize("name", HYBRID)
def test_values_and_gradients_of_packed_segments_equal_those_alone(name, tmp_path):
    config = HYBRID[name]()
    config.time_step_min = 0.05  # a limit of transformers' Nemotron-H alone, at initialisation elsewhere
    reference = save(config, tmp_path)
    for module in reference.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, float("inf"))
    policy = load_policy(TrainerModelConfig(name=str(tmp_path)), seed=0)
    check_against_transformers(policy, reference, np.random.default_rng(len(name)).permutation(LENGTHS).tolist())


@pytest.mark.extended(after=2)
@pytest.mark.parametrize("name", ["bamba", "qwen3_5_text"])
@pytest.mark.parametrize("options", [{"ac": ActivationCheckpointConfig()}, {"compile": CompileConfig()}], ids=str)
def test_recomputed_and_compiled_blocks_compute_the_same(name, options, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # fast, and as exact as eager code
    reference = save(HYBRID[name](), tmp_path)
    config = TrainerModelConfig(name=str(tmp_path), **options)
    policy = load_policy(config, seed=0)
    prepare_blocks(policy, config)
    check_against_transformers(policy, reference, [70, 3, 30])


@pytest.mark.extended(after=3)
@pytest.mark.parametrize("name", HYBRID)
@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"lora": {"target_modules": ["all-linear"]}}], ids=str)
def test_packing_check_of_a_hybrid_model_passes(name, options, world, tmp_path):
    save(HYBRID[name](), tmp_path)
    config = TrainerModelConfig(name=str(tmp_path), seq_len=256, **options)
    check_packing(make_policy(config, 0, world), config, world, config.seq_len)


@pytest.mark.parametrize(
    ("name", "options", "key"),
    [
        ("qwen3_5_text", {"cp": {"degree": 2}}, "cp.degree"),
        ("nemotron_h", {"tp": 2}, "tp"),
        ("lfm2", {"compile": {"fullgraph": True}}, "compile.fullgraph"),
    ],
)
def test_options_that_recurrent_layers_do_not_support_are_refused(name, options, key, tmp_path):
    HYBRID[name]().save_pretrained(tmp_path)
    config = TrainerModelConfig(name=str(tmp_path), debug={"random_init": True}, **options)
    with pytest.raises(ConfigError, match=rf"^model\.{key}: .* recurrent layers.*set model\.{key}=") as caught:
        build_policy(config)
    assert "\n" not in str(caught.value)


def test_vectors_of_recurrent_layers_are_float32_in_a_bfloat16_model(tmp_path):
    save(HYBRID["bamba"](), tmp_path)
    policy = load_policy(TrainerModelConfig(name=str(tmp_path)), seed=0).bfloat16()
    mixer = policy.blocks[0].mamba
    assert mixer._parameters["dt_bias"].dtype == mixer.conv1d.weight.dtype == torch.bfloat16
    assert mixer.A_log.dtype == mixer.dt_bias.dtype == mixer.D.dtype == torch.float32


def test_a_checkpoint_with_a_vision_tower_is_refused_and_its_text_part_is_not(tmp_path):
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    text = HYBRID["qwen3_5_text"]().to_dict()
    whole = transformers.Qwen3_5Config(text_config=text, vision_config=vision)
    transformers.Qwen3_5ForConditionalGeneration(whole).save_pretrained(tmp_path / "whole")
    with pytest.raises(ConfigError, match=r"^model\.name: .* qwen3_5 model with other parts than text"):
        build_policy(TrainerModelConfig(name=str(tmp_path / "whole")))
    part = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    part.save_pretrained(tmp_path / "text")
    policy = load_policy(TrainerModelConfig(name=str(tmp_path / "text")), seed=0)
    check_against_transformers(policy, part.eval(), [20, 3])


@pytest.mark.parametrize(
    ("name", "layers", "width"),
    [("qwen3_5_text", 1, 64), ("nemotron_h", 1, 32), ("falcon_h1", 3, 32), ("mamba2", 0, 0)],
)
def test_flops_count_the_layers_with_attention(name, layers, width, tmp_path):
    HYBRID[name]().save_pretrained(tmp_path)
    debug = {"random_init": True}
    policy = build_policy(TrainerModelConfig(name=str(tmp_path), debug=debug))
    assert sum(ModelFlops.of(policy).attention.values()) == 12 * layers * width
    assert len(build_policy(TrainerModelConfig(name=str(tmp_path), debug={**debug, "num_layers": 1})).blocks) == 1


def test_segment_batches_cover_each_token_once_with_little_padding():
    lengths = [*LENGTHS, *[5] * 100, 2000]
    bounds = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    batches = segment_batches(bounds)
    flat = torch.cat([batch.flatten() for batch in batches])
    assert flat[flat < sum(lengths)].sort()[0].equal(torch.arange(sum(lengths)))
    assert len(batches) <= 9
    assert sum(batch.numel() for batch in batches) < 2 * sum(lengths)
