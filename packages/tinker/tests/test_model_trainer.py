"""Operations on models: gradients of each loss against torch and peft, checkpoints, several ranks."""

import itertools
import shutil

import numpy as np
import peft
import pytest
import torch
import transformers
from tests.support.tiny_model import VOCAB_SIZE, make_tiny_model
from tests.unit.trainer.test_policy_model import ARCHITECTURES
from tests.unit.trainer.world import run_world

from prime_rl.configs.training.model import ALL_LINEAR, LoRAConfig, TrainerModelConfig
from prime_rl.core.errors import ConfigError
from prime_rl.trainer.parallel.process_group import join_world
from prime_rl_tinker.losses import LOSSES
from prime_rl_tinker.messages import CreateModel, ForwardBackward, LoadWeights, OptimStep, Sample, SaveWeights
from prime_rl_tinker.model_trainer import ModelTrainer
from prime_rl_tinker.tinker_server import export

STEP = {"learning_rate": 0.1, "beta1": 0.0, "beta2": 0.9, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0}
LENGTHS = (7, 3, 12)
SIZES = pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.extended)])


def run_ranks(size, function, argument, tmp_path):
    """Return what `function(world, argument)` returned on each rank; one rank runs in this process."""
    if size > 1:
        return run_world(size, function, argument, tmp_path)
    with join_world("cpu", 60) as world:
        return [function(world, argument)]


def sample_of(tokens, targets, positions=None, **arrays):
    positions = np.arange(len(tokens)) if positions is None else positions
    return Sample(
        tokens=np.asarray(tokens, np.int64).tobytes(),
        positions=np.asarray(positions, np.int64).tobytes(),
        targets=np.asarray(targets, np.int64).tobytes(),
        arrays={name: np.asarray(values, np.float32).tobytes() for name, values in arrays.items()},
    )


def samples_of(loss, seed=0):
    """Return random samples: negative weights, several targets per position, prompts without advantage."""
    random, samples = np.random.default_rng(seed), []
    for length in LENGTHS:
        tokens, targets = random.integers(0, VOCAB_SIZE, (2, length))
        positions = np.arange(length)
        if loss == "cross_entropy":
            positions = np.repeat(positions, 2)  # [N, 2]
            targets = random.integers(0, VOCAB_SIZE, 2 * length)
            arrays = {"weights": random.standard_normal(2 * length)}
        else:
            advantages = random.standard_normal(length)
            advantages[:2] = 0
            logprobs = np.where(advantages == 0, 0, -random.random(length) * 6)
            arrays = {"advantages": advantages, "logprobs": logprobs}
        samples.append((tokens, targets, positions, arrays))
    return samples


def request(model_id, loss, seed=0, forward_only=False):
    samples = [sample_of(*one[:3], **one[3]) for one in samples_of(loss, seed)]
    return ForwardBackward(model_id, samples, loss, dict(LOSSES[loss].options), forward_only)


def trainer_of(world, path, seq_len=16):
    lora = LoRAConfig(rank=8, target_modules=[ALL_LINEAR])  # as `TinkerConfig.trained_model`
    return ModelTrainer(TrainerModelConfig(name=str(path), seq_len=seq_len, lora=lora), world)


def create(model_id, rank=4, seed=0, **layers):
    flags = {"train_attn": True, "train_mlp": True, "train_unembed": True, **layers}
    return CreateModel(model_id, rank, seed, **flags)


def execute(trainer, *operations):
    answers = trainer.execute(operations)
    assert all(answer.error is None for answer in answers), answers
    return answers


def factors_of(trainer, model_id):
    model = trainer._models[model_id]
    return {name: [factor.tolist() for factor in pair] for name, pair in model.adapter.factors.items()}


