"""Rotary frequencies do not depend on packing (I8) and equal those of vLLM (I6)."""

from types import SimpleNamespace

import pytest
import torch
import transformers

from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.core.errors import ConfigError
from prime_rl.trainer.weights.policy_loading import load_policy
from tests.unit.trainer.test_policy_model import SMALL, pack, save, segments

HEAD_DIM, ORIGINAL, LONGEST = 16, 16, 64
FACTORS = {
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.2],
    "long_factor": [1.1, 1.5, 2.5, 4.0, 8.0, 16.0, 24.0, 32.0],
}
ROPES = {
    "longrope": {"rope_type": "longrope", **FACTORS, "original_max_position_embeddings": ORIGINAL},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "llama3": {
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "linear": {"rope_type": "linear", "factor": 4.0},
}  # fmt: skip
for parameters in ROPES.values():
    parameters["rope_theta"] = 10000.0


def config(kind, longest=LONGEST):
    family = transformers.Phi3Config if kind == "longrope" else transformers.LlamaConfig
    extra = {"original_max_position_embeddings": ORIGINAL} if kind == "longrope" else {}
    return family(
        **{**SMALL, "hidden_size": 4 * HEAD_DIM},
        max_position_embeddings=longest,
        rope_parameters=dict(ROPES[kind]),
        **extra,
    )


def phimoe():
    scales = {"short_mscale": 1.1, "long_mscale": 1.4}
    return transformers.PhimoeConfig(
        **{**SMALL, "hidden_size": 4 * HEAD_DIM}, num_local_experts=4, num_experts_per_tok=2, head_dim=HEAD_DIM,
        max_position_embeddings=LONGEST, original_max_position_embeddings=ORIGINAL,
        rope_parameters={**ROPES["longrope"], **scales},
    )  # fmt: skip


def rotary(policy):
    return next(module for module in policy.modules() if hasattr(module, "rope_type"))


def from_vllm(monkeypatch, parameters, max_model_len):
    """What vLLM's own code computes for positions 0 to LONGEST - 1: [position, cos and sin]."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.layers.rotary_embedding import phi3_long_rope_scaled_rope as longrope

    served = SimpleNamespace(model_config=SimpleNamespace(max_model_len=max_model_len))
    monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", {})
    monkeypatch.setattr(longrope, "get_current_vllm_config", lambda: served)
    with set_current_vllm_config(VllmConfig()):
        rope = rotary_embedding.get_rope(HEAD_DIM, LONGEST, rope_parameters=parameters, dtype=torch.float32)
    if parameters["rope_type"] != "longrope":
        return rope.cos_sin_cache[:LONGEST]
    short, long = rope.long_short_cos_sin_cache.split([ORIGINAL, LONGEST])
    return long if rope.use_long_rope else short


@pytest.mark.parametrize("seq_len", [LONGEST, ORIGINAL])
@pytest.mark.parametrize("kind", [*ROPES, "phimoe"])
def test_packed_samples_have_the_logprobs_of_single_ones_for_all_rope_types(kind, seq_len, tmp_path):
    save(phimoe() if kind == "phimoe" else config(kind), tmp_path)
    policy = load_policy(TrainerModelConfig(name=str(tmp_path), seq_len=seq_len, max_model_len=seq_len), seed=0)
    parts = segments(64, [9, 40])
    with torch.no_grad():
        packed = policy(pack(parts))[0]
        alone = torch.cat([policy(pack([part]))[0] for part in parts])
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-5)
    if "longrope" in policy.causal_lm.config.rope_parameters["rope_type"]:  # the fixed frequencies are not published
        published = policy.causal_lm.config.rope_parameters
        assert {key: published[key] for key in FACTORS} == FACTORS


@pytest.mark.parametrize("max_model_len", [ORIGINAL, ORIGINAL + 1])
@pytest.mark.parametrize("kind", ROPES)
def test_frequencies_equal_those_of_vllm(kind, max_model_len, monkeypatch, tmp_path):
    save(config(kind), tmp_path)
    policy = load_policy(TrainerModelConfig(name=str(tmp_path), max_model_len=max_model_len), seed=0)
    wanted = from_vllm(monkeypatch, ROPES[kind], max_model_len)
    for length in (ORIGINAL, LONGEST):  # a row's length must make no difference
        cos, sin = rotary(policy)(torch.zeros(1), torch.arange(length)[None])
        half = slice(0, HEAD_DIM // 2)
        got = torch.cat([cos[0][:, half], sin[0][:, half]], 1)
        count = min(length, len(wanted))
        torch.testing.assert_close(got[:count], wanted[:count], rtol=1e-5, atol=1e-5)


def load(path, **keys):
    return load_policy(TrainerModelConfig(name=str(path), seq_len=LONGEST, **keys), seed=0)


def test_longrope_without_max_model_len_uses_vllms_default(tmp_path):
    save(config("longrope"), tmp_path)
    left_out, default, long = (
        rotary(load(tmp_path, **keys)).inv_freq
        for keys in ({}, {"max_model_len": ORIGINAL}, {"max_model_len": LONGEST})
    )
    assert torch.equal(left_out, default) and not torch.allclose(left_out, long)


@pytest.mark.extended
def test_default_length_of_longrope_in_vllm_is_the_original_one(tmp_path):
    from vllm.config import ModelConfig

    save(config("longrope"), tmp_path)
    assert ModelConfig(model=str(tmp_path), skip_tokenizer_init=True).max_model_len == ORIGINAL


def test_longrope_without_a_known_default_requires_max_model_len(tmp_path):
    keys = {**SMALL, "hidden_size": 4 * HEAD_DIM, "max_position_embeddings": LONGEST}
    save(transformers.LlamaConfig(**keys, rope_parameters=dict(ROPES["longrope"])), tmp_path)
    with pytest.raises(ConfigError, match=r"^model\.max_model_len: .* longrope .* set both") as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)
    load(tmp_path, max_model_len=LONGEST)


def test_dynamic_frequencies_beyond_their_positions_are_refused(tmp_path):
    save(config("dynamic"), tmp_path)
    with pytest.raises(ConfigError, match=r"model\.max_model_len: .* dynamic .* 64 tokens, but .* 65 tokens"):
        load_policy(TrainerModelConfig(name=str(tmp_path), seq_len=LONGEST + 1), seed=0)
    policy = load_policy(TrainerModelConfig(name=str(tmp_path), seq_len=512, max_model_len=LONGEST), seed=0)
    with pytest.raises(ConfigError, match=r"a sample of 65 tokens, but .* has 64 positions"):
        policy.check_row(pack(segments(64, [65])))
