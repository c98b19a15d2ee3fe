"""The FLOPs estimate against manual counts, and against the trainer's count of a built model."""

import json

import numpy as np
import pytest

from prime_rl.orchestrator.batching.row_flops import TOKENS, RowCost, read_model_config, row_cost, vocabulary_size

QWEN = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 48, "vocab_size": 64,
}  # fmt: skip
PROJECTIONS = 32 * 64 * 2 + 32 * 32 * 2  # q and o; k and v
DENSE = 3 * 32 * 48  # gate, up and down


def body(config):
    return RowCost.of(config).body / 6


def test_row_cost_dense_model():
    cost = RowCost.of(QWEN)
    assert cost == RowCost(body=6 * 3 * (PROJECTIONS + DENSE), head=6 * 32 * 64, attention=12 * 3 * 64)
    block_5, block_8 = ((2 * n * (PROJECTIONS + DENSE) + 2 * (2 * 64 * n * n) / 2) for n in (5, 8))
    expected = [3 * (3 * block_5 + 2 * 4 * 32 * 64), 3 * (3 * block_8 + 2 * 7 * 32 * 64)]
    np.testing.assert_allclose(cost(np.array([5, 8]), np.array([4, 7])), expected)


def test_row_cost_optional_keys_may_be_missing():
    short = {key: value for key, value in QWEN.items() if key not in ("head_dim", "num_key_value_heads")}
    assert body(short) == 3 * (4 * 32 * 32 + DENSE)


def test_row_cost_counts_only_active_experts():
    experts = QWEN | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    met = 2 * 3 * 32 * 16 + 32 * 8  # two experts and the router
    assert body(experts) == 3 * (PROJECTIONS + met)
    assert body(experts | {"mlp_only_layers": [1]}) == 3 * PROJECTIONS + 2 * met + DENSE
    assert body(experts | {"decoder_sparse_step": 2}) == 3 * PROJECTIONS + met + 2 * DENSE
    assert body(experts | {"shared_expert_intermediate_size": 20}) == 3 * (PROJECTIONS + met + 3 * 32 * 20)
    deepseek = QWEN | {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    shared = deepseek | {"n_shared_experts": 1, "first_k_dense_replace": 1}
    assert body(shared) == 3 * PROJECTIONS + 2 * (met + 3 * 32 * 16) + DENSE
    mixtral = QWEN | {"num_local_experts": 8, "num_experts_per_tok": 2}
    assert body(mixtral) == 3 * (PROJECTIONS + 2 * DENSE + 32 * 8)


def test_row_cost_sliding_layers_are_limited_to_the_window():
    kinds = ["sliding_attention", "full_attention", "linear_attention"]
    cost = RowCost.of(QWEN | {"layer_types": kinds, "sliding_window": 4})
    assert (cost.attention, cost.windowed, cost.window) == (12 * 64, 12 * 64, 4)
    near = cost(np.array([4, 10]), np.zeros(2, np.int64)) - cost.body * np.array([4, 10])
    np.testing.assert_allclose(near, 12 * 64 * np.array([8 + 8, 50 + (8 + 6 * 4)]))
    assert RowCost.of(QWEN | {"sliding_window": 4}).windowed == 12 * 3 * 64
    assert RowCost.of(QWEN | {"sliding_window": 4, "use_sliding_window": False}).windowed == 0


@pytest.mark.parametrize("text", [None, "no json", "[]", "{}", '{"hidden_size": 32}', '{"hidden_size": "a"}'])
def test_row_cost_unreadable_configuration_counts_tokens(tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert row_cost(read_model_config(str(tmp_path))) == TOKENS
    np.testing.assert_array_equal(TOKENS(np.array([3, 5]), np.array([1, 1])), [3, 5])


def test_read_model_config_invalid_name_is_empty():
    assert row_cost(read_model_config("no/such/model")) == TOKENS


def test_read_model_config_hub_model_uses_the_cache(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(QWEN))

    def download(model, file, local_files_only=False):
        assert (model, file, local_files_only) == ("some/model", "config.json", True)
        return str(tmp_path / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert row_cost(read_model_config("some/model")) == RowCost.of(QWEN)


@pytest.mark.parametrize("config", [QWEN, {"model_type": "vision", "text_config": QWEN}])
def test_read_model_config_local_directory(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert row_cost(read_model_config(str(tmp_path))) == RowCost.of(QWEN)
    assert vocabulary_size(read_model_config(str(tmp_path))) == QWEN["vocab_size"]


@pytest.mark.parametrize("text", [None, "no json", "[]", "{}", '{"vocab_size": "many"}'])
def test_vocabulary_size_missing_is_none(tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert vocabulary_size(read_model_config(str(tmp_path))) is None


@pytest.mark.parametrize("name", ["qwen3", "qwen2_tied", "llama", "qwen3_moe", "mistral_window", "gemma3_window"])
def test_row_cost_equals_the_trainers_count(name, tmp_path):
    pytest.importorskip("torch")
    from prime_rl.configs.training.model import TrainerModelConfig
    from prime_rl.trainer.model_flops import ModelFlops
    from prime_rl.trainer.weights.policy_loading import load_policy
    from tests.unit.trainer.test_policy_model import ARCHITECTURES, save

    save(ARCHITECTURES[name](), tmp_path)
    built, cost = (
        ModelFlops.of(load_policy(TrainerModelConfig(name=str(tmp_path)), seed=0)),
        row_cost(read_model_config(tmp_path)),
    )
    assert (cost.body, cost.head) == (built.body, built.head)
    assert cost.attention + cost.windowed == built.attention
