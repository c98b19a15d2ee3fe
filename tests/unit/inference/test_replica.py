"""A server's full copy of the newest version: made of what is nearest, never wrong, one at a time, and cleared up."""

import fcntl
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from prime_rl.inference import replica as module
from prime_rl.inference.reading import Cancelled, read_verified
from prime_rl.inference.replica import Replica, replica_root
from prime_rl.inference.weights import WeightsRefusedError, check_weights
from prime_rl.run.artifact import WEIGHTS_FORMAT, ArtifactError, read_manifest
from prime_rl.run.tensors import hash_tensors
from prime_rl.run.wait import DeadlineError
from prime_rl.types import PolicyVersion
from tests.support.deltas import publish_delta, publish_full

SHAPES: dict[str, tuple[int, ...]] = {"a": (40, 20), "b": (40,), "c": (3, 5)}
PATIENCE_S = 60

Tensors = dict[str, NDArray[Any]]


def _go_on() -> None:
    pass


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Steps 1 (full), 2, 3, 4 (deltas) and 5 (full, and the last)."""
    random = np.random.default_rng(0)
    tensors: list[Tensors] = [
        {name: random.standard_normal(shape).astype(np.float16) for name, shape in SHAPES.items()}
    ]
    for _ in range(4):
        new = {name: tensor.copy() for name, tensor in tensors[-1].items()}
        for tensor in new.values():
            tensor.view(np.int16)[...] += random.random(tensor.shape) < 0.3
        tensors.append(new)
    directory = tmp_path / "weights"
    publish_full(directory / "step_1", tensors[0], PolicyVersion(0, 1))
    for step in (2, 3, 4):
        publish_delta(directory / f"step_{step}", tensors[step - 2], tensors[step - 1], PolicyVersion(0, step))
    publish_full(directory / "step_5", tensors[4], PolicyVersion(0, 5))
    return directory


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What each rebuilding started from."""
    calls: list[list[str]] = []
    rebuild = module.rebuild

    def note(full: Path, deltas: list[Path], *rest: Any, **options: Any) -> None:
        calls.append([full.name if full.name.startswith("step_") else "here", *(d.name for d in deltas)])
        rebuild(full, deltas, *rest, **options)

    monkeypatch.setattr(module, "rebuild", note)
    return calls


def _hashes(directory: Path) -> Any:
    return read_manifest(directory, WEIGHTS_FORMAT)["tensors"]


def _folders(root: Path) -> list[str]:
    return sorted(entry.name for entry in root.iterdir() if entry.is_dir())


def test_follows_the_versions_and_keeps_the_newest(tmp_path: Path, weights: Path, built: list[list[str]]) -> None:
    replica = Replica(tmp_path / "here")
    for step in (1, 2, 4, 5):
        full = replica.complete(weights / f"step_{step}", _go_on)
        assert hash_tensors(full) == _hashes(weights / f"step_{step}")
        assert _folders(tmp_path / "here") == [full.name]
        assert replica.complete(weights / f"step_{step}", _go_on) == full
    assert built == [["step_1"], ["here", "step_2"], ["here", "step_3", "step_4"], ["step_5"]]


def test_a_server_that_starts_anew_takes_the_nearest_full_version(
    tmp_path: Path, weights: Path, built: list[list[str]]
) -> None:
    full = Replica(tmp_path / "here").complete(weights / "step_4", _go_on)
    assert hash_tensors(full) == _hashes(weights / "step_4")
    assert built == [["step_1", "step_2", "step_3", "step_4"]]


def test_a_base_that_is_here_need_not_be_published_any_more(
    tmp_path: Path, weights: Path, built: list[list[str]]
) -> None:
    Replica(tmp_path / "here").complete(weights / "step_3", _go_on)
    for step in (1, 2, 3):
        shutil.rmtree(weights / f"step_{step}")
    full = Replica(tmp_path / "here").complete(weights / "step_4", _go_on)  # another process
    assert hash_tensors(full) == _hashes(weights / "step_4")
    with pytest.raises(ArtifactError, match=r"step_4 is a delta of version 0\.3, which is not there"):
        Replica(tmp_path / "elsewhere").complete(weights / "step_4", _go_on)


@pytest.mark.parametrize("damaged", ["base", "target"])
def test_what_has_been_damaged_here_is_made_anew(
    tmp_path: Path, weights: Path, built: list[list[str]], damaged: str
) -> None:
    replica = Replica(tmp_path / "here")
    full = replica.complete(weights / "step_2", _go_on)
    shard = next(full.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-3] ^= 1
    shard.write_bytes(content)
    step = 3 if damaged == "base" else 2
    assert hash_tensors(replica.complete(weights / f"step_{step}", _go_on)) == _hashes(weights / f"step_{step}")
    assert built[-1] == ["step_1", "step_2", "step_3"][:step]


