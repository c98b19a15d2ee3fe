"""Steps are read from the run directory once, in order, and only those of this run."""

import json
import os

import pytest

from prime_rl.api.steps import StepReader
from prime_rl.core.errors import RunError
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.storage.paths import RunPaths


def write(paths, steps, mode="a", reward=0.5):
    """Report steps as trainer and orchestrator do."""
    paths.metrics_dir.mkdir(parents=True, exist_ok=True)
    for role in ("orchestrator", "trainer"):
        with paths.metrics(role).open(mode) as file:
            file.writelines(
                json.dumps({"step": step, "reward/mean": reward, "staleness/max": 1}) + "\n" for step in steps
            )


@pytest.fixture
def paths(tmp_path):
    return RunPaths(tmp_path)


def test_read_starts_with_the_heartbeat_of_this_run(paths):
    write(paths, range(5))
    reader = StepReader(paths, resumes=False)
    assert reader.read(os.getpid()) == []  # `rl` may not have removed these yet
    with HeartbeatWriter(paths, "rl", "rl"):
        assert reader.read(os.getpid() + 1) == []
        write(paths, range(2), mode="w")
        assert [step.number for step in reader.read(os.getpid())] == [0, 1]
        write(paths, [2])
        assert [step.number for step in reader.read(os.getpid())] == [2]
        assert reader.read(os.getpid()) == [] and not reader.is_finished
        paths.events.write_text(json.dumps({"event": "finished"}) + "\n")
        write(paths, [3])
        assert [step.number for step in reader.read(os.getpid())] == [3] and reader.is_finished


def test_read_resumed_run_skips_the_steps_of_before(paths):
    write(paths, range(5))
    paths.events.write_text(json.dumps({"event": "finished"}) + "\n")
    reader = StepReader(paths, resumes=True)
    with HeartbeatWriter(paths, "rl", "rl"):
        assert reader.read(os.getpid()) == [] and not reader.is_finished
        rolled_back = RunPaths(paths.root / "rolled_back")
        write(rolled_back, range(4))
        for role in ("orchestrator", "trainer"):
            rolled_back.metrics(role).replace(paths.metrics(role))
        write(paths, [4], reward=0.9)
        assert [(step.number, step.reward) for step in reader.read(os.getpid())] == [(4, 0.9)]


def test_read_step_trained_again_after_a_rollback_is_returned_once(paths):
    reader = StepReader(paths, resumes=False)
    with HeartbeatWriter(paths, "rl", "rl"):
        write(paths, range(4))
        assert len(reader.read(os.getpid())) == 4
        write(paths, [2, 3, 4], reward=0.9)
        (step,) = reader.read(os.getpid())
    assert (step.number, step.reward, step.staleness) == (4, 0.9, 1)


def test_rollouts_are_those_of_the_batch(paths):
    reader = StepReader(paths, resumes=False)
    with HeartbeatWriter(paths, "rl", "rl"):
        write(paths, range(2))
        first, second = reader.read(os.getpid())
    paths.samples_dir.mkdir()
    paths.samples(1).write_text('{"reward": 1.0}\n{"reward": 0.0}\n')
    assert [row["reward"] for row in second.rollouts] == [1.0, 0.0]
    with pytest.raises(RunError, match=r"step_0.jsonl does not exist"):
        _ = first.rollouts
