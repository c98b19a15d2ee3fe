"""The comparison of version 0 with inference's base model before the first update (I6)."""

import copy
import math
from dataclasses import asdict, replace

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from prime_rl.configs.base_model import TokenizerConfig
from prime_rl.configs.trainer import FakeDataConfig, TrainerConfig
from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.configs.training.optim import SGDConfig
from prime_rl.core.errors import ConfigError
from prime_rl.core.types import PolicyVersion
from prime_rl.storage.artifact import WEIGHTS_FORMAT, read_manifest
from prime_rl.storage.batch import write_batch
from prime_rl.storage.paths import RunPaths
from prime_rl.storage.weights.canary import PolicyCanary, canary_tokens
from prime_rl.trainer.model.policy_model import load_tokenizer
from prime_rl.trainer.optim.optimizers import build_optimizer
from prime_rl.trainer.rl.batch_source import fake_batch
from prime_rl.trainer.rl.trained_run import make_publisher
from prime_rl.trainer.weight_sync.publisher import canary_row, check_base_canaries, measure_canary
from prime_rl.trainer.weights.policy_loading import load_policy, make_policy
from tests.unit.trainer.test_policy_model import save
from tests.unit.trainer.test_rope import LONGEST, ORIGINAL, config
from tests.unit.trainer.world import run_command


def served_by(path, dtype="float32", **keys):
    """What a server of the model answers, as JSON does."""
    policy = load_policy(TrainerModelConfig(name=str(path), **keys), seed=0)
    row = canary_row(policy.vocabulary)
    answer = asdict(PolicyCanary(tuple(row.tokens.tolist()), tuple(measure_canary(policy, row)()), dtype))
    return {"token_ids": list(answer["token_ids"]), "logprobs": list(answer["logprobs"]), "dtype": dtype, "url": "here"}


def compare(path, world, *served, dtype=torch.float32, **keys):
    policy = make_policy(TrainerModelConfig(name=str(path), **keys), 0, world)
    check_base_canaries(policy, world, {"base_canaries": list(served)}, "tiny", dtype)


@pytest.fixture(scope="module")
def served(tiny):
    return served_by(tiny)


def test_base_canary_of_the_same_model_passes(tiny, world, served):
    short = {**served, "logprobs": served["logprobs"][:20]}  # a server that takes 21 tokens only
    off = {**served, "logprobs": [*served["logprobs"][:-1], served["logprobs"][-1] + 0.001]}
    compare(tiny, world, served, short, {**off, "dtype": "bfloat16"}, {**off, "tolerance": 0.01})
    compare(tiny, world)


@pytest.mark.parametrize(
    ("off", "change", "message"),
    [
        (0.001, {}, r"^model\.name: version 0 of inference at here .* largest difference"),
        (math.nan, {}, r"^model\.name: version 0 of inference at here .* largest difference"),
        (0, {"logprobs": [-1.0], "token_ids": [1, 1 << 20]}, "larger vocabulary"),
        (0, {"token_ids": None}, "malformed"),
        (0, {"logprobs": []}, "malformed"),
    ],
)
def test_base_canary_of_another_model_is_one_line(off, change, message, tiny, world, served):
    logprobs = [*served["logprobs"][:-1], served["logprobs"][-1] + off]
    with pytest.raises(ConfigError, match=message) as caught:
        compare(tiny, world, served, {**served, "logprobs": logprobs, **change})
    assert "\n" not in str(caught.value)


def test_base_canary_sees_frequencies_of_another_length(world, tmp_path):
    """A trainer whose longrope is short, where the server's is long."""
    save(config("longrope", longest=2 * LONGEST), tmp_path)
    served = served_by(tmp_path, max_model_len=ORIGINAL + 1)
    compare(tmp_path, world, served, max_model_len=ORIGINAL + 1)
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(ConfigError, match=r"model\.max_model_len"):
            compare(tmp_path, world, served, max_model_len=ORIGINAL, dtype=dtype)


def test_trainer_compares_version_0_before_the_first_update(tiny, served, tmp_path):
    served = {**served, "logprobs": [value - 1 for value in served["logprobs"]]}
    paths = RunPaths(tmp_path)
    batch = fake_batch(FakeDataConfig(batch_size=4, seq_len=40), 103, row_length=80, seed=5, step=0)
    write_batch(paths.rollouts(0), batch, {"branch": 0, "step": 0, "async_level": 2, "base_canaries": [served]})
    arguments = ["--model.name", tiny, "--output-dir", tmp_path, "--max-steps", 1, "--device", "cpu"]
    code, error = run_command("trainer", arguments)
    assert code == 2 and "Traceback" not in error
    assert "version 0 of inference at here is not the trainer's" in error.splitlines()[-1]
    assert not paths.weights(1).exists()


