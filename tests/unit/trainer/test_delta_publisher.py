"""Deltas rebuild the full versions, on any number of ranks and after errors (I5)."""

import shutil
from pathlib import Path

import pytest
import torch

from prime_rl.configs.trainer import TrainerConfig
from prime_rl.configs.training.broadcast import FileBroadcastConfig
from prime_rl.core.errors import RunError
from prime_rl.core.types import PolicyVersion
from prime_rl.storage.artifact import WEIGHTS_FORMAT, read_manifest
from prime_rl.storage.delta.chain import chain_of, rebuild
from prime_rl.storage.paths import steps_in
from prime_rl.storage.tensor_hashes import hash_tensors
from prime_rl.trainer.weight_sync import gather_plan, transport
from tests.support.tiny_model import make_tiny_model
from tests.unit.trainer.test_publish_worlds import Training
from tests.unit.trainer.world import run_world


def deltas(interval, **options):
    return FileBroadcastConfig(delta=None if interval is None else {"full_interval": interval}, **options)


def nudge(training, seed):
    """Change some of every weight a little, the same on any number of ranks: by the whole tensors."""
    for index, parameter in enumerate(training.policy.parameters()):
        whole = parameter.detach().full_tensor() if hasattr(parameter, "full_tensor") else parameter.detach()
        noise = torch.rand(whole.shape, generator=torch.Generator().manual_seed(100 * seed + index))
        changed = torch.where(noise < 0.05, whole * 1.01, whole)
        parameter.grad = parameter.detach() - distribute(changed, parameter)
    training.optimizer.step()


def distribute(whole, like):
    if not hasattr(like, "full_tensor"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, like.device_mesh, like.placements)


def publish_steps(training, directory, count, first=1, last=None, branch=0):
    for step in range(first, first + count):
        nudge(training, step)
        training.publisher.start(directory / f"step_{step}", PolicyVersion(branch, step), step == last)
    training.publisher.close()


def made_of(directory, tmp_path):
    """The hashes of what a chain leads to."""
    *behind, full = chain_of(directory)
    target = tmp_path / "rebuilt"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    rebuild(full, behind[::-1], target)
    return hash_tensors(target), target


def kinds(directory):
    return "".join("f" if len(chain_of(directory / f"step_{step}")) == 1 else "d" for step in steps_in(directory))


def test_first_last_and_every_nth_version_is_full(tiny, world, weights, tmp_path):
    """With `weight_broadcast.directory` a base lies beside its delta, where the links lead too."""
    training = Training(tiny, world, deltas(3, directory=tmp_path / "memory"))
    publish_steps(training, weights, 6, last=6)
    assert kinds(weights) == "fddfdf"
    manifests = [read_manifest(weights / f"step_{step}", WEIGHTS_FORMAT) for step in range(1, 7)]
    assert ["delta" in manifest for manifest in manifests] == [True] * 5 + [False], "nothing follows the last one"
    assert (weights / "step_6/config.json").exists() and (weights / "step_6/tokenizer.json").exists()
    assert not (weights / "step_6").is_symlink()
    resolved = (weights / "step_3").resolve()
    assert [path.parent for path in chain_of(resolved)] == [resolved.parent] * 3
    assert made_of(resolved, tmp_path)[0] == made_of(weights / "step_3", tmp_path)[0] == manifests[2]["tensors"]


