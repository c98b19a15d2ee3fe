"""`max_restarts`: a run with its own server completes although each of its processes is killed."""

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from prime_rl.storage.checkpoint_artifacts import find_checkpoints
from prime_rl.storage.paths import RunPaths
from tests.integration.rl.conftest import StartCommand, own_server, rl_values
from tests.integration.rl.test_whole_run import manifest
from tests.support.command import Command, json_lines, metrics_of

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(900)]

AFTER = 2
GROUPS = 4


def events(paths: RunPaths, *kinds: str) -> list[dict[str, Any]]:
    """What `rl` has taken down of these kinds, in order."""
    return [event for event in json_lines(paths.events) if event["event"] in kinds]


def worker(run: Command) -> psutil.Process:
    """An environment worker: it was forked by the process that the orchestrator has started for this."""
    [server] = run.role("orchestrator").children()
    return server.children()[0]


def steps_done(run: Command) -> int:
    """The newest step of the surviving branch."""
    lines = metrics_of(run.paths, "trainer")
    return lines[-1]["step"] if lines else -1


def wait_for_progress(run: Command) -> None:
    """Wait for further steps."""
    before = steps_done(run)
    run.until(lambda: steps_done(run) >= before + AFTER, f"step {before + AFTER}")


def kill(run: Command, victim: psutil.Process, what: str) -> None:
    """Kill a process, and wait until its end is reported."""
    os.kill(victim.pid, signal.SIGKILL)
    run.until(lambda: victim.pid in {event["pid"] for event in events(run.paths, "ended")}, f"the end of {what}")


def assert_exactly_once(paths: RunPaths, steps: int) -> None:
    """No stream position is trained on twice (I3), and the bound holds (I1)."""
    manifests = [manifest(paths, step) for step in range(steps)]
    groups = [group for batch in manifests for group in batch["group_ids"]]
    assert len(groups) == len(set(groups)) == steps * GROUPS
    for step, batch in enumerate(manifests):
        assert step - batch["min_version"] <= batch["async_level"]
    for role in ("trainer", "orchestrator"):
        assert [line["step"] for line in metrics_of(paths, role)] == list(range(steps))


def test_run_completes_although_every_process_is_killed(start: StartCommand, tmp_path: Path) -> None:
    """Inference, the orchestrator, one rank of two, an environment worker, torchrun."""
    steps = 40
    values = rl_values(
        tmp_path / "run", inference=own_server(), trainer_ranks=2, max_steps=steps, max_restarts=3, ckpt={"interval": 4}
    )
    run = start("rl", values, tmp_path / "run")
    run.until_step("trainer", 1)
    kill(run, run.role("inference"), "inference")
    wait_for_progress(run)
    kill(run, run.role("orchestrator"), "the orchestrator")
    wait_for_progress(run)
    kill(run, run.ranks()[1], "a rank")
    run.until(lambda: len(events(run.paths, "restarted")) == 3, "the ranks' restart")
    wait_for_progress(run)
    os.kill(worker(run).pid, signal.SIGKILL)  # the orchestrator restarts it
    wait_for_progress(run)
    kill(run, run.role("trainer"), "torchrun")
    wait_for_progress(run)
    assert run.end() == 0, run.story()

    assert [event["name"] for event in events(run.paths, "restarted")] == [
        "inference",
        "orchestrator",
        *["trainer"] * 2,
    ]
    assert events(run.paths, "finished")
    assert find_checkpoints(run.paths.checkpoints_dir).steps[-1] == steps
    assert_exactly_once(run.paths, steps)
    assert run.errors == ""


def test_run_sigterm_saves_a_checkpoint_and_a_second_start_resumes(start: StartCommand, tmp_path: Path) -> None:
    """Two ranks under torchrun, between two checkpoints."""
    steps = 12
    values = rl_values(tmp_path / "run", inference=own_server(), trainer_ranks=2, max_steps=steps)
    run = start("rl", values | {"ckpt": {"interval": 100}}, tmp_path / "run")
    run.until_step("trainer", 2)
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 128 + signal.SIGTERM, run.story()
    [saved] = find_checkpoints(run.paths.checkpoints_dir).steps
    assert 3 <= saved < steps
    assert f"checkpoint {saved} is saved" in run.output

    run = start("rl", values | {"ckpt": {"interval": 100, "resume_step": -1}}, tmp_path / "run")
    assert run.end() == 0, run.story()
    assert find_checkpoints(run.paths.checkpoints_dir).steps == [saved, steps]
    assert_exactly_once(run.paths, steps)
