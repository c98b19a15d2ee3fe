"""A version published as deltas is rebuilt exactly, or one error names the file (I5)."""

import json
import shutil

import numpy as np
import pytest

from prime_rl.core.errors import RunError
from prime_rl.core.types import PolicyVersion
from prime_rl.entrypoints.delivery.policy_export import export_policy
from prime_rl.storage.artifact import MANIFEST, WEIGHTS_FORMAT, ArtifactError, read_manifest
from prime_rl.storage.delta.chain import chain_of, is_intact, read_entries, rebuild
from prime_rl.storage.delta.container import DeltaError
from prime_rl.storage.tensor_hashes import hash_tensors
from tests.support.deltas import publish_delta, publish_full, raw_tensors

FILES = ("model-00001-of-00002", "model-00002-of-00002")


def drawn(seed):
    random = np.random.default_rng(seed)
    return {name: random.standard_normal((50, 20), np.float32) for name in ("a", "b", "c")}


def stepped(tensors, seed):
    random = np.random.default_rng(seed)
    new = {name: tensor.copy() for name, tensor in tensors.items()}
    for tensor in new.values():
        tensor.view(np.int32)[...] += random.random(tensor.shape) < 0.05
    return new


@pytest.fixture
def versions(tmp_path):
    """Step 4 in full, 5 to 7 as deltas; all of step 7's tensors are other bits than step 4's."""
    tensors = [drawn(0)]
    for seed in (1, 2, 3):
        tensors.append(stepped(tensors[-1], seed))
    weights = tmp_path / "weights"
    publish_full(weights / "step_4", tensors[0], PolicyVersion(0, 4))
    for step in (5, 6, 7):
        publish_delta(weights / f"step_{step}", tensors[step - 5], tensors[step - 4], PolicyVersion(0, step))
    return weights, tensors


def rebuilt(tmp_path, full, deltas, **options):
    target = tmp_path / "rebuilt"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    rebuild(full, deltas, target, **options)
    return target


@pytest.mark.parametrize(("count", "threads"), [(0, 1), (1, 1), (3, 2)])
def test_rebuild_of_a_chain_is_exact(tmp_path, versions, count, threads):
    weights, tensors = versions
    chain = chain_of(weights / f"step_{4 + count}")
    assert [path.name for path in chain] == [f"step_{4 + i}" for i in range(count, -1, -1)]
    *deltas, full = chain
    target = rebuilt(tmp_path, full, deltas[::-1], threads=threads)
    assert hash_tensors(target) == {name: t.digest(name) for name, t in raw_tensors(tensors[count]).items()}
    manifest, published = read_manifest(target, WEIGHTS_FORMAT), read_manifest(chain[0], WEIGHTS_FORMAT)
    assert manifest["hash"] == published["hash"] and manifest["step"] == 4 + count and "delta" not in manifest
    assert manifest["canary"] == published["canary"]
    assert (target / "config.json").read_text() == "{}", "what belongs to the weights comes from the full version"
    assert is_intact(target)
    if count == 1:  # from a rebuilt version
        again = tmp_path / "again"
        again.mkdir()
        rebuild(target, [weights / "step_6", weights / "step_7"], again)
        assert hash_tensors(again) == {name: t.digest(name) for name, t in raw_tensors(tensors[3]).items()}


def flip(path):
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


def test_rebuild_with_damaged_file_names_it(tmp_path, versions):
    weights, _ = versions
    delta, shard = weights / f"step_6/{FILES[1]}.delta", weights / f"step_4/{FILES[1]}.safetensors"
    deltas = [weights / f"step_{step}" for step in (5, 6, 7)]
    for file, reason in ((delta, "is damaged: the checksum"), (shard, "is not what was published: tensor . has")):
        whole = file.read_bytes()
        flip(file)
        with pytest.raises(ArtifactError, match=f"{file} {reason}"):
            rebuilt(tmp_path, weights / "step_4", deltas)
        file.write_bytes(whole[:-1])
        with pytest.raises(ArtifactError, match=rf"{file} has \d+ bytes, its manifest says \d+"):
            rebuilt(tmp_path, weights / "step_4", deltas)
        file.write_bytes(whole)
    rebuilt(tmp_path, weights / "step_4", deltas)


