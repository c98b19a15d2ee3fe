"""Completeness of checkpoints (I4), and deletion of old ones."""

import json
import shutil

import pytest

from prime_rl.core.errors import ConfigError
from prime_rl.storage import checkpoint_artifacts
from prime_rl.storage.artifact import MANIFEST, ArtifactError
from prime_rl.storage.checkpoint_artifacts import COMMITTED


def write_part(checkpoint, part="trainer", content=b"weights" * 100):
    temporary = checkpoint_artifacts.prepare_part(checkpoint, part)
    (temporary / "shard").write_bytes(content)
    (temporary / ".metadata").write_bytes(b"table")
    hashes = {name: checkpoint_artifacts.hash_file(temporary / name) for name in ("shard", ".metadata")}
    checkpoint_artifacts.seal_part(temporary, checkpoint / part, {"step": 1}, hashes)


def write_checkpoint(directory, step, branch=0):
    write_part(directory / f"step_{step}")
    return checkpoint_artifacts.commit_checkpoint(directory / f"step_{step}", branch, ["trainer"], "digest")


@pytest.fixture
def directory(tmp_path):
    for step in (5, 10, 20):
        write_checkpoint(tmp_path, step)
    return tmp_path


def uncommit(checkpoint):
    (checkpoint / COMMITTED).unlink()


def change_manifest(checkpoint):
    manifest = json.loads((checkpoint / "trainer" / MANIFEST).read_text())
    (checkpoint / "trainer" / MANIFEST).write_text(json.dumps({**manifest, "step": 2}))


DAMAGES = {
    "has 7 bytes": lambda checkpoint: (checkpoint / "trainer/shard").write_bytes(b"weights"),
    "is not JSON": lambda checkpoint: [file.write_bytes(b"") for file in (checkpoint / "trainer").iterdir()],
    "is missing": lambda checkpoint: shutil.rmtree(checkpoint / "trainer"),
    "was not finished": uncommit,
    "is damaged": lambda checkpoint: (checkpoint / COMMITTED).write_text("{"),
    "its hash differs from COMMITTED": change_manifest,
    "belongs to step 20": lambda checkpoint: checkpoint.rename(checkpoint.with_name("step_21")),
}


@pytest.mark.parametrize("reason", DAMAGES)
def test_find_checkpoints_reports_the_reason_for_a_damaged_one(directory, reason):
    DAMAGES[reason](directory / "step_20")
    found = checkpoint_artifacts.find_checkpoints(directory)
    assert found.steps == [5, 10]
    ((name, why),) = found.broken.items()
    assert name.startswith("step_2") and reason in why


def test_find_checkpoints_refuses_one_of_a_newer_release(directory):
    """Left out, the run would resume at step 10."""
    file = directory / "step_20/trainer" / MANIFEST
    file.write_text(file.read_text().replace("prime_rl.checkpoint/1", "prime_rl.checkpoint/2"))
    with pytest.raises(ConfigError, match=r"checkpoint/2, and this release of prime-rl reads .*checkpoint/1; update"):
        checkpoint_artifacts.find_checkpoints(directory)


def test_find_checkpoints_reports_unknown_names_but_not_its_own_files(directory):
    (directory / "step_30.tmp").mkdir()
    (directory / ".tmp-x").mkdir()
    checkpoint_artifacts.write_json(directory / checkpoint_artifacts.RESUME, {"step": 5, "branch": 1})
    assert checkpoint_artifacts.find_checkpoints(directory).broken == {"step_30.tmp": "is not named step_N"}
    assert checkpoint_artifacts.find_checkpoints(directory / "none") == checkpoint_artifacts.CheckpointListing((), {})


def test_check_hashes_finds_a_flipped_bit_on_the_rank_of_the_file(directory):
    shard = directory / "step_20/trainer/shard"
    content = bytearray(shard.read_bytes())
    content[3] ^= 1
    shard.write_bytes(content)
    assert checkpoint_artifacts.find_checkpoints(directory).steps == [5, 10, 20]
    checkpoint_artifacts.check_hashes(directory / "step_20/trainer", 0, 2)  # .metadata
    with pytest.raises(ArtifactError, match="shard is damaged"):
        checkpoint_artifacts.check_hashes(directory / "step_20/trainer", 1, 2)


def test_commit_checkpoint_with_missing_part_raises(tmp_path):
    write_part(tmp_path / "step_5")
    with pytest.raises(ArtifactError, match="orchestrator"):
        checkpoint_artifacts.commit_checkpoint(tmp_path / "step_5", 0, ["trainer", "orchestrator"], "")
    assert checkpoint_artifacts.find_checkpoints(tmp_path).steps == []
    write_part(tmp_path / "step_5", "orchestrator")
    checkpoint_artifacts.commit_checkpoint(tmp_path / "step_5", 0, ["trainer", "orchestrator"], "")
    assert checkpoint_artifacts.find_checkpoints(tmp_path).complete[0].parts.keys() == {"trainer", "orchestrator"}


def test_prepare_part_replaces_only_uncommitted_parts(directory):
    with pytest.raises(ArtifactError, match="complete already"):
        checkpoint_artifacts.prepare_part(directory / "step_20", "trainer")
    uncommit(directory / "step_20")
    write_checkpoint(directory, 20)
    assert checkpoint_artifacts.find_checkpoints(directory).steps == [5, 10, 20]


@pytest.mark.parametrize(
    ("last", "interval", "kept"),
    [(None, None, [5, 10, 15, 20]), (2, None, [15, 20]), (1, 10, [10, 20]), (None, 10, [5, 10, 15, 20]),
     (9, 3, [5, 10, 15, 20])],
)  # fmt: skip
def test_remove_old_checkpoints_keeps_last_and_interval(directory, last, interval, kept):
    write_checkpoint(directory, 15)
    assert checkpoint_artifacts.remove_old_checkpoints(directory, last, interval) == kept
    assert checkpoint_artifacts.find_checkpoints(directory).steps == kept


def test_remove_old_checkpoints_completes_an_interrupted_deletion(directory):
    uncommit(directory / "step_5")
    (directory / "step_10").rename(directory / ".deleted-step_10")
    write_checkpoint(directory, 30)
    assert checkpoint_artifacts.remove_old_checkpoints(directory, 1, None) == [30]
    assert sorted(path.name for path in directory.iterdir()) == ["step_30", "step_5"]
