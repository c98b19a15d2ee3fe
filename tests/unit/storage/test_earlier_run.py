"""Moving an earlier run to `earlier/`, at any moment of which the process may be killed; and removing it."""

import json
import os
from pathlib import Path

import pytest

from prime_rl.core.errors import ConfigError
from prime_rl.storage.paths import RunPaths
from prime_rl.storage.rollback import (
    find_earlier_run,
    move_earlier_run,
    remove_earlier_run,
    size_bytes,
    undo_interrupted_move,
)
from prime_rl.supervisor.doctor.collect import contains_run
from prime_rl_page.run_data.run_view import RunList

KEPT = {
    "mine.txt": "of the user",
    "code/reward_1.py": "of the new start",
    "configs/rl.toml": "of the new start",
    "configs/gsm8k.toml": "of the user",
    "configs/gsm8k/cpu.toml": "of the user",
    "logs/rl.log": "of the new start",
    "logs/slurm-7.log": "of the new start",
    "lock": "1",
    "synthesis/samples.jsonl": "training data",
}
MOVED = {
    "rollouts/step_0/manifest.json": "{}",
    "weights/step_1/model.safetensors": "w",
    "checkpoints/step_1/COMMITTED": "c",
    "metrics/trainer.jsonl": "{}",
    "samples/step_0.jsonl": "{}",
    "evals/gsm8k/step_0.jsonl": "{}",
    "abandoned/branch_0/x": "a",
    "heartbeats/trainer_0.json": "{}",
    "logs/trainer.log": "log",
    "logs/torchrun/none/attempt_0/0/stderr.log": "log",
    "configs/trainer.toml": "seed = 1",
    "run.toml": "max_steps = 1",
    "events.jsonl": json.dumps({"time": 0.0, "event": "started"}) + "\n",
}


class Killed(BaseException):
    """Stands for SIGKILL."""


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.fixture
def paths(tmp_path):
    write(tmp_path, KEPT | MOVED)
    (tmp_path / "weights/step_2").symlink_to("/dev/shm")  # weights in memory
    return RunPaths(tmp_path)


def contents(root: Path) -> dict[str, str]:
    return {path.relative_to(root).as_posix(): path.read_text() for path in root.rglob("*") if path.is_file()}


def test_move_earlier_run_takes_the_run_whole_and_leaves_other_files(paths):
    entries = find_earlier_run(paths)
    assert size_bytes(entries) >= sum(map(len, MOVED.values()))
    target = move_earlier_run(paths, entries)
    assert target.parent == paths.earlier_dir and target.name.startswith(("19700101", "19691231"))
    assert contents(target) == MOVED
    assert (target / "weights/step_2").is_symlink()
    assert {name: text for name, text in contents(paths.root).items() if not name.startswith("earlier/")} == KEPT
    assert find_earlier_run(paths) == [], "the next start moves nothing"
    assert not contains_run(paths)
    assert [run.paths.root for run in RunList([paths.earlier_dir]).read()] == [target]


def test_move_earlier_run_twice_gives_each_run_a_folder(paths):
    first = move_earlier_run(paths, find_earlier_run(paths))
    write(paths.root, MOVED)
    second = move_earlier_run(paths, find_earlier_run(paths))
    assert second.name == f"{first.name}.1"
    assert contents(first) == contents(second) == MOVED


@pytest.mark.parametrize("damaged", ["", "{}", '{"time": NaN}', '{"time": 1e30}', "[]"])
def test_move_earlier_run_with_a_damaged_first_event_is_named_after_its_oldest_entry(paths, damaged):
    paths.events.write_text(damaged)
    moved = move_earlier_run(paths, find_earlier_run(paths))
    assert moved.name[:2] == "20" and (moved / "events.jsonl").read_text() == damaged


