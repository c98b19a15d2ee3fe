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
from prime_rl.configs.training.model import DEFAULT_TARGETS, ActivationCheckpointConfig, LoRAConfig, TrainerModelConfig
from prime_rl.configs.training.optim import AdamWConfig
from prime_rl.core.errors import ConfigError
from prime_rl.core.types import PolicyVersion
from prime_rl.storage.tensor_hashes import hash_tensors
from prime_rl.trainer.model.lora import adapted_experts, adapted_layers, add_adapters
from prime_rl.trainer.model.policy_model import PolicyModel, load_tokenizer
from prime_rl.trainer.optim.optimizers import build_optimizer
from prime_rl.trainer.parallel.process_group import World
from prime_rl.trainer.rl.batch_source import split_batch
from prime_rl.trainer.train_step import TrainStep
from prime_rl.trainer.weight_sync.publisher import Publisher
from prime_rl.trainer.weights.adapter_files import merge_adapter
from prime_rl.trainer.weights.policy_loading import load_policy, make_policy
from tests.support.tiny_model import make_tiny_model
from tests.unit.trainer.test_policy_model import ARCHITECTURES, pack, save, segments
from tests.unit.trainer.test_train_step import OBJECTIVE, ROOM, make_batch
from tests.unit.trainer.world import run_world

