"""A rollback archives everything after the checkpoint, also after an interruption."""

import json

import pytest

from prime_rl.storage.checkpoint_artifacts import CheckpointCommit, ResumeRecord, read_resume
from prime_rl.storage.paths import RunPaths
from prime_rl.storage.rollback import archive_late_artifacts, next_branch, roll_back


@pytest.fixture
def paths(tmp_path):
    paths = RunPaths(tmp_path)
    for step in range(1, 7):
        for folder in (paths.rollouts(step), paths.weights(step)):
            folder.mkdir(parents=True)
    for step in (2, 4, 6):
        paths.checkpoint(step).mkdir(parents=True)
    paths.metrics_dir.mkdir()
    lines = "".join(json.dumps({"step": step}) + "\n" for step in range(6))
    paths.metrics("trainer").write_text(lines + '{"step": 1, "lo')
    return paths


def steps(directory):
    return sorted(int(path.name.removeprefix("step_")) for path in directory.glob("step_*"))


@pytest.mark.parametrize(("weights", "rollouts"), [(False, False), (True, True)])
def test_roll_back_archives_later_artifacts(paths, weights, rollouts):
    roll_back(paths, paths.checkpoints_dir, 4, 1, weights=weights, rollouts=rollouts)
    aside = paths.abandoned(0)
    assert steps(paths.checkpoints_dir) == [2, 4] and steps(aside / "checkpoints") == [6]
    assert steps(paths.weights_dir) == ([1, 2, 3] if weights else [1, 2, 3, 4])
    assert steps(paths.rollouts_dir) == ([1, 2, 3] if rollouts else [1, 2, 3, 4, 5, 6])
    assert steps(paths.rollouts_dir) + steps(aside / "rollouts") == [1, 2, 3, 4, 5, 6]
    assert [json.loads(x)["step"] for x in paths.metrics("trainer").read_text().splitlines()] == [0, 1, 2, 3]
    late = (aside / "metrics/trainer.jsonl").read_text().splitlines()
    assert late == ['{"step": 4}', '{"step": 5}', '{"step": 1, "lo']
    assert read_resume(paths.checkpoints_dir) == ResumeRecord(4, 1)


@pytest.mark.parametrize("late", [False, True])
def test_roll_back_archives_evaluations_of_later_versions(paths, late):
    """Their metrics are removed, so they would look like interrupted evaluations."""
    for name in ("val_a/step_2.jsonl", "val_a/step_4.jsonl", "b/step_6.jsonl", "b/0123/rollouts.jsonl"):
        (paths.evals_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (paths.evals_dir / name).touch()
    if late:
        archive_late_artifacts(paths, paths.checkpoints_dir, 4, 1)
    else:
        roll_back(paths, paths.checkpoints_dir, 4, 1, weights=True, rollouts=True)
    left = [str(file.relative_to(paths.evals_dir)) for file in paths.evals_dir.rglob("*.jsonl")]
    assert sorted(left) == ["b/0123/rollouts.jsonl", "val_a/step_2.jsonl"]
    assert (paths.abandoned(0) / "evals/val_a/step_4.jsonl").exists()
    assert (paths.abandoned(0) / "evals/b/step_6.jsonl").exists()


def test_next_branch_is_new_for_every_resume(paths):
    directory, commit = paths.checkpoints_dir, CheckpointCommit(2, 3, {}, "")
    assert next_branch(directory, None) == 1
    assert next_branch(directory, commit) == 4
    for branch in (4, 5):  # the second from the same checkpoint, before any new one
        assert next_branch(directory, commit) == branch
        paths.weights(5).mkdir(exist_ok=True)
        roll_back(paths, directory, 2, branch, weights=True, rollouts=False)
    assert steps(paths.abandoned(4) / "weights") == [5]


def test_roll_back_completes_an_interrupted_one(paths, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr("prime_rl.storage.rollback._cut_metrics", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
        with pytest.raises(OSError, match="full"):
            roll_back(paths, paths.checkpoints_dir, 4, 1, weights=True, rollouts=True)
    assert next_branch(paths.checkpoints_dir, None) == 1
    roll_back(paths, paths.checkpoints_dir, 4, 1, weights=True, rollouts=True)
    assert steps(paths.abandoned(0) / "weights") == [4, 5, 6]
    assert len(paths.metrics("trainer").read_text().splitlines()) == 4


def test_roll_back_deletes_versions_in_memory(paths, tmp_path):
    place = tmp_path / "memory" / "step_7"
    place.mkdir(parents=True)
    paths.weights(7).symlink_to(place)
    roll_back(paths, paths.checkpoints_dir, 4, 1, weights=True, rollouts=False)
    assert not place.exists() and steps(paths.weights_dir) == [1, 2, 3]
    assert steps(paths.abandoned(0) / "weights") == [4, 5, 6]