def test_move_earlier_run_killed_at_any_rename_is_undone_by_the_next_start(paths, monkeypatch):
    before, rename, count = contents(paths.root), Path.rename, 0
    while True:
        left = count

        def rename_or_die(self, target):
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            return rename(self, target)

        monkeypatch.setattr(Path, "rename", rename_or_die)
        try:
            target = move_earlier_run(paths, find_earlier_run(paths))
        except Killed:
            monkeypatch.setattr(Path, "rename", rename)
            assert not [path for path in paths.earlier_dir.iterdir() if not path.name.startswith(".tmp-")]
            undo_interrupted_move(paths)
            assert contents(paths.root) == before
            assert (paths.root / "weights/step_2").is_symlink()
            count += 1
        else:
            break
    assert count > len(find_earlier_run(RunPaths(target))) - 3
    assert contents(target) == MOVED


def test_undo_interrupted_move_keeps_both_of_two_files_with_one_name_but_one_format(paths):
    (paths.root / paths.format.name).write_text("{}")
    staged = paths.earlier_dir / ".tmp-20260101_000000"
    (staged / "logs").mkdir(parents=True)
    (staged / paths.format.name).write_text("{}")  # the next start has written its own
    (staged / "logs/orchestrator.log").write_text("older")
    undo_interrupted_move(paths)
    assert paths.log("orchestrator").read_text() == "older"
    assert paths.format.exists() and not any(paths.earlier_dir.glob("*"))
    (staged / "logs").mkdir(parents=True)
    (staged / "logs/trainer.log").write_text("older")
    undo_interrupted_move(paths)
    assert paths.log("trainer").read_text() == "log"
    assert (paths.earlier_dir / "20260101_000000/logs/trainer.log").read_text() == "older"


def test_move_earlier_run_refuses_links_and_mount_points_and_changes_nothing(paths, tmp_path_factory, monkeypatch):
    before = contents(paths.root)

    def fail_at_weights(self, target, rename=Path.rename):
        if self.name == "weights":
            raise OSError(18, "Invalid cross-device link", str(self))
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail_at_weights)
        with pytest.raises(ConfigError, match=r"weights of an earlier run cannot be moved .*cross-device.*--clean"):
            move_earlier_run(paths, find_earlier_run(paths))
    assert contents(paths.root) == before
    disk = tmp_path_factory.mktemp("disk") / "samples"
    paths.samples_dir.rename(disk)
    paths.samples_dir.symlink_to(disk)
    with pytest.raises(ConfigError, match="samples of an earlier run is a symbolic link"):
        move_earlier_run(paths, find_earlier_run(paths))
    remove_earlier_run(find_earlier_run(paths))
    assert paths.samples_dir.is_symlink() and not os.listdir(disk)
    assert contents(paths.root) == KEPT


def test_find_earlier_run_without_a_run_is_empty(tmp_path):
    user = tmp_path / "user"
    of_the_user = ("weights/llama/model.safetensors", "samples/audio.wav", "metrics/accuracy.py", "checkpoints/best.pt")
    of_no_run = (*KEPT, "run.toml", "evals/gsm8k/3f/summary.json", "logs/eval.log")
    for file in (*(user / name for name in of_the_user), *(tmp_path / name for name in of_no_run)):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x")
    (tmp_path / "weights").mkdir()
    assert find_earlier_run(RunPaths(tmp_path)) == find_earlier_run(RunPaths(user)) == []
    (tmp_path / "mine").mkdir()
    (tmp_path / "weights/step_1").mkdir()
    found = find_earlier_run(RunPaths(tmp_path), tmp_path / "mine")
    assert {path.name for path in found} == {"weights", "mine", "run.toml", "evals", "eval.log"}


def test_find_earlier_run_in_a_git_repository_raises(paths):
    (paths.root / ".git").mkdir()
    with pytest.raises(ConfigError, match=r"is a Git repository with an earlier run.*--output-dir"):
        find_earlier_run(paths)
    assert contains_run(paths)
