"""The nodes of a trainer share a run directory, and errors name a node that was lost."""

import os
from pathlib import Path

import pytest

from prime_rl.core.errors import ConfigError, RunError
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.storage.paths import RunPaths
from prime_rl.trainer.nodes.trainer_nodes import join_nodes
from tests.unit.trainer.world import run_world


def join(world, directories):
    """Runs on two ranks, each a node: the first then raises an error, with a silent host in its heartbeat."""
    os.environ |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    paths = RunPaths(Path(directories[world.rank]))
    heartbeat = HeartbeatWriter(paths, f"trainer_{world.rank}", "trainer")
    try:
        with join_nodes(paths, world, heartbeat):
            heartbeat.report_silent_hosts({"node7": 21.4} if world.rank == 0 else {})
            raise RunError("the step failed")
    except (ConfigError, RunError) as error:
        return [type(error).__name__, str(error), sorted(map(str, paths.root.iterdir()))]


def test_nodes_with_one_directory_start_and_errors_name_the_silent_host(tmp_path):
    shared = tmp_path / "run"
    first, second = run_world(2, join, [str(shared), str(shared)], tmp_path)
    assert first[:2] == ["RunError", "the step failed; no message from node7 for 21 s"]
    assert second[:2] == ["RunError", "the step failed"]
    assert second[2] == [], "the file of the comparison is removed"


def test_nodes_with_different_directories_raise_config_error_on_all_ranks(tmp_path):
    mine, other = tmp_path / "mine", tmp_path / "other"
    answers = run_world(2, join, [str(mine), str(other)], tmp_path)
    for kind, message, files in answers:
        assert kind == "ConfigError"
        assert f"output_dir: {other} on" in message and f"is not {mine} on" in message
        assert files == []


def use_own_directories(world, directory):
    """Runs on three ranks: two on the first node, one on the second, which has been restarted if `directory` is ''."""
    node, local = divmod(world.rank, 2)
    restarted = str(int(not directory and node))
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(local), "TORCHELASTIC_RESTART_COUNT": restarted}
    paths = RunPaths(Path(directory or ".") / f"node{node}")
    heartbeat = HeartbeatWriter(paths, f"trainer_{world.rank}", "trainer")
    try:
        with join_nodes(paths, world, heartbeat, is_shared=False) as directory:
            return [directory.num_writers, directory.is_main]
    except ConfigError as error:
        return str(error)


def test_nodes_with_own_directories_write_versions_on_the_first(tmp_path):
    assert run_world(3, use_own_directories, str(tmp_path), tmp_path) == [[2, True], [2, False], [2, True]]


def test_restart_of_nodes_with_own_directories_raises_config_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answers = run_world(3, use_own_directories, "", tmp_path)
    assert all(
        answer.startswith("nodes_share_directory = false: the trainer cannot be restarted") for answer in answers
    )


def test_directory_that_cannot_be_written_raises_config_error_with_the_host(tmp_path):
    mine, other = tmp_path / "mine", tmp_path / "other"
    mine.mkdir()
    other.touch()
    answers = run_world(2, join_only, [str(mine), str(other)], tmp_path)
    for kind, message in answers:
        assert kind == "ConfigError"
        assert message == f"output_dir: cannot create {other}: File exists (on {os.uname().nodename})"


def join_only(world, directories):
    os.environ |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    paths = RunPaths(Path(directories[world.rank]))
    with pytest.raises(ConfigError) as raised, join_nodes(paths, world, HeartbeatWriter(paths, "trainer", "trainer")):
        pass
    return [type(raised.value).__name__, str(raised.value)]
