"""A rewind puts aside what came after the checkpoint, also when it was interrupted before."""

import json

import pytest

from prime_rl.run.checkpoints import Commit, Resume, read_resume
from prime_rl.run.paths import RunPaths
from prime_rl.run.rewind import next_branch, rewind


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
def test_what_is_moved(paths, weights, rollouts):
    rewind(paths, paths.checkpoints_dir, 4, 1, weights=weights, rollouts=rollouts)
    aside = paths.abandoned(0)
    assert steps(paths.checkpoints_dir) == [2, 4] and steps(aside / "checkpoints") == [6]
    assert steps(paths.weights_dir) == ([1, 2, 3] if weights else [1, 2, 3, 4])
    assert steps(paths.rollouts_dir) == ([1, 2, 3] if rollouts else [1, 2, 3, 4, 5, 6])
    assert steps(paths.rollouts_dir) + steps(aside / "rollouts") == [1, 2, 3, 4, 5, 6]
    assert [json.loads(x)["step"] for x in paths.metrics("trainer").read_text().splitlines()] == [0, 1, 2, 3]
    assert (aside / "metrics/trainer.jsonl").read_text().splitlines() == [
        '{"step": 4}',
        '{"step": 5}',
        '{"step": 1, "lo',
    ]
    assert read_resume(paths.checkpoints_dir) == Resume(4, 1)


def test_every_resume_begins_a_branch_of_its_own(paths):
    directory, commit = paths.checkpoints_dir, Commit(2, 3, {}, "")
    assert next_branch(directory, None) == 1
    assert next_branch(directory, commit) == 4
    for branch in (4, 5):  # the second from the same checkpoint, before any new one
        assert next_branch(directory, commit) == branch
        paths.weights(5).mkdir(exist_ok=True)
        rewind(paths, directory, 2, branch, weights=True, rollouts=False)
    assert steps(paths.abandoned(4) / "weights") == [5]


def test_an_interrupted_rewind_is_finished_by_the_next(paths, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr("prime_rl.run.rewind._cut_metrics", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
        with pytest.raises(OSError, match="full"):
            rewind(paths, paths.checkpoints_dir, 4, 1, weights=True, rollouts=True)
    assert next_branch(paths.checkpoints_dir, None) == 1
    rewind(paths, paths.checkpoints_dir, 4, 1, weights=True, rollouts=True)
    assert steps(paths.abandoned(0) / "weights") == [4, 5, 6]
    assert len(paths.metrics("trainer").read_text().splitlines()) == 4


def test_versions_in_memory_are_not_kept(paths, tmp_path):
    place = tmp_path / "memory" / "step_7"
    place.mkdir(parents=True)
    paths.weights(7).symlink_to(place)
    rewind(paths, paths.checkpoints_dir, 4, 1, weights=True, rollouts=False)
    assert not place.exists() and steps(paths.weights_dir) == [1, 2, 3]
    assert steps(paths.abandoned(0) / "weights") == [4, 5, 6]
