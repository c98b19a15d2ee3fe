"""A checkpoint of two ranks resumes with equal losses on other numbers of ranks and layouts (I9)."""

import dataclasses
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from transformers import Qwen3MoeConfig

from prime_rl.configs.checkpoint import CkptConfig
from prime_rl.configs.trainer import FakeDataConfig, TrainerConfig
from prime_rl.configs.training.model import LoRAConfig, TrainerModelConfig
from prime_rl.configs.training.optim import AdamWConfig, MuonConfig
from prime_rl.core.errors import RunError
from prime_rl.storage.checkpoint_artifacts import find_checkpoints
from prime_rl.storage.paths import RunPaths
from prime_rl.trainer.checkpoints.checkpointer import Checkpointer
from prime_rl.trainer.checkpoints.trainer_state import model_tensors, optimizer_tensors
from prime_rl.trainer.optim.optimizers import build_optimizer
from prime_rl.trainer.parallel.device_mesh import Layout
from prime_rl.trainer.rl.batch_source import fake_batch, split_batch
from prime_rl.trainer.rl.rl_objective import build_objective
from prime_rl.trainer.train_step import TrainStep
from prime_rl.trainer.weights.policy_loading import make_policy
from tests.support.tiny_model import make_tiny_model
from tests.unit.trainer.test_parallel import make_variant
from tests.unit.trainer.world import run_world

pytestmark = pytest.mark.extended

BEFORE, AFTER = 2, 2
OPTIMIZERS = {"adamw": AdamWConfig(lr=1e-3), "muon": MuonConfig(lr=1e-3)}
NAMES = ["adamw", "muon", "adamw+lora", "adamw+experts"]
# ranks -> [(model keys, the names that are resumed so)]
LAYOUTS = {
    1: [({}, ["muon", "adamw+lora"])],
    2: [({}, NAMES)],
    4: [({"dp_replicate": 2}, ["muon", "adamw+lora"]), ({"tp": 2}, ["adamw"]), ({"ep": 2}, ["adamw+experts"])],
}


def make_config(root, name, resume=False, **more):
    optimizer, _, kind = name.partition("+")
    lora = LoRAConfig(rank=4, target_modules=["q_proj", "down_proj"]) if kind == "lora" else None
    return TrainerConfig(
        model=TrainerModelConfig(name=f"{root}/{'experts' if kind == 'experts' else 'model'}", lora=lora, **more),
        optim=OPTIMIZERS[optimizer],
        ckpt=CkptConfig(resume_step=BEFORE if resume else None, interval=1),  # the second save reuses the first plan
        output_dir=Path(root) / name,
        device="cpu",
    )


def go(world, config, first, last, save=True):
    """Train from `first` to `last`; return the losses and norms, and the state of the ranks as whole tensors."""
    world = dataclasses.replace(world, model_parallel_size=Layout.of(config.model, world.size).model_parallel_size)
    checkpoints = Checkpointer(config, RunPaths(config.output_dir), world)
    policy = make_policy(config.model, 0, world)
    optimizer = build_optimizer(config.optim, policy)
    progress = checkpoints.restore(policy, optimizer)
    assert progress.step == first
    restored = digest(policy, optimizer)
    engine = TrainStep(policy, optimizer, world, 1.0)
    objective = build_objective(config.loss, 200)
    data = FakeDataConfig(batch_size=6, seq_len=30, micro_batch_size=2, variable_length=True)
    results = []
    for step in range(first, last):
        batch = fake_batch(data, 103, row_length=80, seed=3, step=step)
        result = engine.step(split_batch(batch, step, 2, world, 100), objective, 1.0)
        results.append((result.loss, result.grad_norm))
        progress.count(10, 1)
        if save:
            checkpoints.step_done(progress, last=False)
    checkpoints.close()
    return {"results": results, "restored": restored, "end": digest(policy, optimizer), "tokens": progress.tokens}


def digest(policy, optimizer):
    """Sum and norm of every tensor: equal where the tensors are, whatever their layout."""
    found = {}
    for name, tensor in {**model_tensors(policy), **optimizer_tensors(policy, optimizer)}.items():
        whole = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).double()
        found[name] = (float(whole.sum()), float(whole.norm()), list(whole.shape))
    return found


def write(world, root):
    return {name: go(world, make_config(root, name), 0, BEFORE) for name in NAMES}


def resume(world, argument):
    copies, layouts = argument
    return [
        {name: go(world, make_config(copy, name, True, **more), BEFORE, BEFORE + AFTER, save=False) for name in names}
        for copy, (more, names) in zip(copies, layouts, strict=True)
    ]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    root = tmp_path_factory.mktemp("worlds")
    make_tiny_model(root / "model")
    # Two ranks hold one expert each; on four ranks they are cut inside.
    make_variant(root / "experts", Qwen3MoeConfig, num_experts=2, num_experts_per_tok=2, moe_intermediate_size=48)
    return root, run_world(2, write, str(root), root)[0]