def test_rebuild_with_missing_or_wrong_link_raises(tmp_path, versions):
    weights, tensors = versions
    with pytest.raises(DeltaError, match=r"step_6/.*delta does not match the base: tensor a has hash"):
        rebuilt(tmp_path, weights / "step_4", [weights / "step_6"])
    shutil.rmtree(weights / "step_5")
    with pytest.raises(ArtifactError, match=r"step_6 is a delta of version 0\.5, which is missing: .*step_5"):
        chain_of(weights / "step_7")
    publish_full(weights / "step_5", tensors[3], PolicyVersion(0, 5))
    with pytest.raises(ArtifactError, match=r"step_6 is a delta of version 0\.5 with content hash .*; .*step_5 is"):
        chain_of(weights / "step_7")


def rewrite(directory, **fields):
    manifest = json.loads((directory / MANIFEST).read_text())
    (directory / MANIFEST).write_text(json.dumps(manifest | fields))


@pytest.mark.parametrize(
    ("link", "reason"),
    [
        ("step_5", "TypeError"),
        ({"base": "step_5"}, "KeyError: 'branch'"),
        ({"base": "../step_5", "branch": 0, "step": 5, "hash": ""}, "is not named step_N"),
        ({"base": "step_6", "branch": 0, "step": 6, "hash": ""}, "base 0.6 is not older"),
        ({"base": "step_9", "branch": 1, "step": 5, "hash": ""}, "base 1.5 is not older"),
    ],
)
def test_base_of_malformed_manifest_raises(versions, link, reason):
    directory = versions[0] / "step_6"
    rewrite(directory, delta=link)
    with pytest.raises(ArtifactError, match=f"{MANIFEST} is malformed: delta: .*{reason}"):
        chain_of(directory)


def test_read_entries_of_files_that_differ_from_the_manifest_raises(tmp_path, versions):
    weights, _ = versions
    directory, manifest = weights / "step_6", read_manifest(weights / "step_6", WEIGHTS_FORMAT)

    def refused(reason, **fields):
        with pytest.raises(ArtifactError, match=reason):
            read_entries(directory, {**manifest, **fields})

    refused(r"step_6/manifest\.json lists no tensors", tensors=None)
    refused(r"step_6/manifest\.json lists no \.delta file", files={})
    refused(r"is not what was published: tensor a has another hash", tensors={**manifest["tensors"], "a": "0" * 32})
    refused(r"leads from version 0\.5 to 0\.6; its manifest says from 0\.5 to 0\.8", step=8)
    refused(r"its base has another content hash", delta={**manifest["delta"], "hash": "0" * 32})
    for file in directory.glob(f"{FILES[1]}*"):
        file.unlink()
    rewrite(directory, files={name: size for name, size in manifest["files"].items() if FILES[1] not in name})
    with pytest.raises(ArtifactError, match=r"step_6 does not have one \.delta file per \.safetensors file of"):
        rebuilt(tmp_path, weights / "step_4", [weights / "step_5", directory])


def test_export_of_a_delta_is_a_full_model(tmp_path, versions):
    export_policy(versions[0] / "step_7", tmp_path / "model")
    assert hash_tensors(tmp_path / "model") == read_manifest(versions[0] / "step_7", WEIGHTS_FORMAT)["tensors"]
    flip(versions[0] / f"step_5/{FILES[0]}.delta")
    with pytest.raises(RunError, match="is damaged"):
        export_policy(versions[0] / "step_7", tmp_path / "other")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model", "weights"]


def test_rebuild_stops_when_check_raises(tmp_path, versions):
    def stop():
        raise InterruptedError

    with pytest.raises(InterruptedError):
        rebuilt(tmp_path, versions[0] / "step_4", [versions[0] / "step_5"], check=stop)
