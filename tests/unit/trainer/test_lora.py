"""LoRA: training on any number of ranks (I9), published adapters and merged weights."""

import json
import shutil
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from prime_rl.configs.base_model import TokenizerConfig
from prime_rl.configs.training.model import ActivationCheckpointConfig, LoRAConfig, TrainerModelConfig
from prime_rl.configs.training.optim import AdamWConfig
from prime_rl.core.errors import ConfigError
from prime_rl.core.types import PolicyVersion
from prime_rl.storage.tensor_hashes import hash_tensors
from prime_rl.trainer.model.lora import adapted_layers, add_adapters
from prime_rl.trainer.model.policy_model import load_tokenizer
from prime_rl.trainer.optim.optimizers import build_optimizer
from prime_rl.trainer.parallel.process_group import World
from prime_rl.trainer.rl.batch_source import split_batch
from prime_rl.trainer.train_step import TrainStep
from prime_rl.trainer.weight_sync.publisher import Publisher
from prime_rl.trainer.weights.adapter_files import merge_adapter
from prime_rl.trainer.weights.policy_loading import load_policy, make_policy
from tests.support.tiny_model import make_tiny_model
from tests.unit.trainer.test_policy_model import ARCHITECTURES, pack, segments
from tests.unit.trainer.test_train_step import OBJECTIVE, ROOM, make_batch
from tests.unit.trainer.world import run_world