@pytest.fixture(scope="module")
def resumed(written, tmp_path_factory):
    found = {}
    for size, layouts in LAYOUTS.items():
        root = tmp_path_factory.mktemp("resumed")
        copies = [str(shutil.copytree(written[0], root / str(i))) for i in range(len(layouts))]
        answers = run_world(size, resume, (copies, layouts), root)[0]
        found |= {(size, *keys): answer for (keys, _), answer in zip(layouts, answers, strict=True)}
    return found


@pytest.mark.parametrize("name", NAMES)
def test_resume_on_other_world_sizes_restores_every_tensor_and_gives_equal_losses(written, resumed, name):
    saved, expected = written[1][name]["end"], resumed[(2,)][name]["results"]
    assert len(expected) == AFTER
    # Otherwise the comparisons would show nothing.
    assert name == "muon" or all(norm > 0 for key, (_, norm, _) in saved.items() if key.endswith("exp_avg"))
    assert "lora" not in name or all("lora_" in key for key in saved), "only trained parameters are saved"
    for layout, found in resumed.items():
        if name not in found:
            continue
        restored = found[name]["restored"]
        assert restored.keys() == saved.keys(), layout
        for key, (total, norm, shape) in saved.items():
            assert restored[key][2] == shape
            assert restored[key][:2] == pytest.approx([total, norm], rel=1e-12, abs=1e-12), (layout, key)
        assert found[name]["tokens"] == 10 * (BEFORE + AFTER)
        for result, wanted in zip(found[name]["results"], expected, strict=True):
            assert result == pytest.approx(wanted, rel=1e-4, abs=1e-5), layout


def start_saving(world, root, directory, **options):
    """Restore nothing, count the first step, and return the parts of a run that saves every step."""
    config = make_config(root, "adamw").model_copy(
        update={"ckpt": CkptConfig(interval=1, **options), "output_dir": Path(root) / directory}
    )
    checkpoints = Checkpointer(config, RunPaths(config.output_dir), world)
    policy = make_policy(config.model, 0, world)
    progress = checkpoints.restore(policy, build_optimizer(config.optim, policy))
    progress.count(1, 1)
    return checkpoints, progress


def save_badly(world, root):
    """Rank 1 cannot write its shard of the second checkpoint; what every rank then says, and when, for both ways."""
    answers, write_data = [], dcp.FileSystemWriter.write_data
    for save_async in (False, True):
        checkpoints, progress = start_saving(world, root, f"bad{save_async}", save_async=save_async)
        checkpoints.step_done(progress, last=False)
        checkpoints._wait()
        if world.rank == 1:
            dcp.FileSystemWriter.write_data = no_space
        progress.count(1, 1)
        try:
            checkpoints.step_done(progress, last=False)
            while True:  # a step without a save, until the background has failed
                checkpoints._options = checkpoints._options.model_copy(update={"interval": 100})
                progress.count(1, 1)
                checkpoints.step_done(progress, last=False)
        except RunError as error:
            answers.append([str(error), progress.step])
        dcp.FileSystemWriter.write_data = write_data
    return answers


def no_space(*_):
    raise OSError(28, "No space left on device")


def test_full_disk_raises_on_every_rank_and_keeps_earlier_checkpoints(written):
    root, _ = written
    for answers in run_world(2, save_badly, str(root), root):
        for message, _step in answers:
            assert "step_2" in message and "No space left on device" in message and "GiB free" in message
            assert "\n" not in message
        assert answers[0][1] == 2, "without a background"
    for save_async in (False, True):
        found = find_checkpoints(RunPaths(root / f"bad{save_async}").checkpoints_dir)
        assert found.steps == [1]
        assert not list((root / f"bad{save_async}").rglob(".tmp-*"))


def lose_a_rank(world, argument):
    """Rank 1 is killed while it writes its shard."""
    root, save_async = argument
    checkpoints, progress = start_saving(world, root, f"lost{save_async}", save_async=save_async)
    checkpoints.step_done(progress, last=False)
    checkpoints._wait()
    if world.rank == 1:
        dcp.FileSystemWriter.write_data = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    progress.count(1, 1)
    try:
        checkpoints.step_done(progress, last=False)
        checkpoints.close()
    except RunError as error:
        return str(error)


@pytest.mark.parametrize("save_async", [False, True])
def test_death_of_rank_during_save_raises_and_keeps_earlier_checkpoint(written, save_async):
    root, _ = written
    (message,) = run_world(2, lose_a_rank, (str(root), save_async), root, timeout=100, lost=(1,))
    assert "cannot save" in message and "rank 0 lost another rank" in message and "\n" not in message
    assert find_checkpoints(RunPaths(root / f"lost{save_async}").checkpoints_dir).steps == [1]
