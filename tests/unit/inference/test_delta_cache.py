"""A server's full copy of the newest version: built from the nearest version, verified, and deleted in time."""

import fcntl
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from prime_rl.core.types import PolicyVersion
from prime_rl.inference.policy import delta_cache as module
from prime_rl.inference.policy.delta_cache import DeltaCache, cache_root
from prime_rl.inference.policy.weight_checks import WeightsRefusedError, check_weights
from prime_rl.storage.artifact import WEIGHTS_FORMAT, ArtifactError, read_manifest
from prime_rl.storage.tensor_hashes import hash_tensors
from prime_rl.storage.wait_for import DeadlineError
from tests.support.deltas import publish_delta, publish_full

SHAPES: dict[str, tuple[int, ...]] = {"a": (40, 20), "b": (40,), "c": (3, 5)}
TIMEOUT_SECONDS = 60

Tensors = dict[str, NDArray[Any]]


def _no_check() -> None:
    pass


@pytest.fixture
def weights(tmp_path):
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
def built(monkeypatch):
    """The base and deltas of each rebuild."""
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


def test_complete_keeps_only_the_newest_version(tmp_path, weights, built):
    (tmp_path / "here/thesis").mkdir(parents=True)
    cache = DeltaCache(tmp_path / "here")
    for step in (1, 2, 4, 5):
        full = cache.complete(weights / f"step_{step}", _no_check)
        assert hash_tensors(full) == _hashes(weights / f"step_{step}")
        assert _folders(tmp_path / "here") == [full.name, "thesis"]
        assert cache.complete(weights / f"step_{step}", _no_check) == full
    assert built == [["step_1"], ["here", "step_2"], ["here", "step_3", "step_4"], ["step_5"]]


@pytest.mark.parametrize("damaged", ["base", "target"])
def test_complete_rebuilds_a_damaged_cached_version(tmp_path, weights, built, damaged):
    cache = DeltaCache(tmp_path / "here")
    full = cache.complete(weights / "step_2", _no_check)
    shard = next(full.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-3] ^= 1
    shard.write_bytes(content)
    step = 3 if damaged == "base" else 2
    assert hash_tensors(cache.complete(weights / f"step_{step}", _no_check)) == _hashes(weights / f"step_{step}")
    assert built[-1] == ["step_1", "step_2", "step_3"][:step]


def test_complete_of_a_damaged_delta_names_the_file(tmp_path, weights):
    cache = DeltaCache(tmp_path / "here")
    before = cache.complete(weights / "step_1", _no_check)
    delta = weights / "step_2/model-00002-of-00002.delta"
    content = delta.read_bytes()
    delta.write_bytes(content[:40] + bytes([content[40] ^ 1]) + content[41:])
    with pytest.raises(ArtifactError, match=f"{delta} is damaged"):
        cache.complete(weights / "step_2", _no_check)
    assert _folders(tmp_path / "here") == [before.name], "the loaded version stays the base"
    delta.write_bytes(content)
    cache.complete(weights / "step_2", _no_check)


def test_complete_by_several_workers_builds_once(tmp_path, weights, built):
    paths: list[Path] = []

    def work() -> None:
        paths.append(DeltaCache(tmp_path / "here").complete(weights / "step_4", _no_check))

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(TIMEOUT_SECONDS)
    assert len(paths) == 4 and len(set(paths)) == 1
    assert built == [["step_1", "step_2", "step_3", "step_4"]], "from the nearest full version"