def train_by_each_loss(world, argument):
    """Return by loss: factors before, log-probabilities, loss, gradient norm, and factors after one update."""
    path, folder = argument
    trainer, found = trainer_of(world, path), {}
    for loss in LOSSES:
        execute(trainer, create(loss, rank=4, seed=3))
        execute(trainer, request(loss, "cross_entropy", seed=9))  # B = 0 would hide the gradients of A
        execute(trainer, OptimStep(loss, **{**STEP, "learning_rate": 0.02}))
        execute(trainer, SaveWeights(loss, str(folder / loss), with_optimizer=False))
        execute(trainer, LoadWeights(loss, str(folder / loss), with_optimizer=False))  # discards Adam's moments
        before = factors_of(trainer, loss)
        (scored,) = execute(trainer, request(loss, loss))
        (stepped,) = execute(trainer, OptimStep(loss, **STEP))
        logprobs = [np.frombuffer(values, np.float32).tolist() for values in scored.logprobs]
        found[loss] = [before, logprobs, scored.metrics["loss:sum"], stepped.metrics, factors_of(trainer, loss)]
    return found


FORMULAS = {
    "importance_sampling": lambda lp, q, a: -((lp - q).exp() * a),
    "ppo": lambda lp, q, a: -torch.minimum((lp - q).exp() * a, (lp - q).exp().clamp(0.8, 1.2) * a),
    "cispo": lambda lp, q, a: -((lp - q).exp().clamp(0.0, 4.0).detach() * lp * a),
    "dro": lambda lp, q, a: -(lp * a - 0.05 / 2 * (lp - q) ** 2),
}


def expected_of(path, loss, before):
    """Compute log-probabilities, loss and gradients by transformers, peft and formulas of their own."""
    base = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    config = peft.LoraConfig(r=4, lora_alpha=32, target_modules=sorted(before))
    adapted = peft.get_peft_model(base, config)
    factors = {}
    for name, (a, b) in before.items():
        layer = adapted.get_submodule(f"base_model.model.{name}")
        factors[name] = (layer.lora_A["default"].weight, layer.lora_B["default"].weight)
        factors[name][0].data, factors[name][1].data = torch.tensor(a), torch.tensor(b)
    total, found = torch.zeros(()), []
    for tokens, targets, positions, arrays in samples_of(loss):
        logits = adapted(input_ids=torch.tensor(tokens)[None]).logits[0].float()
        lp = logits.log_softmax(-1)[torch.tensor(positions), torch.tensor(targets)]
        found.append(lp.detach().numpy())
        arrays = {name: torch.tensor(values, dtype=torch.float32) for name, values in arrays.items()}
        if loss == "cross_entropy":
            total = total - (arrays["weights"] * lp).sum()
            continue
        total = total + FORMULAS[loss](lp, arrays["logprobs"], arrays["advantages"]).sum()
    total.backward()
    return found, total.item(), {name: [factor.grad for factor in pair] for name, pair in factors.items()}


@SIZES
def test_each_loss_has_the_gradient_of_torch_and_peft(size, tmp_path):
    path = make_tiny_model(tmp_path / "model", tie_word_embeddings=False, std=0.05)
    ranks = run_ranks(size, train_by_each_loss, (path, tmp_path), tmp_path)
    assert all(rank == ranks[0] for rank in ranks)
    for loss, (before, logprobs, total, stepped, after) in ranks[0].items():
        expected, value, gradients = expected_of(path, loss, before)
        for got, wanted in zip(logprobs, expected, strict=True):
            np.testing.assert_allclose(got, wanted, atol=1e-5)
        assert total == pytest.approx(value, rel=1e-5, abs=1e-5)
        norm = np.sqrt(sum(float(g.square().sum()) for pair in gradients.values() for g in pair))
        assert stepped["grad_norm"] == pytest.approx(norm, rel=1e-5)
        for name, pair in gradients.items():  # Adam's first step with beta1 = 0 is lr * sign(g)
            for old, new, gradient in zip(before[name], after[name], pair, strict=True):
                clear = gradient.abs() > 1e-5
                step = torch.tensor(old) - torch.tensor(new)
                torch.testing.assert_close(step[clear], 0.1 * gradient.sign()[clear], atol=1e-3, rtol=0)


def accumulate_in_parts(world, path):
    """Return the factors after the same samples in one call, in one call each, and beside another model."""
    trainer, found = trainer_of(world, path), []
    for number, parts in enumerate(([0, 3], [0, 1, 2, 3], [0, 3])):
        name = f"m{number}"
        execute(trainer, create(name), create("other", rank=8, seed=5))
        whole = request(name, "cross_entropy")
        for begin, end in itertools.pairwise(parts):
            part = ForwardBackward(name, whole.samples[begin:end], "cross_entropy", {}, False)
            beside = [request("other", "ppo", seed=4)] if number == 2 else []
            execute(trainer, part, *beside)
        execute(trainer, OptimStep(name, **STEP))
        found.append(factors_of(trainer, name))
    return found