LORA = LoRAConfig(rank=4, alpha=12)
ATTENTION = LORA.model_copy(update={"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]})


def make_moe(path):
    torch.manual_seed(0)
    config = ARCHITECTURES["qwen3_moe"]()
    config.vocab_size = 128
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)


def train(world, path, lora=LORA, steps=3, **options):
    """Return the trained policy and the results of the steps."""
    config = TrainerModelConfig(name=str(path), lora=lora, **options)
    policy = make_policy(config, 0, world)
    engine = TrainStep(policy, build_optimizer(AdamWConfig(lr=1e-2), policy), world, max_norm=1.0)
    return policy, [engine.step(split_batch(make_batch(n), n, 1, world, ROOM), OBJECTIVE, 1.0) for n in range(steps)]


def publish(world, policy, tokenizer, target, kind):
    """Publish the policy as `kind`."""
    for layer in adapted_layers(policy).values():
        layer.config = layer.config.model_copy(update={"publish": kind})
    Publisher(policy, tokenizer, torch.float32, world).publish(target, PolicyVersion(0, 3))


def train_adapters(world: World, argument: str):
    """Train a dense model and one with experts, and publish both ways; runs on every rank."""
    root, results = Path(argument), {}
    tokenizer = load_tokenizer(TokenizerConfig(name=str(root / "dense")), TrainerModelConfig(name=str(root / "dense")))
    for name in ("dense", "moe"):
        # The dense model recomputes activations; on four ranks it has two replicas of two shards.
        options = {"ac": ActivationCheckpointConfig(), "dp_replicate": max(1, world.size // 2)}
        policy, steps = train(world, root / name, **(options if name == "dense" else {"lora": ATTENTION}))
        results[name] = [[step.loss, step.grad_norm] for step in steps]
        for kind in ("merged", "adapter"):
            publish(world, policy, tokenizer, root / f"{name}_{kind}_{world.size}", kind)
    return results


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The directory of two base models."""
    root = tmp_path_factory.mktemp("lora")
    make_tiny_model(root / "dense")
    make_moe(root / "moe")
    return root


@pytest.fixture
def alone(world, root):
    """What one rank reports; its versions are in `root`."""
    for name in ("dense", "moe"):
        for kind in ("merged", "adapter"):
            shutil.rmtree(root / f"{name}_{kind}_1", ignore_errors=True)
    return train_adapters(world, str(root))


@pytest.fixture(scope="module")
def together(root):
    """What four ranks report."""
    return run_world(4, train_adapters, str(root), root)[0]


@pytest.mark.extended
@pytest.mark.parametrize("name", ["dense", "moe"])
def test_adapters_do_not_depend_on_the_world_size(root, alone, together, name):
    np.testing.assert_allclose(together[name], alone[name], rtol=1e-5)
    for kind, file in (("merged", "model.safetensors"), ("adapter", "adapter_model.safetensors")):
        expected = load_file(root / f"{name}_{kind}_1" / file)
        for key, value in load_file(root / f"{name}_{kind}_4" / file).items():
            np.testing.assert_allclose(value, expected[key], atol=2e-5, err_msg=key)


@pytest.mark.extended
@pytest.mark.parametrize("name", ["dense", "moe"])
def test_merged_publication_changes_adapted_weights_only(root, together, name):
    base = load_file(root / name / "model.safetensors")
    merged = load_file(root / f"{name}_merged_4" / "model.safetensors")
    adapters = load_file(root / f"{name}_adapter_4" / "adapter_model.safetensors")
    layers = {key.removeprefix("base_model.model.").rpartition(".lora_")[0] for key in adapters}
    assert merged.keys() == base.keys()
    changed = {key for key in base if not np.array_equal(base[key], merged[key])}
    assert changed == {f"{layer}.weight" for layer in layers}
    assert len(changed) == (14 if name == "dense" else 12), "seven layers in each of two blocks, four in three"
    for layer in layers:
        a, b = (adapters[f"base_model.model.{layer}.lora_{factor}.weight"] for factor in "AB")
        assert a.shape[0] == b.shape[1] == 4
        np.testing.assert_allclose(merged[f"{layer}.weight"], base[f"{layer}.weight"] + 3.0 * b @ a, atol=1e-6)


def test_merge_adapter_equals_merged_publication(root, alone, tmp_path):
    merge_adapter(root / "dense_adapter_1", root / "dense", tmp_path / "out")
    assert hash_tensors(tmp_path / "out") == hash_tensors(root / "dense_merged_1")
    transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    with pytest.raises(ConfigError, match="already exists"):
        merge_adapter(root / "dense_adapter_1", root / "dense", tmp_path / "out")
    with pytest.raises(ConfigError, match="does not match"):
        merge_adapter(root / "dense_adapter_1", root / "moe", tmp_path / "other")
    with pytest.raises(ConfigError, match=r"contains no adapter_config\.json"):
        merge_adapter(root / "dense", root / "dense", tmp_path / "other")
    for name, changed, said in (
        ("scales", {"alpha_pattern": {"q_proj": 1}}, "alpha_pattern"),
        ("dora", {"use_dora": True}, "use_dora"),
        ("without_rank", {"r": None}, "is not a valid peft adapter"),
    ):
        shutil.copytree(root / "dense_adapter_1", tmp_path / name)
        values = json.loads((tmp_path / name / "adapter_config.json").read_text()) | changed
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(values))
        with pytest.raises(ConfigError, match=said):
            merge_adapter(tmp_path / name, root / "dense", tmp_path / "other")
    (tmp_path / "scales" / "adapter_model.safetensors").write_bytes(b"x" * 99)
    with pytest.raises(ConfigError, match="is not a valid peft adapter"):
        merge_adapter(tmp_path / "scales", root / "dense", tmp_path / "other")


def test_adapted_policy_has_the_logprobs_of_the_merged_model(world, root, tmp_path):
    policy, _ = train(world, root / "dense")
    tokenizer = load_tokenizer(TokenizerConfig(), TrainerModelConfig(name=str(root / "dense")))
    publish(world, policy, tokenizer, tmp_path / "merged", "merged")
    plain = load_policy(TrainerModelConfig(name=str(tmp_path / "merged")), seed=0)
    base = load_policy(TrainerModelConfig(name=str(root / "dense")), seed=0)
    row = pack(segments(100))
    with torch.no_grad():
        torch.testing.assert_close(policy(row)[0], plain(row)[0], atol=2e-5, rtol=0)
        assert (policy(row)[0] - base(row)[0]).abs().max() > 1e-2, "three steps have changed the policy"


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_peft_loads_the_published_adapter(root, alone, name):
    tokens = torch.arange(3, 40)[None]
    base = transformers.AutoModelForCausalLM.from_pretrained(root / name)
    adapted = peft.PeftModel.from_pretrained(base, root / f"{name}_adapter_1").eval()
    merged = transformers.AutoModelForCausalLM.from_pretrained(root / f"{name}_merged_1").eval()
    with torch.no_grad():
        torch.testing.assert_close(adapted(tokens).logits, merged(tokens).logits, atol=1e-4, rtol=0)


def test_adapter_config_lists_the_adapted_layers(root, alone):
    config = json.loads((root / "dense_adapter_1" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 12)
    assert config["target_modules"] == sorted(LORA.target_modules)
    assert config["base_model_name_or_path"] == str(root / "dense")


def test_adapted_policy_starts_as_the_base_model_and_trains_adapters_only(world, root):
    config = TrainerModelConfig(name=str(root / "dense"), lora=LORA)
    policy, row = make_policy(config, 0, world), pack(segments(100))
    assert torch.equal(policy(row)[0], load_policy(config, seed=0)(row)[0])
    trained_names = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert trained_names == {name for name, _ in policy.named_parameters() if ".lora_" in name}
    (group,) = build_optimizer(AdamWConfig(), policy).param_groups
    assert len(group["params"]) == len(trained_names) == 28
    policy(row)[0].sum().backward()
    assert all((p.grad is None) == (name not in trained_names) for name, p in policy.named_parameters())


@pytest.mark.extended
def test_base_dtype_bfloat16_stores_frozen_weights_in_bfloat16(world, root, tmp_path):
    lora = LORA.model_copy(update={"base_dtype": "bfloat16"})
    policy, steps = train(world, root / "dense", lora)
    kept = {p.requires_grad: p.dtype for p in policy.parameters()}
    assert kept == {True: torch.float32, False: torch.bfloat16}
    _, exact = train(world, root / "dense")
    assert [step.loss for step in steps] == pytest.approx([step.loss for step in exact], abs=0.05)


@pytest.mark.extended
def test_base_dtype_does_not_change_a_bfloat16_forward(world, root):
    """Stored or cast, the base has the same bfloat16 values where forward runs in bfloat16."""
    results = [
        train(world, root / "dense", LORA.model_copy(update={"base_dtype": dtype}), dtype="bfloat16")[1]
        for dtype in ("auto", "float32")
    ]
    assert [step.loss for step in results[0]] == [step.loss for step in results[1]]


def test_dropout_is_active_with_gradients_only(root):
    config = TrainerModelConfig(name=str(root / "dense"))
    policy, row = load_policy(config, seed=0), pack(segments(100))
    add_adapters(policy, LoRAConfig(rank=4, dropout=0.5), torch.float32)
    for layer in adapted_layers(policy).values():
        torch.nn.init.normal_(layer.lora_B.weight, std=0.1)
    with torch.no_grad():
        assert torch.equal(policy(row)[0], policy(row)[0])
    assert not torch.equal(policy(row)[0], policy(row)[0])


def adapt(name, tmp_path, targets):
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(ARCHITECTURES[name]()).save_pretrained(tmp_path)
    policy = load_policy(TrainerModelConfig(name=str(tmp_path)), seed=0)
    add_adapters(policy, LoRAConfig(**({"target_modules": targets} if targets else {})), torch.float32)
    return list(adapted_layers(policy))


@pytest.mark.parametrize(
    ("name", "targets", "layers"),
    [
        ("llama", None, 21),
        ("qwen3_moe_some_dense", None, 15),  # one of its blocks is dense
        ("llama", "q_proj,v_proj", 6),
        ("llama", ["mlp.up_proj"], 3),
        ("llama", [r".*self_attn\.[qk]_proj"], 6),
        ("llama", [r"model\.layers\.[02]\..*_proj"], 14),
        ("llama", "all-linear", 21),
        ("gpt_neox", "all-linear", 12),
    ],
)
def test_target_modules_select_layers(name, targets, layers, tmp_path):
    names = adapt(name, tmp_path, targets)
    assert len(names) == layers
    assert not any("lm_head" in name or "embed_out" in name for name in names)


@pytest.mark.parametrize(
    ("name", "targets", "message"),
    [
        ("llama", ["q_proj", "query"], "no linear layer matches 'query'; available: down_proj, gate_proj, k_proj"),
        ("llama", ["lm_head"], "no linear layer matches 'lm_head'"),
        ("gpt_neox", None, "the model has none of the default targets; available: dense, dense_4h_to_h"),
    ],
)
def test_unknown_target_modules_raise_one_error(name, targets, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        adapt(name, tmp_path, targets)


def test_lora_options_that_conflict_are_refused():
    with pytest.raises(ValueError, match="neither a name nor a regular expression"):
        LoRAConfig(target_modules=["(q_proj"])
    with pytest.raises(ValueError, match=r"lora does not support tp = 2: .*model\.tp=1"):
        TrainerModelConfig(lora=LORA, tp=2)