def test_damage_of_what_was_published_names_the_file_and_leaves_nothing(tmp_path: Path, weights: Path) -> None:
    replica = Replica(tmp_path / "here")
    before = replica.complete(weights / "step_1", _go_on)
    delta = weights / "step_2/model-00002-of-00002.delta"
    content = delta.read_bytes()
    delta.write_bytes(content[:40] + bytes([content[40] ^ 1]) + content[41:])
    with pytest.raises(ArtifactError, match=f"{delta} is damaged"):
        replica.complete(weights / "step_2", _go_on)
    assert _folders(tmp_path / "here") == [before.name], "what is sampled from is a base still"
    delta.write_bytes(content)
    replica.complete(weights / "step_2", _go_on)


def test_what_is_no_delta_is_read_where_it_is(tmp_path: Path, weights: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(weights / "step_1", model)
    (model / "manifest.json").unlink()
    assert Replica(tmp_path / "here").complete(model, _go_on) == model
    assert not (tmp_path / "here").exists()


def test_workers_of_a_node_share_the_work(tmp_path: Path, weights: Path, built: list[list[str]]) -> None:
    paths: list[Path] = []

    def work() -> None:
        paths.append(Replica(tmp_path / "here").complete(weights / "step_4", _go_on))

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(PATIENCE_S)
    assert len(paths) == 4 and len(set(paths)) == 1 and len(built) == 1


def test_reading_goes_through_it_and_ends_when_told(tmp_path: Path, weights: Path) -> None:
    replica = Replica(tmp_path / "here")
    read = dict(read_verified(weights / "step_4", _hashes(weights / "step_4"), replica=replica))
    expected = {
        name: tensor
        for file in replica.complete(weights / "step_4", _go_on).glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    assert read.keys() == expected.keys()
    assert all((read[name].numpy() == tensor).all() for name, tensor in expected.items())
    with pytest.raises(Cancelled):
        next(read_verified(weights / "step_3", None, lambda: True, replica))
    assert len(_folders(tmp_path / "here")) == 1


def _reason(directory: Path, version: PolicyVersion) -> str:
    with pytest.raises(WeightsRefusedError) as caught:
        check_weights(directory, version, SHAPES, tied=False)
    return str(caught.value)


def test_a_delta_is_checked_like_any_version(weights: Path) -> None:
    policy = check_weights(weights / "step_3", PolicyVersion(0, 3), SHAPES, tied=False)
    assert policy.tensors == _hashes(weights / "step_3")
    assert policy.canary is not None and policy.canary.dtype == "float16"
    assert "declares branch 0, step 3; asked for was branch 0, step 4" in _reason(
        weights / "step_3", PolicyVersion(0, 4)
    )


def test_a_delta_of_another_model_is_refused(weights: Path) -> None:
    with pytest.raises(WeightsRefusedError, match=r"\.delta has shape \[40, 20\], the model that is served \[40, 21\]"):
        check_weights(weights / "step_3", PolicyVersion(0, 3), SHAPES | {"a": (40, 21)}, tied=False)


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-40] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_flip, r"{} is damaged: its checksum is another"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), r"{} has \d+ bytes, its manifest says \d+"),
        (Path.unlink, r"{} is missing; its manifest says it has \d+ bytes"),
        (
            lambda file: shutil.copy(file.parents[1] / "step_2" / file.name, file),
            r"({0} has \d+ bytes|{0} leads from version 0\.1 to 0\.2; its manifest says from 0\.2 to 0\.3)",
        ),
    ],
)
def test_a_delta_that_was_altered_is_refused(weights: Path, damage: Callable[[Path], Any], reason: str) -> None:
    file = weights / "step_3/model-00002-of-00002.delta"
    damage(file)
    assert re.search(reason.format(file), _reason(weights / "step_3", PolicyVersion(0, 3)))


def test_the_folder_is_this_users_and_this_servers(tmp_path: Path, weights: Path, monkeypatch: Any) -> None:
    assert replica_root(tmp_path, 8000) != replica_root(tmp_path, 8001)
    root = replica_root(tmp_path, 8000)
    Replica(root).complete(weights / "step_1", _go_on)
    assert root.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr("os.getuid", lambda: 12345)
    with pytest.raises(ArtifactError, match="belongs to another user; set weights_cache"):
        Replica(root).complete(weights / "step_2", _go_on)


def test_another_worker_that_hangs_over_the_same_versions_is_named_at_the_deadline(
    tmp_path: Path, weights: Path
) -> None:
    replica = Replica(tmp_path / "here", timeout_s=0.2)
    replica.complete(weights / "step_3", _go_on)
    with (tmp_path / "here/lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(DeadlineError, match="which rebuilds weights from deltas"):
            replica.complete(weights / "step_4", _go_on)
