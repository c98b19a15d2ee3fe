"""The comparison of version 0 with inference's base model before the first update (I6)."""

import math
from dataclasses import asdict

import pytest
import torch

from prime_rl.configs.trainer import FakeDataConfig
from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.core.errors import ConfigError
from prime_rl.storage.batch import write_batch
from prime_rl.storage.paths import RunPaths
from prime_rl.storage.weights.canary import PolicyCanary
from prime_rl.trainer.policy_canary import canary_row, check_base_canaries, measure_canary
from prime_rl.trainer.rl.batch_source import fake_batch
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


def test_base_canary_of_the_same_model_passes(tiny, world):
    served = served_by(tiny)
    compare(tiny, world, served, served)
    short = {**served, "logprobs": served["logprobs"][:20]}  # a server that takes 21 tokens only
    compare(tiny, world, short)
    compare(tiny, world)


@pytest.mark.parametrize("other", [0.001, math.nan])
def test_base_canary_of_another_model_is_one_line(other, tiny, world):
    served = served_by(tiny)
    served["logprobs"][30] += other
    with pytest.raises(
        ConfigError, match=r"^model\.name: version 0 of inference at here .* largest difference"
    ) as caught:
        compare(tiny, world, served_by(tiny), served)
    assert "\n" not in str(caught.value)
    if other == 0.001:
        compare(tiny, world, {**served, "dtype": "bfloat16"})  # there it is rounding
        compare(tiny, world, {**served, "tolerance": 0.01})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": [1, 1 << 20]}, "larger vocabulary"),
        ({"token_ids": None}, "malformed"),
        ({"logprobs": []}, "malf"),
    ],
)
def test_base_canary_that_cannot_be_compared_is_one_line(change, message, tiny, world):
    with pytest.raises(ConfigError, match=message):
        compare(tiny, world, {**served_by(tiny), "logprobs": [-1.0], **change})


def test_base_canary_sees_frequencies_of_another_length(world, tmp_path):
    """A trainer whose longrope is short, where the server's is long."""
    save(config("longrope", longest=2 * LONGEST), tmp_path)
    served = served_by(tmp_path, max_model_len=ORIGINAL + 1)
    compare(tmp_path, world, served, max_model_len=ORIGINAL + 1)
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(ConfigError, match=r"model\.max_model_len"):
            compare(tmp_path, world, served, max_model_len=ORIGINAL, dtype=dtype)


@pytest.mark.parametrize(("off", "code"), [(0.0, 0), (1.0, 2)])
def test_trainer_compares_version_0_before_the_first_update(off, code, tiny, tmp_path):
    served = served_by(tiny)
    served["logprobs"] = [value - off for value in served["logprobs"]]
    paths = RunPaths(tmp_path)
    batch = fake_batch(FakeDataConfig(batch_size=4, seq_len=40), 103, row_length=80, seed=5, step=0)
    manifest = {"branch": 0, "step": 0, "async_level": 2, "base_canaries": [served]}
    write_batch(paths.rollouts(0), batch, manifest)
    arguments = ["--model.name", tiny, "--output-dir", tmp_path, "--max-steps", 1, "--device", "cpu"]
    got, error = run_command("trainer", arguments)
    assert got == code, error
    assert paths.weights(1).exists() == (code == 0)
    said = [line for line in error.splitlines() if "version 0 of inference at here is not the trainer's" in line]
    assert len(said) == (code == 2) and "Traceback" not in error