def test_published_canary_contains_that_of_the_base_model(tiny, world, served, tmp_path):
    config = TrainerConfig(model={"name": str(tiny)}, output_dir=tmp_path, device="cpu")
    policy = make_policy(config.model, 0, world)
    optimizer = build_optimizer(SGDConfig(lr=0.1), policy)
    publisher = make_publisher(config, policy, load_tokenizer(TokenizerConfig(), config.model), optimizer, world)
    for parameter in policy.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    publisher.publish(tmp_path / "step_1", PolicyVersion(0, 1))
    canary = read_manifest(tmp_path / "step_1", WEIGHTS_FORMAT)["canary"]
    assert canary["base_logprobs"] == pytest.approx(served["logprobs"], abs=1e-4) != canary["logprobs"]


def deep_model():
    """A random model whose rounding in bfloat16 is that of a large one, with logits of a trained one."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=40, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, initializer_range=0.06, tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    model.lm_head.weight.data *= 5
    return model.eval()


@torch.no_grad()
def score(model, dtype=torch.bfloat16):
    tokens = torch.from_numpy(canary_tokens(512))
    logprobs = copy.deepcopy(model).to(dtype)(tokens[None]).logits[0, :-1].float().log_softmax(-1)
    return tuple(logprobs.gather(1, tokens[1:, None])[:, 0].tolist())


def quantized(model):
    """Round each matrix of the blocks to fp8, by row."""
    model = copy.deepcopy(model)
    for parameter in model.model.layers.parameters():
        if parameter.dim() == 2:
            scale = parameter.data.abs().amax(1, keepdim=True) / 448
            parameter.data = (parameter.data / scale).to(torch.float8_e4m3fn).float() * scale
    return model


def trained(model, rate=0.003):
    torch.manual_seed(7)
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data += rate * torch.randn_like(parameter)
    return model


def wrong_models(base, version):
    """Weights that are not those of `version`, by the kind of mistake."""
    exchanged, shifted, head = (copy.deepcopy(version) for _ in range(3))
    layers = exchanged.model.layers
    layers[5], layers[30] = layers[30], layers[5]
    shifted.lm_head.weight.data = version.lm_head.weight.data.roll(1, 0)
    head.lm_head.weight.data = trained(base, rate=0.3).lm_head.weight.data
    return {"two layers exchanged": exchanged, "rows of the head shifted": shifted, "head of another version": head}


@pytest.mark.extended
@pytest.mark.parametrize("precision", ["bfloat16", "fp8"])
def test_canary_accepts_the_rounding_of_a_deep_model_and_refuses_wrong_weights(precision):
    served = quantized if precision == "fp8" else lambda model: model
    base = deep_model()
    ids = tuple(canary_tokens(512).tolist())
    # The trainer computes in float32 here, as another kernel that rounds less.
    mine, theirs = score(base, torch.float32), PolicyCanary(ids, score(served(base)), precision)
    compared = PolicyCanary(ids, mine, "bfloat16").compare_base(theirs)
    assert compared.passes and compared.difference > 0.05, "more than the default"
    version = trained(base)
    canary = PolicyCanary(ids, score(version, torch.float32), "bfloat16", mine)
    right = score(served(version))
    compared = canary.compare(right, "bfloat16", None, theirs)
    assert compared.passes and compared.difference > 0.05
    assert not canary.compare(right, "bfloat16").passes, "without the base model"
    assert not canary.compare(right, "bfloat16", 0.05, theirs).passes, "a configured tolerance is kept"
    for kind, wrong in wrong_models(base, version).items():
        measured = score(served(wrong))
        assert not canary.compare(measured, "bfloat16", None, theirs).passes, kind
        wrong_base = PolicyCanary(ids, measured, precision)
        assert not PolicyCanary(ids, mine, "bfloat16").compare_base(wrong_base).passes, kind
        assert not canary.compare(measured, "bfloat16", None, wrong_base).passes, f"{kind}, in the base too"


def test_canary_with_another_base_canary_uses_the_default():
    ids, near = (5, 6, 7), (-1.0, -9.0)
    canary = PolicyCanary(ids, near, "bfloat16", near)
    served = PolicyCanary(ids, (-1.1, -9.1), "bfloat16")
    assert canary.compare([-1.2, -9.2], "bfloat16", None, served).passes
    others = [
        None, replace(served, token_ids=(5, 6, 8)), replace(served, logprobs=(-3.0, -9.0)),
        replace(served, logprobs=(math.nan, -9.0)),
    ]  # fmt: skip
    for other in others:
        assert canary.compare([-1.2, -9.2], "bfloat16", None, other).tolerance == 0.05
    assert replace(canary, base_logprobs=()).compare([-1.2, -9.2], "bfloat16", None, served).tolerance == 0.05
    assert not canary.compare([-1.2, math.nan], "bfloat16", None, served).passes
