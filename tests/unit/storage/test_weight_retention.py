"""Versions are deleted once no server, evaluation or chain of deltas needs them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.storage.artifact import WEIGHTS_FORMAT, ArtifactError, publish_artifact
from prime_rl.storage.paths import RunPaths, steps_in
from prime_rl.storage.weights.weight_retention import hold_version, removable_versions, remove_old_versions


@st.composite
def histories(draw: st.DrawFn) -> tuple[dict[int, int | None], int, set[int]]:
    """Published versions, some of them deltas against one before (which may be gone); what is sampled, and needed."""
    steps = sorted(draw(st.sets(st.integers(0, 30), max_size=12)))
    base_of = {step: draw(st.one_of(st.none(), st.integers(0, step - 1))) if step else None for step in steps}
    return base_of, draw(st.integers(0, 32)), draw(st.sets(st.integers(0, 30), max_size=4))


def read_chain(base_of: dict[int, int | None], step: int) -> list[int]:
    """What a reader of `step` opens, as far as it was there."""
    chain = []
    follow: int | None = step
    while follow is not None and follow in base_of:
        chain.append(follow)
        follow = base_of[follow]
    return chain


@given(histories())
@settings(max_examples=50)
def test_removable_versions_are_those_that_nobody_needs(history: tuple[dict[int, int | None], int, set[int]]) -> None:
    base_of, sampled, needed = history
    gone = removable_versions(base_of, sampled, needed)
    left = base_of.keys() - set(gone)
    assert gone == sorted(base_of.keys() - left)
    wanted = {step for step in base_of if step >= sampled or step in needed} | ({max(base_of)} if base_of else set())
    assert left == {part for step in wanted for part in read_chain(base_of, step)}


def publish_delta(paths: RunPaths, step: int, base: str | None) -> None:
    fields = {"format": WEIGHTS_FORMAT, "branch": 0, "step": step, "tensors": {}, "hash": f"h{step}"}
    publish_artifact(paths.weights(step), lambda _: {**fields, **({"delta": {"base": base}} if base else {})})


def test_remove_old_versions_keeps_bases_of_deltas_and_the_newest_and_removes_damaged_ones(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    for step, base in {1: None, 2: "step_1", 3: None, 4: "step_3", 5: "../step_4", 6: "step_5"}.items():
        publish_delta(paths, step, base)
    assert remove_old_versions(paths.weights_dir, 6, set()) == [1, 2]
    assert steps_in(paths.weights_dir) == [3, 4, 5, 6]
    publish_delta(paths, 7, None)
    assert remove_old_versions(paths.weights_dir, 7, {4}) == [5, 6]
    (paths.weights(4) / "manifest.json").write_text("{")
    (paths.weights(3) / "manifest.json").unlink()
    assert remove_old_versions(paths.weights_dir, 9, set()) == [3, 4]
    assert remove_old_versions(tmp_path / "nowhere", 9, set()) == []


def test_hold_version_in_another_process_prevents_removal_until_it_exits(tmp_path: Path) -> None:
    """Also if it ends by SIGKILL."""
    paths = RunPaths(tmp_path)
    for step, base in {1: None, 2: "step_1", 3: None}.items():
        publish_delta(paths, step, base)
    code = (
        "import pathlib, sys\nfrom prime_rl.storage.weights.weight_retention import hold_version\n"
        "with hold_version(pathlib.Path(sys.argv[1])):\n    print('held', flush=True)\n    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(paths.weights(2))], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert remove_old_versions(paths.weights_dir, 3, set()) == [], "nor what the held one builds upon"
        holder.kill()
    assert remove_old_versions(paths.weights_dir, 3, set()) == [1, 2]


def test_hold_version_is_shared_and_fails_for_removed_versions(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    for step in (1, 2):
        publish_delta(paths, step, None)
    with hold_version(paths.weights(1)):
        with hold_version(paths.weights(1)):
            pass
        assert remove_old_versions(paths.weights_dir, 2, set()) == []
    assert remove_old_versions(paths.weights_dir, 2, set()) == [1]
    with pytest.raises(ArtifactError, match=r"step_1/manifest\.json cannot be read"), hold_version(paths.weights(1)):
        pass


def test_remove_old_versions_removes_targets_of_links(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    memory = RunPaths(tmp_path / "memory")
    paths.weights_dir.mkdir(parents=True)
    for step in (1, 2):
        publish_delta(memory, step, f"step_{step - 1}" if step == 2 else None)
        paths.weights(step).symlink_to(memory.weights(step))
    assert remove_old_versions(paths.weights_dir, 2, set()) == []
    manifest = memory.weights(2) / "manifest.json"
    manifest.write_text(json.dumps({"format": WEIGHTS_FORMAT}))
    assert remove_old_versions(paths.weights_dir, 2, set()) == [1]
    assert not memory.weights(1).exists()