def test_rebuilt_deltas_equal_full_versions(tiny, world, weights, tmp_path, monkeypatch):
    """Bit by bit, with the canary, in two files and bfloat16; and they are small."""
    options = {"shard_bytes": 100_000, "canary": torch.float32, "dtype": torch.bfloat16}
    with monkeypatch.context() as patched:
        patched.setattr(gather_plan, "_LEAST_FILE_BYTES", 1)
        one, other = (Training(tiny, world, deltas(interval), **options) for interval in (10, None))
    publish_steps(one, weights, 3)
    publish_steps(other, tmp_path / "full", 3)
    assert (kinds(weights), kinds(tmp_path / "full")) == ("fdd", "fff")
    for step in range(1, 4):
        full = read_manifest(tmp_path / f"full/step_{step}", WEIGHTS_FORMAT)
        changes = read_manifest(weights / f"step_{step}", WEIGHTS_FORMAT)
        assert "delta" not in full, "it keeps nothing"
        assert all(changes[key] == full[key] for key in ("tensors", "hash", "canary", "step", "branch"))
        hashes, target = made_of(weights / f"step_{step}", tmp_path)
        assert hashes == full["tensors"]
        assert {path.name for path in target.iterdir()} == set(full["files"]) | {"manifest.json"}
        if step > 1:
            files = {name: size for name, size in full["files"].items() if name.startswith("model-")}
            assert len(files) > 1 and changes["files"].keys() == {f"{Path(name).stem}.delta" for name in files}
            assert sum(changes["files"].values()) < 0.15 * sum(files.values())


def publish_on_ranks(world, argument):
    """Runs on every rank: small files, so that all ranks write."""
    gather_plan._LEAST_FILE_BYTES = 1
    root = Path(argument)
    training = Training(root / "tiny", world, deltas(3), shard_bytes=30_000)
    publish_steps(training, root / f"out{world.size}", 4)
    return [file.owner for file in training.publisher._plan.files]


@pytest.mark.extended
def test_deltas_of_several_ranks_equal_those_of_one(tmp_path):
    """I9."""
    make_tiny_model(tmp_path / "tiny")
    found = []
    for size in (1, 4):
        (owners, *_) = run_world(size, publish_on_ranks, str(tmp_path), tmp_path)
        assert set(owners) == set(range(size))
        directory = tmp_path / f"out{size}"
        assert kinds(directory) == "fddf"
        found.append([made_of(directory / f"step_{step}", tmp_path)[0] for step in range(1, 5)])
    assert found[0] == found[1]
    assert all(a != b for a, b in zip(found[0], found[0][1:], strict=False))


def test_version_after_an_error_is_full(tiny, world, weights, tmp_path, monkeypatch):
    """What was kept is then part of a version that does not exist."""
    training = Training(tiny, world, deltas(10))
    publish_steps(training, weights, 2)

    def full_disk(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(transport, "encode_delta", full_disk)
        with pytest.raises(RunError, match=r"cannot publish .*step_3: No space left on device"):
            publish_steps(training, weights, 1, first=3)
    assert sorted(entry.name for entry in weights.iterdir()) == ["step_1", "step_2"]
    publish_steps(training, weights, 2, first=3)
    assert kinds(weights) == "fdfd"
    assert made_of(weights / "step_4", tmp_path)[0] == read_manifest(weights / "step_4", WEIGHTS_FORMAT)["tensors"]


def test_changed_base_in_memory_raises(tiny, world, weights):
    training = Training(tiny, world, deltas(10))
    publish_steps(training, weights, 1)
    kept = training.publisher._transport._kept["model"]
    next(iter(kept.values())).data[7] ^= 1
    with pytest.raises(RunError, match=r"cannot publish .*step_2: the copy of step_1 in memory is not what was"):
        publish_steps(training, weights, 1, first=2)
    assert steps_in(weights) == [1]


def test_delta_without_changes_is_small(tiny, world, weights, tmp_path):
    training = Training(tiny, world, deltas(10))
    for step in (1, 2):
        training.publisher.publish(weights / f"step_{step}", PolicyVersion(0, step))
    manifest = read_manifest(weights / "step_2", WEIGHTS_FORMAT)
    assert manifest["files"]["model.delta"] < 3000
    assert manifest["hash"] == manifest["delta"]["hash"]
    assert made_of(weights / "step_2", tmp_path)[0] == hash_tensors(tiny)


def test_delta_with_adapters_is_refused():
    """An adapter changes everywhere, so the two do not go together."""
    with pytest.raises(ValueError, match=r"weight_broadcast\.delta does not support adapters"):
        TrainerConfig(model={"lora": {"publish": "adapter"}}, weight_broadcast=deltas(4))
    assert TrainerConfig(model={"lora": {}}, weight_broadcast=deltas(4)).weight_broadcast.delta.full_interval == 4