@SIZES
def test_gradients_add_up_over_calls_and_ignore_other_models(size, tmp_path):
    path = make_tiny_model(tmp_path / "model")
    once, parts, beside = run_ranks(size, accumulate_in_parts, path, tmp_path)[0]
    for name, pair in once.items():
        for number, factor in enumerate(pair):
            np.testing.assert_allclose(parts[name][number], factor, atol=1e-6)
            np.testing.assert_allclose(beside[name][number], factor, atol=1e-6)


def leave_out_failed_passes(world, path):
    """Return factors of a model with and without passes that fail, of one beside it, and what the trainer said."""
    trainer, found = trainer_of(world, path), []
    bad = request("a", "importance_sampling", seed=2)
    bad.samples[1].arrays["logprobs"] = np.full(LENGTHS[1], -1e4, np.float32).tobytes()  # exp(lp - q) overflows
    only_bad = ForwardBackward("a", bad.samples[1:2], "importance_sampling", {}, False)
    for failing in (True, False):
        execute(trainer, create("a", seed=1), create("b", seed=1))
        beside = [request("b", "ppo", seed=4)]
        execute(trainer, request("a", "cross_entropy"), *beside)
        if failing:
            failed = [*trainer.execute([bad, *beside]), *trainer.execute([only_bad])]
            execute(trainer, request("a", "importance_sampling", seed=2, forward_only=True))
        else:
            execute(trainer, *beside)
        execute(trainer, request("a", "cross_entropy", seed=3))
        steps = execute(trainer, OptimStep("a", **STEP), OptimStep("b", **STEP))
        found.append([[factors_of(trainer, name) for name in "ab"], [one.metrics["failed_passes"] for one in steps]])
    trainer.execute([only_bad])
    (alone,) = execute(trainer, OptimStep("a", **STEP))
    return [found, [one.error for one in failed], alone.metrics]


@SIZES
def test_pass_without_a_finite_loss_leaves_out_its_own_gradient_alone(size, tmp_path):
    path = make_tiny_model(tmp_path / "model")
    found, errors, alone = run_ranks(size, leave_out_failed_passes, path, tmp_path)[0]
    (with_failures, counted), (without, none) = found
    assert with_failures == without
    assert (counted, none) == ([2, 0], [0, 0])
    assert "is not finite, and is left out" in errors[0]
    assert errors[1] is None
    assert "is not finite" in errors[2]
    assert (alone["skipped"], alone["failed_passes"]) == (1, 1)


def save_and_continue(world, argument):
    """Return the factors of a model, and of one that continues from its checkpoint, after two further steps."""
    path, folder = argument
    trainer = trainer_of(world, path)
    execute(trainer, create("a", seed=1))

    def train(name, seed):
        execute(trainer, request(name, "cross_entropy", seed))
        execute(trainer, OptimStep(name, **{**STEP, "beta1": 0.9, "grad_clip_norm": 1.0}))

    train("a", 0)
    execute(trainer, SaveWeights("a", str(folder), with_optimizer=True))
    execute(trainer, create("b", seed=2), create("fresh", seed=2))
    execute(trainer, LoadWeights("b", str(folder), True), LoadWeights("fresh", str(folder), False))
    for name in ("a", "b", "fresh"):
        train(name, 1)
    wrong = trainer.execute(
        [create("c", rank=2), LoadWeights("c", str(folder), True), LoadWeights("x", str(folder), True)]
    )
    gone, damaged = LoadWeights("d", str(folder / "gone"), True), folder.with_name("damaged")
    if world.is_main:
        shutil.copytree(folder, damaged)
        (damaged / "optimizer.state").write_bytes(b"x" * 99)
    torch.distributed.barrier()
    wrong += trainer.execute([create("d", load=gone), LoadWeights("a", str(damaged), True)])
    wrong += trainer.execute([request("d", "cross_entropy")])
    return [*(factors_of(trainer, name) for name in ("a", "b", "fresh")), [one.error for one in wrong]]


