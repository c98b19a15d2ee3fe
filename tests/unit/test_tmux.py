"""scripts/tmux.sh: three named panes that follow a run's logs, also those that do not exist yet."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/tmux.sh"
pytestmark = [pytest.mark.extended, pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")]


@pytest.fixture
def shell(tmp_path):
    """Run commands with a separate tmux server, in an empty folder."""
    env = {name: value for name, value in os.environ.items() if name not in ("TMUX", "OUTPUT_DIR")}
    env |= {"TMUX_TMPDIR": str(tmp_path), "SHELL": "/bin/bash", "TERM": "xterm"}

    def run(*argv):
        return subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True)

    yield run
    run("tmux", "kill-server")


def panes(shell, session):
    done = shell("tmux", "list-panes", "-s", "-t", session, "-F", "#{pane_title} #{pane_id}")
    return dict(line.split() for line in done.stdout.splitlines())


def shows(shell, pane, text, seconds=120):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if text in shell("tmux", "capture-pane", "-p", "-t", pane).stdout:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(("name", "logs"), [("", "outputs/logs"), ("exp-1.b", "outputs/exp-1.b/logs")])
def test_tmux_panes_follow_logs_created_later(shell, tmp_path, name, logs):
    argv = [name] if name else []
    session = "prime-rl" + ("-exp-1_b" if name else "")
    assert shell("bash", str(SCRIPT), *argv).returncode == 0
    found = panes(shell, session)
    assert list(found) == ["Trainer", "Orchestrator", "Inference"]
    (tmp_path / logs).mkdir(parents=True)
    for role in found:
        (tmp_path / logs / f"{role.lower()}.log").write_text(f"hello of {role}\n")
    for role, pane in found.items():
        assert shows(shell, pane, f"hello of {role}")
    (tmp_path / logs / "trainer.log").write_text("a new run\n")
    assert shows(shell, found["Trainer"], "a new run")
    assert shell("bash", str(SCRIPT), *argv).returncode == 0  # a second call changes nothing
    assert panes(shell, session) == found
    assert shell("bash", str(SCRIPT), "kill", *argv).returncode == 0
    assert panes(shell, session) == {}


def test_tmux_trainer_pane_has_the_experiment_of_the_session(shell, tmp_path):
    assert shell("bash", str(SCRIPT)).returncode == 0  # the server starts without an experiment
    assert shell("bash", str(SCRIPT), "exp-1").returncode == 0
    plain, named = (panes(shell, session)["Trainer"] for session in ("=prime-rl", "=prime-rl-exp-1"))
    assert shows(shell, named, "experiment exp-1: commands in this pane write to outputs/exp-1")
    load = "from prime_rl.configs.trainer import TrainerConfig; print('dir', TrainerConfig.load([]).output_dir)"
    for pane, directory in ((plain, "outputs"), (named, "outputs/exp-1")):
        shell("tmux", "send-keys", "-t", pane, f'clear; {sys.executable} -c "{load}"', "Enter")
        assert shows(shell, pane, f"dir {directory}\n")


def test_tmux_bad_arguments_are_one_line(shell):
    assert shell("bash", str(SCRIPT), "a/b").returncode == 2
    gone = shell("bash", str(SCRIPT), "kill", "none")
    assert (gone.returncode, gone.stderr) == (1, "error: there is no session prime-rl-none\n")