LORA = LoRAConfig(rank=4, alpha=12)
MOE = ARCHITECTURES["qwen3_moe"]()
MOE.vocab_size = 128
EXPERTS_LORA = LoRAConfig(rank=8, alpha=24, target_modules=[*DEFAULT_TARGETS, "experts"])
ATTENTION = LORA.model_copy(update={"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]})


def train(world, path, lora=LORA, steps=3, **options):
    """Return the trained policy and the results of the steps."""
    config = TrainerModelConfig(name=str(path), lora=lora, **options)
    policy = make_policy(config, 0, world)
    engine = TrainStep(policy, build_optimizer(AdamWConfig(lr=1e-2), policy), world, max_norm=1.0)
    return policy, [engine.step(split_batch(make_batch(n), n, 1, world, ROOM), OBJECTIVE, 1.0) for n in range(steps)]


def publish(world, policy, tokenizer, target, kind):
    """Publish the policy as `kind`."""
    for layer in (*adapted_layers(policy).values(), *adapted_experts(policy).values()):
        layer.config = layer.config.model_copy(update={"publish": kind})
    publisher = Publisher(policy, tokenizer, torch.float32, world)
    publisher.publish(target, PolicyVersion(0, 3))
    assert (publisher._snapshot is None) == (kind == "adapter"), "only the host copy of an adapter is freed"


def train_adapters(world: World, argument: str):
    """Train a dense model and one with experts, and publish both ways; runs on every rank."""
    root, results = Path(argument), {}
    tokenizer = load_tokenizer(TokenizerConfig(name=str(root / "dense")), TrainerModelConfig(name=str(root / "dense")))
    # The dense model recomputes activations; on four ranks it has two replicas of two shards, or two groups of experts.
    for name, base, options in (
        ("dense", "dense", {"ac": ActivationCheckpointConfig(), "dp_replicate": max(1, world.size // 2)}),
        ("moe", "moe", {"lora": ATTENTION}),
        ("experts", "moe", {"lora": EXPERTS_LORA, "ep": max(1, world.size // 2), "ac": ActivationCheckpointConfig()}),
    ):
        policy, steps = train(world, root / base, **options)
        with torch.no_grad():
            logprobs = policy(pack(segments(100)))[0]
        results[name] = [[step.loss, step.grad_norm] for step in steps], logprobs.tolist()
        for kind in ("merged", "adapter")[: 1 if name == "experts" else 2]:
            publish(world, policy, tokenizer, root / f"{name}_{kind}_{world.size}", kind)
    return results


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The directory of two base models."""
    root = tmp_path_factory.mktemp("lora")
    make_tiny_model(root / "dense")
    save(MOE, root / "moe")
    return root


@pytest.fixture(scope="module")
def alone(module_world, root):
    """What one rank reports; its versions are in `root`."""
    return train_adapters(module_world, str(root))


@pytest.mark.extended
def test_adapters_do_not_depend_on_the_world_size(root, alone, tmp_path):
    together = run_world(4, train_adapters, str(root), tmp_path)[0]
    for name in ("dense", "moe", "experts"):
        for got, wanted in zip(together[name], alone[name], strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=2e-5)
        files = (("merged", "model.safetensors"), ("adapter", "adapter_model.safetensors"))
        for kind, file in files[: 1 if name == "experts" else 2]:
            expected = load_file(root / f"{name}_{kind}_1" / file)
            for key, value in load_file(root / f"{name}_{kind}_4" / file).items():
                np.testing.assert_allclose(value, expected[key], atol=2e-5, err_msg=key)


@pytest.mark.parametrize(("name", "count"), [("dense", 7 * 2), ("moe", 4 * 3)])
def test_merged_publication_changes_adapted_weights_only(root, alone, name, count):
    base = load_file(root / name / "model.safetensors")
    merged = load_file(root / f"{name}_merged_1" / "model.safetensors")
    adapters = load_file(root / f"{name}_adapter_1" / "adapter_model.safetensors")
    layers = {key.removeprefix("base_model.model.").rpartition(".lora_")[0] for key in adapters}
    assert merged.keys() == base.keys() and len(layers) == count
    assert {key for key in base if not np.array_equal(base[key], merged[key])} == {
        f"{layer}.weight" for layer in layers
    }
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


@pytest.mark.parametrize(("name", "base"), [("dense", "dense"), ("experts", "moe")])
def test_adapted_policy_has_the_logprobs_of_the_merged_model(root, alone, name, base):
    trained, row = torch.tensor(alone[name][1]), pack(segments(100))
    merged, base = (load_policy(TrainerModelConfig(name=str(root / one)), 0) for one in (f"{name}_merged_1", base))
    with torch.no_grad():
        torch.testing.assert_close(trained, merged(row)[0], atol=2e-5, rtol=0)
        assert (trained - base(row)[0]).abs().max() > 1e-2, "three steps have changed the policy"


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_peft_loads_the_published_adapter(root, alone, name):
    tokens = torch.arange(3, 40)[None]
    config = json.loads((root / f"{name}_adapter_1" / "adapter_config.json").read_text())
    base = transformers.AutoModelForCausalLM.from_pretrained(config["base_model_name_or_path"])
    adapted = peft.PeftModel.from_pretrained(base, root / f"{name}_adapter_1").eval()
    merged = transformers.AutoModelForCausalLM.from_pretrained(root / f"{name}_merged_1").eval()
    with torch.no_grad():
        torch.testing.assert_close(adapted(tokens).logits, merged(tokens).logits, atol=1e-4, rtol=0)


def test_adapted_policy_starts_as_the_base_model_and_trains_adapters_only(module_world, root):
    config = TrainerModelConfig(name=str(root / "dense"), lora=LORA)
    policy, row = make_policy(config, 0, module_world), pack(segments(100))
    assert torch.equal(policy(row)[0], load_policy(config, seed=0)(row)[0])
    trained_names = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert trained_names == {name for name, _ in policy.named_parameters() if ".lora_" in name}
    (group,) = build_optimizer(AdamWConfig(), policy).param_groups
    assert len(group["params"]) == len(trained_names) == 28
    policy(row)[0].sum().backward()
    assert all((p.grad is None) == (name not in trained_names) for name, p in policy.named_parameters())


def test_base_dtype_of_a_bfloat16_forward_changes_nothing(module_world, root):
    """Stored or cast, the base has the same bfloat16 values where forward runs in bfloat16."""
    losses = []
    for dtype, stored in (("auto", torch.bfloat16), ("float32", torch.float32)):
        lora = LORA.model_copy(update={"base_dtype": dtype})
        policy, steps = train(module_world, root / "dense", lora, steps=2, dtype="bfloat16")
        assert {p.requires_grad: p.dtype for p in policy.parameters()} == {True: torch.float32, False: stored}
        losses.append([step.loss for step in steps])
    assert losses[0] == losses[1]


def test_dropout_is_active_with_gradients_only(root):
    config = TrainerModelConfig(name=str(root / "dense"))
    policy, row = load_policy(config, seed=0), pack(segments(100))
    add_adapters(policy, LoRAConfig(rank=4, dropout=0.5), torch.float32)
    for layer in adapted_layers(policy).values():
        torch.nn.init.normal_(layer.lora_B.weight, std=0.1)
    with torch.no_grad():
        assert torch.equal(policy(row)[0], policy(row)[0])
    assert not torch.equal(policy(row)[0], policy(row)[0])


def adapt(name, targets):
    policy = PolicyModel(transformers.AutoModelForCausalLM.from_config(ARCHITECTURES[name]()))
    add_adapters(policy, LoRAConfig(**({"target_modules": targets} if targets else {})), torch.float32)
    return list(adapted_layers(policy))


@pytest.mark.parametrize(
    ("name", "targets", "layers"),
    [
        ("llama", None, 21),
        ("qwen3_moe_some_dense", None, 15),  # one of its blocks is dense
        ("llama", "q_proj,v_proj", 6),
        ("llama", ["mlp.up_proj"], 3),
        ("llama", [r"model\.layers\.[02]\..*_proj"], 14),
        ("gpt_neox", "all-linear", 12),
    ],
)
def test_target_modules_select_layers(name, targets, layers):
    names = adapt(name, targets)
    assert len(names) == layers
    assert not any("lm_head" in name or "embed_out" in name for name in names)


@pytest.mark.parametrize(
    ("name", "targets", "message"),
    [
        ("llama", ["q_proj", "query"], "no linear layer matches 'query'; available: down_proj, gate_proj, k_proj"),
        ("llama", ["lm_head"], "no linear layer matches 'lm_head'"),
        ("llama", ["q_proj", "experts"], "'experts': the model has none|has no experts"),
        ("gpt_neox", None, "the model has none of the default targets; available: dense, dense_4h_to_h"),
    ],
)
def test_unknown_target_modules_raise_one_error(name, targets, message):
    with pytest.raises(ConfigError, match=message):
        adapt(name, targets)


def test_lora_options_that_conflict_are_refused():
    with pytest.raises(ValueError, match="neither a name nor a regular expression"):
        LoRAConfig(target_modules=["(q_proj"])
    with pytest.raises(ValueError, match=r"lora does not support tp = 2: .*model\.tp=1"):
        TrainerModelConfig(lora=LORA, tp=2)
    with pytest.raises(ValueError, match="adapters of experts are published merged"):
        LoRAConfig(target_modules=["experts"], publish="adapter")
    with pytest.raises(ValueError, match="rank = 12: adapters of experts need a multiple of 8"):
        LoRAConfig(target_modules=["q_proj", "experts"], rank=12)


def with_experts(config):
    """A policy with adapters on attention and experts, and random factors."""
    policy = PolicyModel(transformers.AutoModelForCausalLM.from_config(config))
    add_adapters(policy, EXPERTS_LORA, torch.float32)
    torch.manual_seed(1)
    for factor in (p for p in policy.parameters() if p.requires_grad):
        torch.nn.init.normal_(factor, std=0.05)
    return policy


@pytest.mark.parametrize(
    "name", ["qwen3_moe", "qwen3_moe_some_dense", "mixtral", "deepseek_v3", "gpt_oss_sinks_window"]
)
def test_adapters_of_experts_are_sums_of_weights(name):
    """Values and gradients are those of W + (alpha / rank) B A in the loop over experts that transformers has."""
    policy, row = with_experts(ARCHITECTURES[name]()), pack(segments(ARCHITECTURES[name]().vocab_size))
    plain = PolicyModel(
        transformers.AutoModelForCausalLM.from_config(ARCHITECTURES[name](), experts_implementation="eager")
    )
    factors = {key: p for key, p in policy.named_parameters() if p.requires_grad}
    sums = {}
    for key, weight in policy.named_parameters():
        for layer in (key.removesuffix(".weight"), f"{key}_lora"):
            if f"{layer}.lora_A.weight" in factors:
                delta = 3.0 * factors[f"{layer}.lora_B.weight"] @ factors[f"{layer}.lora_A.weight"]
                weight = weight + (delta.mT if "gpt_oss" in name and delta.ndim == 3 else delta)
        sums[key] = weight
    wanted = torch.func.functional_call(plain, {k: v for k, v in sums.items() if k not in factors}, (row,))[0]
    slope = torch.randn_like(wanted)
    expected = torch.autograd.grad((wanted * slope).sum(), list(factors.values()))
    got = policy(row)[0]
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-5)
    for gradient, reference in zip(
        torch.autograd.grad((got * slope).sum(), list(factors.values())), expected, strict=True
    ):
        torch.testing.assert_close(gradient, reference, atol=1e-4, rtol=1e-4)
    assert sum(factor.ndim == 3 for factor in factors.values()) >= 4