@SIZES
def test_model_continues_from_its_checkpoint(size, tmp_path):
    path = make_tiny_model(tmp_path / "model")
    for rank in run_ranks(size, save_and_continue, (path, tmp_path / "saved"), tmp_path):
        model, continued, fresh, errors = rank
        assert continued == model
        assert fresh != model
        assert errors[0] is None
        assert "another rank than model 'c'" in errors[1]
        assert "model 'x' does not exist" in errors[2]
        assert "gone" in errors[3]
        assert "damaged is damaged" in errors[4]
        assert "model 'd' does not exist" in errors[5]


def layers_of(trainer, model_id):
    return sorted({name.rpartition(".")[2] for name in factors_of(trainer, model_id)})


def test_create_takes_the_layers_of_its_flags_and_refuses_others(tmp_path):
    path = make_tiny_model(tmp_path / "model")
    with join_world("cpu", 60) as world:
        trainer = trainer_of(world, path)
        execute(trainer, create("head", train_attn=False, train_mlp=False))
        execute(trainer, create("mlp", train_attn=False, train_unembed=False))
        none = create("none", train_attn=False, train_mlp=False, train_unembed=False)
        refused = [answer.error for answer in trainer.execute([none, create("big", rank=9)])]
        (idle,) = execute(trainer, OptimStep("head", **STEP))
    assert layers_of(trainer, "head") == ["lm_head"]
    assert layers_of(trainer, "mlp") == ["down_proj", "gate_proj", "up_proj"]
    assert "excludes every layer" in refused[0]
    assert "larger than the server's maximum, 8" in refused[1]
    assert idle.metrics["skipped"] == 1


def test_create_flag_that_a_model_of_experts_cannot_honour_is_refused(tmp_path):
    torch.manual_seed(0)
    config = ARCHITECTURES["qwen3_moe"]()
    config.vocab_size = VOCAB_SIZE
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    with join_world("cpu", 60) as world:
        trainer = trainer_of(world, tmp_path / "model")
        (refused,) = trainer.execute([create("all")])
        execute(trainer, create("attention", train_mlp=False))
    assert "lora_config.train_mlp: the experts of this model get no adapter" in refused.error
    assert layers_of(trainer, "attention") == ["k_proj", "lm_head", "o_proj", "q_proj", "v_proj"]


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.extended)])
def test_exported_adapter_and_merged_model_have_the_trainers_logprobs(tied, tmp_path):
    path = make_tiny_model(tmp_path / "model", tie_word_embeddings=tied)
    with join_world("cpu", 60) as world:
        trainer = trainer_of(world, path)
        execute(trainer, create("a", seed=1))
        for seed in range(2):
            execute(trainer, request("a", "cross_entropy", seed))
            execute(trainer, OptimStep("a", **{**STEP, "learning_rate": 0.02}))
        saved = str(tmp_path / "out/models/s:train:0/weights/a")
        execute(trainer, SaveWeights("a", saved, with_optimizer=True, fields={"tinker": {}}))
        (scored,) = execute(trainer, request("a", "ppo", forward_only=True))
    command = ["tinker://s:train:0/weights/a", "--output-dir", str(tmp_path / "out")]
    export([*command, str(tmp_path / "adapter")])
    export([*command, str(tmp_path / "merged"), "--merge"])
    load = transformers.AutoModelForCausalLM.from_pretrained
    adapted = peft.PeftModel.from_pretrained(load(path, dtype=torch.float32), tmp_path / "adapter")
    tokens, targets, *_ = samples_of("ppo")[0]
    for model in (adapted, load(tmp_path / "merged", dtype=torch.float32)):
        logits = model(input_ids=torch.tensor(tokens)[None]).logits[0]
        got = logits.log_softmax(-1).gather(1, torch.tensor(targets)[:, None])[:, 0]
        np.testing.assert_allclose(got.detach(), np.frombuffer(scored.logprobs[0], np.float32), atol=2e-5)
    with pytest.raises(ConfigError, match="merged exists already"):
        export([*command, str(tmp_path / "merged")])
    with pytest.raises(ConfigError, match="weights/b does not exist"):
        export(["tinker://s:train:0/weights/b", str(tmp_path / "b"), *command[1:]])
