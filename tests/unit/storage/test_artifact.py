"""Artifacts are complete or absent (I4), and hashes verify their contents; paths of a run."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from prime_rl.storage.artifact import ArtifactError, publish_artifact, read_manifest, visibility_timeout
from prime_rl.storage.tensor_hashes import content_hash, hash_tensors


def write_text(text):
    def write(directory):
        (directory / "a.txt").write_text(text)
        return {"format": "test/1", "step": 3}

    return write


def test_publish_artifact_records_sizes_and_is_readable_by_others(tmp_path):
    publish_artifact(tmp_path / "step_3", write_text("hello"))
    assert read_manifest(tmp_path / "step_3", "test/1") == {"format": "test/1", "step": 3, "files": {"a.txt": 5}}
    assert (tmp_path / "step_3" / "a.txt").stat().st_mode & 0o044 == 0o044


def test_publish_artifact_with_failing_writer_or_existing_target_changes_nothing(tmp_path):
    def write(directory):
        (directory / "a.txt").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        publish_artifact(tmp_path / "step_3", write)
    assert list(tmp_path.iterdir()) == []
    publish_artifact(tmp_path / "step_3", write_text("one"))
    with pytest.raises(ArtifactError, match="exists already"):
        publish_artifact(tmp_path / "step_3", write_text("two"))
    assert (tmp_path / "step_3" / "a.txt").read_text() == "one"


def test_publish_artifact_killed_while_writing_creates_no_target(tmp_path):
    """SIGKILL during the write (I4)."""
    code = (
        "import os, signal, sys; from pathlib import Path; from prime_rl.storage.artifact import publish_artifact\n"
        "def write(d):\n (d / 'a').write_text('x'); os.kill(os.getpid(), signal.SIGKILL)\n"
        "publish_artifact(Path(sys.argv[1]) / 'step_1', write)"
    )
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=dict(os.environ), timeout=60)
    assert result.returncode == -9
    assert not (tmp_path / "step_1").exists()
    assert [p.name[:4] for p in tmp_path.iterdir()] == [".tmp"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "a.txt").write_text("hell"), "has 4 bytes, its manifest says 5"),
        (lambda d: (d / "a.txt").unlink(), r"a\.txt is missing; its manifest says it has 5 bytes"),
        (lambda d: (d / "manifest.json").unlink(), "is missing"),
        (lambda d: (d / "manifest.json").write_text("{"), "is not JSON"),
        (lambda d: (d / "manifest.json").write_text(json.dumps({"format": "x"})), "expected 'test/1'"),
    ],
)
def test_read_manifest_of_damaged_artifact_names_the_damage(tmp_path, damage, message):
    publish_artifact(tmp_path / "step_3", write_text("hello"))
    damage(tmp_path / "step_3")
    with pytest.raises(ArtifactError, match=message):
        read_manifest(tmp_path / "step_3", "test/1")


def test_file_system_of_a_directory_is_that_of_the_nearest_mount(tmp_path, monkeypatch):
    mounts = [
        SimpleNamespace(mountpoint=place, fstype=kind) for place, kind in (("/", "ext4"), (str(tmp_path), "nfs4"))
    ]
    monkeypatch.setattr("psutil.disk_partitions", lambda all: mounts)
    assert visibility_timeout(tmp_path / "run" / "step_3") > 0 == visibility_timeout(tmp_path.with_name("other") / "a")


def test_content_hash_is_independent_of_files_but_not_of_bytes(tmp_path):
    tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(4, np.int32)}
    for name in ("one", "two", "three", "four"):
        (tmp_path / name).mkdir()
    save_file(tensors, tmp_path / "one" / "model.safetensors")
    for name, tensor in tensors.items():
        save_file({name: tensor}, tmp_path / "two" / f"model-{name}.safetensors")
    save_file(tensors | {"b": np.array([1, 1, 1, 2], np.int32)}, tmp_path / "three" / "model.safetensors")
    save_file(tensors | {"a": tensors["a"].reshape(3, 2)}, tmp_path / "four" / "model.safetensors")
    hashes = [content_hash(hash_tensors(tmp_path / name)) for name in ("one", "two", "three", "four")]
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3


def test_hash_tensors_of_truncated_file_names_the_file(tmp_path):
    save_file({"a": np.arange(100, dtype=np.float32)}, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-10])
    with pytest.raises(ArtifactError, match=r"model\.safetensors is truncated"):
        hash_tensors(tmp_path)