def test_complete_hashes_a_version_once_for_all_workers(tmp_path, weights, monkeypatch):
    """Otherwise further workers of a large model would wait minutes for each other."""
    hashed: list[Path] = []
    sound = module.is_intact
    monkeypatch.setattr(module, "is_intact", lambda path: hashed.append(path) or sound(path))
    full = DeltaCache(tmp_path / "here").complete(weights / "step_2", _no_check)
    hashed.clear()
    for _ in range(7):
        assert DeltaCache(tmp_path / "here").complete(weights / "step_2", _no_check) == full
    assert hashed == []
    module._marker(full).unlink()  # like after the end of the server that made it
    for _ in range(3):
        DeltaCache(tmp_path / "here").complete(weights / "step_2", _no_check)
    assert hashed == [full]
    DeltaCache(tmp_path / "here").complete(weights / "step_3", _no_check)
    assert len(list((tmp_path / "here").glob("*.checked"))) == 1


@pytest.mark.parametrize("name", ["../../victim", "/etc", "", "0" * 32 + "/.."])
def test_complete_with_a_path_as_hash_raises(tmp_path, weights, name):
    (tmp_path / "victim").mkdir()
    file = weights / "step_2/manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"hash": name}))
    with pytest.raises(ArtifactError, match=r"manifest\.json is malformed: its hash is"):
        DeltaCache(tmp_path / "a/here").complete(weights / "step_2", _no_check)
    assert (tmp_path / "victim").is_dir()


def test_complete_while_another_worker_hangs_raises_at_the_deadline(tmp_path, weights):
    cache = DeltaCache(tmp_path / "here", timeout_seconds=0.2)
    cache.complete(weights / "step_3", _no_check)
    with (tmp_path / "here/lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(DeadlineError, match="which rebuilds weights from deltas"):
            cache.complete(weights / "step_4", _no_check)


def test_check_weights_of_a_delta_checks_its_files_and_the_resulting_tensors(weights):
    version, directory = PolicyVersion(0, 3), weights / "step_3"
    policy = check_weights(directory, version, SHAPES, tied=False)
    assert policy.tensors == _hashes(directory)
    assert policy.canary is not None and policy.canary.dtype == "float16"
    with pytest.raises(WeightsRefusedError, match=r"\.delta has shape \[40, 20\], the served model has \[40, 21\]"):
        check_weights(directory, version, SHAPES | {"a": (40, 21)}, tied=False)
    file = directory / "model-00002-of-00002.delta"
    content = bytearray(file.read_bytes())
    content[-40] ^= 1
    file.write_bytes(content)
    with pytest.raises(WeightsRefusedError, match=f"{file} is damaged: the checksum does not match"):
        check_weights(directory, version, SHAPES, tied=False)


def test_cache_root_differs_by_user_and_server(tmp_path, weights, monkeypatch):
    assert cache_root(tmp_path, 8000) != cache_root(tmp_path, 8001)
    root = cache_root(tmp_path, 8000)
    DeltaCache(root).complete(weights / "step_1", _no_check)
    assert root.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr("os.getuid", lambda: 12345)
    with pytest.raises(ArtifactError, match="belongs to another user; set weights_cache"):
        DeltaCache(root).complete(weights / "step_2", _no_check)


def _link(root: Path) -> None:
    root.symlink_to(root.with_name("home"))


def _link_lock(root: Path) -> None:
    root.mkdir(0o700)
    (root / "lock").symlink_to(root.with_name("home") / "thesis")


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (_link, "here is not a directory; remove it"),
        (_link_lock, "symbolic links"),
        (lambda root: root.mkdir() or root.chmod(0o770), "other users may write to .*; run chmod 700"),
        (lambda root: root.mkdir() or root.chmod(0o707), "other users may write to .*; run chmod 700"),
    ],
)
def test_complete_in_an_unsafe_directory_raises_and_changes_nothing(tmp_path, weights, prepare, reason):
    (tmp_path / "home").mkdir()
    (tmp_path / "home/thesis").write_text("text")
    prepare(tmp_path / "here")
    with pytest.raises((ArtifactError, OSError), match=reason):
        DeltaCache(tmp_path / "here").complete(weights / "step_1", _no_check)
    assert [path.read_text() for path in (tmp_path / "home").iterdir()] == ["text"]
