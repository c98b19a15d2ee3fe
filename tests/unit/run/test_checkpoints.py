"""I4 for checkpoints, without torch: what counts, what does not and why, what is deleted."""

import json
import shutil

import pytest

from prime_rl.run import checkpoints
from prime_rl.run.artifact import MANIFEST, ArtifactError
from prime_rl.run.checkpoints import COMMITTED


def write_part(checkpoint, part="trainer", content=b"weights" * 100):
    temporary = checkpoints.clear_unfinished(checkpoint, part)
    (temporary / "shard").write_bytes(content)
    (temporary / ".metadata").write_bytes(b"table")
    hashes = {name: checkpoints.hash_file(temporary / name) for name in ("shard", ".metadata")}
    checkpoints.seal_part(temporary, checkpoint / part, {"step": 1}, hashes)


def write_checkpoint(directory, step, branch=0):
    write_part(directory / f"step_{step}")
    return checkpoints.commit_checkpoint(directory / f"step_{step}", branch, ["trainer"], "digest")


@pytest.fixture
def directory(tmp_path):
    for step in (5, 10, 20):
        write_checkpoint(tmp_path, step)
    return tmp_path


def cut(checkpoint):
    (checkpoint / "trainer/shard").write_bytes(b"weights")


def empty(checkpoint):
    for file in (checkpoint / "trainer").iterdir():
        file.write_bytes(b"")


def remove_part(checkpoint):
    shutil.rmtree(checkpoint / "trainer")


def uncommit(checkpoint):
    (checkpoint / COMMITTED).unlink()


def damage_commit(checkpoint):
    (checkpoint / COMMITTED).write_text("{")


def change_manifest(checkpoint):
    manifest = json.loads((checkpoint / "trainer" / MANIFEST).read_text())
    (checkpoint / "trainer" / MANIFEST).write_text(json.dumps({**manifest, "step": 2}))


def move(checkpoint):
    checkpoint.rename(checkpoint.with_name("step_21"))


DAMAGES = {
    cut: "has 7 bytes", empty: "is not JSON", remove_part: "is missing", uncommit: "was not finished",
    damage_commit: "is damaged", change_manifest: "is damaged", move: "is of step 20",
}  # fmt: skip


@pytest.mark.parametrize(("damage", "reason"), DAMAGES.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_damaged_one_does_not_count_and_says_why(directory, damage, reason):
    damage(directory / "step_20")
    found = checkpoints.find_checkpoints(directory)
    assert found.steps == [5, 10]
    ((name, why),) = found.broken.items()
    assert name.startswith("step_2") and reason in why


def test_names_that_are_none_are_told_and_its_own_files_are_not(directory):
    (directory / "step_30.tmp").mkdir()
    (directory / ".tmp-x").mkdir()
    checkpoints.write_json(directory / checkpoints.RESUME, {"step": 5, "branch": 1})
    assert checkpoints.find_checkpoints(directory).broken == {"step_30.tmp": "is not a name of a checkpoint"}


def test_no_folder_holds_no_checkpoints(tmp_path):
    assert checkpoints.find_checkpoints(tmp_path / "none") == checkpoints.Found((), {})


def test_a_flipped_bit_is_found_by_whoever_has_the_file(directory):
    shard = directory / "step_20/trainer/shard"
    content = bytearray(shard.read_bytes())
    content[3] ^= 1
    shard.write_bytes(content)
    assert checkpoints.find_checkpoints(directory).steps == [5, 10, 20]
    checkpoints.check_hashes(directory / "step_20/trainer", 0, 2)  # .metadata
    with pytest.raises(ArtifactError, match="shard is damaged"):
        checkpoints.check_hashes(directory / "step_20/trainer", 1, 2)


def test_without_every_part_there_is_no_commit(tmp_path):
    write_part(tmp_path / "step_5")
    with pytest.raises(ArtifactError, match="orchestrator"):
        checkpoints.commit_checkpoint(tmp_path / "step_5", 0, ["trainer", "orchestrator"], "")
    assert checkpoints.find_checkpoints(tmp_path).steps == []
    write_part(tmp_path / "step_5", "orchestrator")
    checkpoints.commit_checkpoint(tmp_path / "step_5", 0, ["trainer", "orchestrator"], "")
    assert checkpoints.find_checkpoints(tmp_path).complete[0].parts.keys() == {"trainer", "orchestrator"}


def test_a_complete_one_is_never_written_again_and_an_unfinished_one_is(directory):
    with pytest.raises(ArtifactError, match="complete already"):
        checkpoints.clear_unfinished(directory / "step_20", "trainer")
    uncommit(directory / "step_20")
    write_checkpoint(directory, 20)
    assert checkpoints.find_checkpoints(directory).steps == [5, 10, 20]


@pytest.mark.parametrize(
    ("last", "interval", "kept"),
    [
        (None, None, [5, 10, 15, 20]),
        (2, None, [15, 20]),
        (1, 10, [10, 20]),
        (None, 10, [5, 10, 15, 20]),
        (9, 3, [5, 10, 15, 20]),
    ],
)
def test_what_is_kept(directory, last, interval, kept):
    write_checkpoint(directory, 15)
    assert checkpoints.prune(directory, last, interval) == kept
    assert checkpoints.find_checkpoints(directory).steps == kept


def test_only_complete_ones_are_deleted_and_an_interrupted_deletion_is_finished(directory):
    uncommit(directory / "step_5")
    (directory / "step_10").rename(directory / ".deleted-step_10")
    write_checkpoint(directory, 30)
    assert checkpoints.prune(directory, 1, None) == [30]
    assert sorted(path.name for path in directory.iterdir()) == ["step_30", "step_5"]
