"""Adapters: what is trained and what stays, the same on any number of ranks (I9), and what is published of them."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from prime_rl.configs.inference import InferenceConfig
from prime_rl.configs.lora import LoRAConfig
from prime_rl.configs.optim import AdamWConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.shared import TokenizerConfig
from prime_rl.configs.trainer import ActivationCheckpointConfig, AIPOLossConfig, TrainerConfig, TrainerModelConfig
from prime_rl.errors import ConfigError
from prime_rl.run.tensors import hash_tensors
from prime_rl.trainer.adapter_files import merge_adapter
from prime_rl.trainer.engine import Engine
from prime_rl.trainer.loading import make_policy
from prime_rl.trainer.lora import adapted_layers, add_adapters
from prime_rl.trainer.losses import build_loss
from prime_rl.trainer.model import load_policy, load_tokenizer
from prime_rl.trainer.optim import build_optimizer
from prime_rl.trainer.parallel import World
from prime_rl.trainer.publication import Publisher
from prime_rl.trainer.rl.batches import split_batch
from prime_rl.trainer.rl.objective import rl_objective
from prime_rl.types import PolicyVersion
from tests.support.tiny_model import make_tiny_model
from tests.unit.trainer.test_engine import ROOM, make_batch
from tests.unit.trainer.test_model import ARCHITECTURES, pack, segments
from tests.unit.trainer.test_publish import lone_world  # noqa: F401  a fixture
from tests.unit.trainer.world import run_world

LORA = LoRAConfig(rank=4, alpha=12)
ATTENTION = LORA.model_copy(update={"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]})
SIZES = (1, 2, 4)


def make_moe(path):
    torch.manual_seed(0)
    config = ARCHITECTURES["qwen3_moe"]()
    config.vocab_size = 128
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)


def train(world, path, lora=LORA, steps=3, **options):
    """Return the trained policy and what the engine said."""
    config = TrainerModelConfig(name=str(path), lora=lora, **options)
    policy = make_policy(config, 0, world)
    engine = Engine(policy, build_optimizer(AdamWConfig(lr=1e-2), policy), world, max_norm=1.0)
    objective = rl_objective(build_loss(AIPOLossConfig()))
    return policy, [engine.step(split_batch(make_batch(n), n, 1, world, ROOM), objective, 1.0) for n in range(steps)]


def publish(world, policy, tokenizer, target, kind):
    """Publish the policy both ways from the same layers."""
    for layer in adapted_layers(policy).values():
        layer.config = layer.config.model_copy(update={"publish": kind})
    Publisher(policy, tokenizer, torch.float32, world).publish(target, PolicyVersion(0, 3))


def train_adapters(world: World, argument: str):
    """Runs on every rank: three steps of a dense model and of one with experts, published both ways."""
    root, results = Path(argument), {}
    tokenizer = load_tokenizer(TokenizerConfig(name=str(root / "dense")), TrainerModelConfig(name=str(root / "dense")))
    for name in ("dense", "moe"):
        # The dense one recomputes activations, and on four ranks is two copies over two ranks each.
        options = {"ac": ActivationCheckpointConfig(), "dp_replicate": max(1, world.size // 2)}
        policy, steps = train(world, root / name, **(options if name == "dense" else {"lora": ATTENTION}))
        results[name] = [[step.loss, step.grad_norm] for step in steps]
        for kind in ("merged", "adapter"):
            publish(world, policy, tokenizer, root / f"{name}_{kind}_{world.size}", kind)
    return results


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    root = tmp_path_factory.mktemp("lora")
    make_tiny_model(root / "dense")
    make_moe(root / "moe")
    return root, {size: run_world(size, train_adapters, str(root), root)[0] for size in SIZES}


@pytest.mark.parametrize("name", ["dense", "moe"])
@pytest.mark.parametrize("size", SIZES[1:])
def test_world_size_is_invisible(trained, size, name):
    root, results = trained
    np.testing.assert_allclose(results[size][name], results[1][name], rtol=1e-5)
    for kind, file in (("merged", "model.safetensors"), ("adapter", "adapter_model.safetensors")):
        alone = load_file(root / f"{name}_{kind}_1" / file)
        for key, value in load_file(root / f"{name}_{kind}_{size}" / file).items():
            np.testing.assert_allclose(value, alone[key], atol=2e-5, err_msg=key)


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_merged_weights_are_base_plus_adapters_and_the_rest_is_untouched(trained, name):
    root, _ = trained
    base = load_file(root / name / "model.safetensors")
    merged = load_file(root / f"{name}_merged_2" / "model.safetensors")
    adapters = load_file(root / f"{name}_adapter_2" / "adapter_model.safetensors")
    layers = {key.removeprefix("base_model.model.").rpartition(".lora_")[0] for key in adapters}
    assert merged.keys() == base.keys()
    changed = {key for key in base if not np.array_equal(base[key], merged[key])}
    assert changed == {f"{layer}.weight" for layer in layers}
    assert len(changed) == (14 if name == "dense" else 12), "seven layers in each of two blocks, four in three"
    for layer in layers:
        a, b = (adapters[f"base_model.model.{layer}.lora_{factor}.weight"] for factor in "AB")
        assert a.shape[0] == b.shape[1] == 4
        np.testing.assert_allclose(merged[f"{layer}.weight"], base[f"{layer}.weight"] + 3.0 * b @ a, atol=1e-6)


def test_merging_the_files_gives_what_merged_publication_gives(trained, tmp_path):
    root, _ = trained
    merge_adapter(root / "dense_adapter_2", root / "dense", tmp_path / "out")
    assert hash_tensors(tmp_path / "out") == hash_tensors(root / "dense_merged_2")
    transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    with pytest.raises(ConfigError, match="exists already"):
        merge_adapter(root / "dense_adapter_2", root / "dense", tmp_path / "out")
    with pytest.raises(ConfigError, match="is of another model"):
        merge_adapter(root / "dense_adapter_2", root / "moe", tmp_path / "other")
    with pytest.raises(ConfigError, match=r"holds no adapter_config\.json"):
        merge_adapter(root / "dense", root / "dense", tmp_path / "other")
    for name, changed, said in (
        ("scales", {"alpha_pattern": {"q_proj": 1}}, "alpha_pattern"),
        ("dora", {"use_dora": True}, "use_dora"),
        ("without_rank", {"r": None}, "is not an adapter"),
    ):
        shutil.copytree(root / "dense_adapter_2", tmp_path / name)
        values = json.loads((tmp_path / name / "adapter_config.json").read_text()) | changed
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(values))
        with pytest.raises(ConfigError, match=said):
            merge_adapter(tmp_path / name, root / "dense", tmp_path / "other")
    (tmp_path / "scales" / "adapter_model.safetensors").write_bytes(b"x" * 99)
    with pytest.raises(ConfigError, match="is not an adapter"):
        merge_adapter(tmp_path / "scales", root / "dense", tmp_path / "other")


def test_the_adapted_policy_scores_as_the_merged_model(lone_world, trained, tmp_path):  # noqa: F811
    root, _ = trained
    policy, _ = train(lone_world, root / "dense")
    tokenizer = load_tokenizer(TokenizerConfig(), TrainerModelConfig(name=str(root / "dense")))
    publish(lone_world, policy, tokenizer, tmp_path / "merged", "merged")
    plain = load_policy(TrainerModelConfig(name=str(tmp_path / "merged")), seed=0)
    base = load_policy(TrainerModelConfig(name=str(root / "dense")), seed=0)
    row = pack(segments(100))
    with torch.no_grad():
        torch.testing.assert_close(policy(row)[0], plain(row)[0], atol=2e-5, rtol=0)
        assert (policy(row)[0] - base(row)[0]).abs().max() > 1e-2, "three steps have changed the policy"


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_peft_reads_the_adapter(trained, name):
    peft = pytest.importorskip("peft")
    root, _ = trained
    tokens = torch.arange(3, 40)[None]
    base = transformers.AutoModelForCausalLM.from_pretrained(root / name)
    adapted = peft.PeftModel.from_pretrained(base, root / f"{name}_adapter_2").eval()
    merged = transformers.AutoModelForCausalLM.from_pretrained(root / f"{name}_merged_2").eval()
    with torch.no_grad():
        torch.testing.assert_close(adapted(tokens).logits, merged(tokens).logits, atol=1e-4, rtol=0)


def test_peft_is_told_what_was_adapted(trained):
    root, _ = trained
    config = json.loads((root / "dense_adapter_2" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 12)
    assert config["target_modules"] == sorted(LORA.target_modules)
    assert config["base_model_name_or_path"] == str(root / "dense")


def test_starts_as_the_base_model_and_trains_adapters_alone(lone_world, trained):  # noqa: F811
    root, _ = trained
    config = TrainerModelConfig(name=str(root / "dense"), lora=LORA)
    policy, row = make_policy(config, 0, lone_world), pack(segments(100))
    assert torch.equal(policy(row)[0], load_policy(config, seed=0)(row)[0])
    trained_names = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert trained_names == {name for name, _ in policy.named_parameters() if ".lora_" in name}
    (group,) = build_optimizer(AdamWConfig(), policy).param_groups
    assert len(group["params"]) == len(trained_names) == 28
    policy(row)[0].sum().backward()
    assert all((p.grad is None) == (name not in trained_names) for name, p in policy.named_parameters())


def test_the_frozen_weights_may_have_half_precision(lone_world, trained, tmp_path):  # noqa: F811
    root, _ = trained
    lora = LORA.model_copy(update={"base_dtype": "bfloat16"})
    policy, steps = train(lone_world, root / "dense", lora)
    kept = {p.requires_grad: p.dtype for p in policy.parameters()}
    assert kept == {True: torch.float32, False: torch.bfloat16}
    _, exact = train(lone_world, root / "dense")
    assert [step.loss for step in steps] == pytest.approx([step.loss for step in exact], abs=0.05)


def test_half_precision_is_what_forward_computes_in(lone_world, trained):  # noqa: F811
    """Stored or cast, the base has the same bfloat16 values where forward runs in bfloat16."""
    root, _ = trained
    results = [
        train(lone_world, root / "dense", LORA.model_copy(update={"base_dtype": dtype}), dtype="bfloat16")[1]
        for dtype in ("auto", "float32")
    ]
    assert [step.loss for step in results[0]] == [step.loss for step in results[1]]


def test_dropout_acts_where_gradients_are_computed(trained):
    root, _ = trained
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
def test_targets(name, targets, layers, tmp_path):
    names = adapt(name, tmp_path, targets)
    assert len(names) == layers
    assert not any("lm_head" in name or "embed_out" in name for name in names)


@pytest.mark.parametrize(
    ("name", "targets", "message"),
    [
        ("llama", ["q_proj", "query"], "no linear layer is called 'query'; there are down_proj, gate_proj, k_proj"),
        ("llama", ["lm_head"], "no linear layer is called 'lm_head'"),
        ("gpt_neox", None, "the model has none of the default; there are dense, dense_4h_to_h"),
    ],
)
def test_unknown_targets_are_one_error(name, targets, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        adapt(name, tmp_path, targets)


def test_configurations_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="neither a name nor a regular expression"):
        LoRAConfig(target_modules=["(q_proj"])
    with pytest.raises(ValueError, match=r"lora does not go with tp = 2: .*model\.tp=1"):
        TrainerModelConfig(lora=LORA, tp=2)
    adapter = TrainerModelConfig(lora=LoRAConfig(publish="adapter"))
    with pytest.raises(ValueError, match=r"trainer\.model\.lora\.publish = 'adapter' needs inference\.enable_lora"):
        RLConfig(trainer=TrainerConfig(model=adapter), inference=InferenceConfig())
    with pytest.raises(ValueError, match=r"lora\.rank = 16 is more than inference\.max_lora_rank = 8"):
        RLConfig(trainer=TrainerConfig(model=adapter), inference=InferenceConfig(enable_lora=True, max_lora_rank=8))
    RLConfig(trainer=TrainerConfig(model=adapter))  # a server that runs already says so itself
