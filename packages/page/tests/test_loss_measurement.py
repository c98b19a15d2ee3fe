"""The loss around the versions of a run."""

import numpy as np
import pytest
import torch
import transformers
from tests.support.tiny_model import make_tiny_model, publish_weights

from prime_rl.configs.checkpoint import CkptConfig
from prime_rl.configs.loading.base_config import write_config
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.trainer import FakeDataConfig, TrainerConfig
from prime_rl.configs.training.loss import AIPOLossConfig
from prime_rl.configs.training.model import CompileConfig, TrainerModelConfig
from prime_rl.core.errors import ConfigError
from prime_rl.storage.batch import write_batch
from prime_rl.storage.paths import RunPaths
from prime_rl.trainer.checkpoints.checkpointer import Checkpointer
from prime_rl.trainer.optim.optimizers import build_optimizer
from prime_rl.trainer.parallel.process_group import join_world
from prime_rl.trainer.rl.batch_source import fake_batch
from prime_rl.trainer.weights.policy_loading import load_policy
from prime_rl_page import loss_measurement as module
from prime_rl_page.loss_measurement import WeightPlane, batch_loss, measure_loss_surface

VOCABULARY = 103


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run directory with versions 1 to 3, each with weights of its own, and the rows of batch 2."""
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "out"
    for step in (1, 2, 3):
        publish_weights(root, make_tiny_model(tmp_path / f"model_{step}", seed=step), step)
    arguments = ["--model.name", str(tmp_path / "model_1"), "--output-dir", str(root), "--model.seq-len", "80"]
    config = TrainerConfig.load([*arguments, "--model.dtype", "float32"])
    write_config(config, RunPaths(root).config("trainer"))
    fake = FakeDataConfig(batch_size=6, seq_len=40, micro_batch_size=2, variable_length=True)
    batch = fake_batch(fake, VOCABULARY, row_length=80, seed=5, step=2)
    write_batch(RunPaths(root).rollouts(2), batch, {"branch": 0, "step": 2, "async_level": 2})
    return RunPaths(root), config, batch


def parameters(policy):
    return {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}


def load(config, paths, step):
    return load_policy(config.model.model_copy(update={"name": str(paths.weights(step))}), 0)


def test_weight_plane_contains_three_versions_exactly(run):
    paths, config, _ = run
    policies = [load(config, paths, step) for step in (1, 2, 3)]
    versions = [parameters(policy) for policy in policies]
    plane = WeightPlane(versions)
    np.testing.assert_allclose(plane.coordinates[-1], 0, atol=1e-6)
    distance = sum(((versions[0][name] - versions[1][name]) ** 2).sum().item() for name in versions[0]) ** 0.5
    assert np.linalg.norm(plane.coordinates[0] - plane.coordinates[1]) == pytest.approx(distance, rel=1e-4)
    for version, (x, y) in zip(versions, plane.coordinates, strict=True):
        plane.apply(policies[0], float(x), float(y))
        for name, value in parameters(policies[0]).items():
            torch.testing.assert_close(value, version[name], atol=1e-4, rtol=1e-4)


def test_version_has_the_frequencies_of_the_run(tmp_path):
    """Longrope chooses its factors by max_model_len, not by the length of the rows."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0], "rope_type": "longrope"}
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "pad_token_id": 0}
    config = transformers.Phi3Config(
        **shape, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        original_max_position_embeddings=16,
        rope_parameters={**factors, "rope_theta": 1e4, "original_max_position_embeddings": 16},
    )  # fmt: skip
    transformers.Phi3ForCausalLM(config).save_pretrained(tmp_path)
    keys = TrainerModelConfig(name=str(tmp_path), seq_len=16, max_model_len=64, tp=2, compile=CompileConfig())
    frequencies = [
        next(part.inv_freq for part in policy.modules() if hasattr(part, "rope_type"))
        for policy in (
            module._load(keys, tmp_path, 0),
            load_policy(TrainerModelConfig(name=str(tmp_path), seq_len=16, max_model_len=64), 0),
            load_policy(TrainerModelConfig(name=str(tmp_path), seq_len=16, max_model_len=16), 0),
        )
    ]
    assert torch.equal(frequencies[0], frequencies[1]) and not torch.equal(frequencies[0], frequencies[2])


def test_loss_surface_of_a_run_has_the_losses_of_its_points(run, monkeypatch):
    monkeypatch.setattr(module, "GRID_SIZE", 3)
    paths, config, batch = run
    found = measure_loss_surface(paths)
    assert [step for step, _, _ in found.path] == [1, 2, 3]
    assert found.path[-1][1:] == pytest.approx((0, 0), abs=1e-6)
    assert min(found.x) < min(x for _, x, _ in found.path) and max(found.y) > max(y for _, _, y in found.path)
    with join_world("cpu", 30) as world:
        loss = batch_loss(AIPOLossConfig(), 80, batch, 2, world)
        policies = [load(config, paths, step) for step in (1, 2, 3)]
        plane = WeightPlane([parameters(policy) for policy in policies])
        at_version_1 = loss(policies[0])
        plane.apply(policies[1], float(plane.coordinates[0][0]), float(plane.coordinates[0][1]))
        assert loss(policies[1]) == pytest.approx(at_version_1, rel=1e-3)
        plane.apply(policies[2], found.x[2], found.y[0])
        assert loss(policies[2]) == pytest.approx(found.losses[0][2], rel=1e-4)
    assert len({round(value, 6) for row in found.losses for value in row}) > 3


def test_loss_surface_without_its_inputs_is_one_line(run, tmp_path):
    paths, _, _ = run
    with pytest.raises(ConfigError, match="started by `rl`"):
        measure_loss_surface(RunPaths(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"no rows of batch 7; kept are: 2 .*keep-batches"):
        measure_loss_surface(paths, 7)
    same = [parameters(load(TrainerConfig.load(["@", str(paths.config("trainer"))]), paths, 1))] * 3
    with pytest.raises(ConfigError, match="do not span a plane"):
        WeightPlane(same)
    for step in (1, 2):
        (paths.weights(step) / "manifest.json").unlink(missing_ok=True)
        paths.weights(step).rename(tmp_path / f"gone_{step}")
    with pytest.raises(ConfigError, match=r"holds 1 versions in .*--ckpt"):
        measure_loss_surface(paths)
    assert RLConfig.load([]).trainer.keep_batches is False


def test_loss_surface_reads_versions_that_the_run_deleted_from_its_checkpoints(run, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "GRID_SIZE", 2)
    paths, config, _ = run
    expected = measure_loss_surface(paths)
    empty = RunPaths(tmp_path / "empty")  # the checkpointer refuses a directory with weights
    with join_world("cpu", 30) as world:
        saving = config.model_copy(update={"ckpt": CkptConfig(interval=1), "output_dir": empty.root})
        checkpoints = Checkpointer(saving, empty, world)
        for step in (1, 2):
            policy = load(config, paths, step)
            optimizer = build_optimizer(config.optim, policy)
            progress = checkpoints.restore(policy, optimizer)
            progress.step = step
            checkpoints.step_done(progress, last=False)
        checkpoints.close()
    empty.checkpoints_dir.rename(paths.checkpoints_dir)
    for step in (1, 2):
        paths.weights(step).rename(tmp_path / f"gone_{step}")
    found = measure_loss_surface(paths)
    assert [step for step, _, _ in found.path] == [1, 2, 3]
    np.testing.assert_allclose(np.abs(found.path), np.abs(expected.path), atol=1e-4)
