"""The recipe configs/code_tests/cpu.toml: it learns with the sandbox in the loop, although a jail is killed."""

import json
import os
import signal
import tomllib
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.integration.rl.conftest import StartCommand, own_server
from tests.support.command import Command, metrics_of

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[3]
ASYNC_LEVEL = 2


def jails(run: Command) -> list[psutil.Process]:
    """The jails of all environment workers."""
    found = []
    for process in psutil.Process(run.process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # executions end at any time
            parent = process.parent()
            if process.name() == "bwrap" and parent is not None and parent.name() != "bwrap":
                found.append(process)
    return found


@pytest.mark.release
def test_code_tests_recipe_raises_its_reward_although_a_jail_is_killed(start: StartCommand, tmp_path: Path) -> None:
    """The bound holds (I1), and no rollout of a killed jail is dropped or scored 0 for it."""
    values = tomllib.loads((ROOT / "configs/code_tests/cpu.toml").read_text())
    values["model"]["name"] = str(ROOT / values["model"]["name"])
    values["max_steps"], values["trainer"]["scheduler"]["decay_steps"] = 24, 19  # about half of the recipe
    values |= {"inference": own_server(), "output_dir": str(tmp_path / "run")}
    run = start("rl", values, tmp_path / "run")
    run.until_step("orchestrator", 2)
    before = {jail.pid for jail in jails(run)}
    killed = min(before)
    os.kill(killed, signal.SIGKILL)
    # More than before if a worker has opened its sandbox meanwhile.
    run.until(lambda: len({jail.pid for jail in jails(run)} - {killed}) >= len(before), "a new jail")
    assert run.end(1500) == 0, run.story()

    steps = metrics_of(run.paths, "orchestrator")
    rewards = [line["reward/mean"] for line in steps]
    assert len(steps) == values["max_steps"]
    assert sum(rewards[-8:]) / 8 > sum(rewards[:4]) / 4 + 0.06, rewards
    assert max(line["staleness/max"] for line in steps) <= ASYNC_LEVEL
    assert sum(line.get("dropped/error/code_tests", 0) for line in steps) == 0
    logs = "".join(log.read_text() for log in run.paths.logs_dir.glob("env_code_tests_*.log"))
    assert f"jail {killed} exited; starting another" in logs
    assert "attempt 3 of 3 failed" not in logs
    right = [
        rollout
        for step in range(len(steps))
        for rollout in map(json.loads, run.paths.samples(step).read_text().splitlines())
        if solves(rollout["messages"])
    ]
    assert right and all(rollout["reward"] == 1 for rollout in right)


def solves(messages: list[dict[str, str]]) -> bool:
    """Whether a reply is exactly the program that the warm start was trained to write."""
    question, reply = messages[-2]["content"], messages[-1]["content"]
    rule = question.removeprefix("f(x)=").replace("x", "*x")
    return reply == f"```\nf=lambda x:{rule}\n```"
