"""scripts/make_tiny_model.py: a small random model of any family of transformers."""

import json
import runpy
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.core.errors import ConfigError
from prime_rl.trainer.model.policy_model import build_policy
from prime_rl.trainer.trainer_metrics import ModelFlops

SCRIPT = Path(__file__).parents[2] / "scripts/make_tiny_model.py"
DENSE = "gemma4_text llama mistral qwen2 qwen3 gemma gemma2 gemma3_text gemma3n_text phi3 granite cohere2 olmo3 smollm3"
MIXTURES = "qwen3_moe mixtral olmoe glm4_moe deepseek_v2 deepseek_v3 gpt_oss dots1 llama4 longcat_flash ernie4_5_moe"
HYBRIDS = (
    "qwen3_next qwen3_5 qwen3_5_text qwen3_5_moe_text nemotron_h granitemoehybrid falcon_h1 bamba lfm2 lfm2_moe "
    "olmo_hybrid kimi_linear jamba"
)
KINDS = {
    "gemma3_text": {"sliding_attention", "full_attention"},
    "qwen3_5_moe_text": {"linear_attention", "full_attention"},
    "nemotron_h": {"linear_attention", "full_attention", "mlp"},
    "granitemoehybrid": {"linear_attention", "full_attention"},
    "lfm2": {"conv", "full_attention"},
}
MESSAGES = [{"role": "user", "content": "abc"}]


def run_script(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["make_tiny_model.py", *map(str, arguments)])
    runpy.run_path(str(SCRIPT), run_name="__main__")


@pytest.mark.extended(after=3)
@pytest.mark.parametrize("family", f"{DENSE} {MIXTURES} {HYBRIDS}".split())
def test_tiny_model_of_a_family_loads_and_tells_tokens_apart(family, tmp_path, monkeypatch):
    path = tmp_path / "new/model"
    run_script(monkeypatch, family, path)
    assert (path / "model.safetensors").stat().st_size < 20e6
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(ids) == "<|im_start|>user\nabc<|im_end|>\n<|im_start|>assistant\n"
    model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    config = model.config
    assert model.dtype == torch.float32 and config.architectures == [type(model).__name__]
    assert config.model_type.removesuffix("_text") == family.removesuffix("_text")
    assert {config.eos_token_id, model.generation_config.eos_token_id} == {tokenizer.eos_token_id}
    assert set(getattr(config, "layer_types", ())) >= KINDS.get(family, set())
    head = json.loads((path / "config.json").read_text()).get("head_dim", 32)
    assert head % 32 == 0 and config.vocab_size >= len(tokenizer)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0]
        reversed_logits = model(input_ids=torch.tensor([ids[::-1]])).logits[0]
    assert bool(logits.isfinite().all()) and logits.shape == (len(ids), config.vocab_size)
    assert not torch.allclose(logits[-1], logits[-2], atol=1e-3)
    assert not torch.allclose(logits[len(ids) // 2], reversed_logits[len(ids) // 2], atol=1e-3)
    assert float(logits.softmax(-1).max()) < 0.95
    with suppress(ConfigError):  # not every family can be trained
        policy = build_policy(TrainerModelConfig(name=str(path)))
        assert ModelFlops.of(policy).total(np.array([8]), scored=7) > 0


def test_tiny_model_is_the_same_at_each_call(tmp_path, monkeypatch):
    for name in ("a", "b"):
        run_script(monkeypatch, "qwen3_moe", tmp_path / name)
    assert len({(tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b")}) == 1


@pytest.mark.parametrize(
    ("family", "directory", "message"),
    [
        ("qwen3moe", "new", "FAMILY: 'qwen3moe' is not a model_type of transformers; similar: qwen3_moe, "),
        ("bart", "new", "FAMILY: 'bart' has an encoder; choose a family of decoders"),
        ("bert", "new", "FAMILY: tokens of BertLMHeadModel attend to later ones"),
        ("phi4_multimodal", "new", "do not fit 'phi4_multimodal'; extend LIMITS: ValueError: 870,"),
        ("llama", "full", "full exists and is not an empty directory; name a new one"),
        ("llama", "full/mine/new", "full/mine/new cannot be written: Not a directory"),
    ],
)
def test_tiny_model_refused_in_one_line_keeps_what_exists(family, directory, message, tmp_path, monkeypatch, capfd):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine").write_text("mine")
    with pytest.raises(SystemExit, match="2"):
        run_script(monkeypatch, family, tmp_path / directory)
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line
    assert not (tmp_path / "new").exists() and (tmp_path / "full/mine").read_text() == "mine"
