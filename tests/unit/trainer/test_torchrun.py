"""The report of the rank that a signal killed first."""

import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from prime_rl.core import os_errors
from prime_rl.liveness.parent_process import LAUNCHER
from prime_rl.trainer import torchrun
from prime_rl.trainer.torchrun import describe_first_failure
from tests.support.command import PROGRESS_TIMEOUT_S, until


def failed(**ranks) -> ChildFailedError:
    """Ranks by (exit code, seconds)."""
    error = ChildFailedError.__new__(ChildFailedError)
    error.failures = {
        int(name[1:]): SimpleNamespace(exitcode=code, timestamp=when, pid=100 + int(name[1:]))
        for name, (code, when) in ranks.items()
    }
    return error


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        (
            {"r1": (-9, 5), "r0": (1, 5), "r2": (-15, 5)},
            "rank 1 (pid 101) was killed by SIGKILL, perhaps out of mem",
        ),
        ({"r0": (1, 5), "r1": (-9, 8)}, None),  # the kill is torchrun's
        ({"r0": (1, 5), "r1": (-15, 5)}, None),
        ({"r0": (-6, 5), "r1": (-9, 5)}, "rank 1 (pid 101) was killed by SIGKILL"),
        ({"r0": (-6, 5), "r1": (-15, 6)}, "rank 0 (pid 100) was killed by SIGABRT"),
        ({"r0": (-7, 5)}, "rank 0 (pid 100) was killed by SIGBUS, perhaps because a disk or /dev/shm is full"),
    ],
)
def test_describe_first_failure_ignores_ranks_that_torchrun_terminated(ranks, said):
    cause = describe_first_failure(failed(**ranks), os_errors.count_oom_kills())
    assert cause is None if said is None else cause.startswith(said)


def test_describe_first_failure_reports_oom_kill(tmp_path, monkeypatch):
    monkeypatch.setattr("prime_rl.trainer.torchrun.describe_signal", os_errors.describe_signal)
    monkeypatch.setattr(os_errors, "count_oom_kills", lambda: 4)
    assert "the kernel has killed a process because memory ran out" in (
        describe_first_failure(failed(r0=(-9, 1)), kills=3) or ""
    )
    assert "perhaps" in (describe_first_failure(failed(r0=(-9, 1)), kills=4) or "")


def test_main_sets_launcher_pid_for_ranks(monkeypatch):
    told = []
    monkeypatch.setenv(LAUNCHER, "")
    monkeypatch.setattr(sys, "argv", ["launch"])
    monkeypatch.setattr(torchrun, "torchrun", lambda: told.append(os.environ[LAUNCHER]))
    torchrun.main()
    assert told == [str(os.getpid())]


def test_rank_exits_if_torchrun_died_during_imports():
    """The next one to start on this directory would find it at work."""
    program = (
        "import sys; from prime_rl.liveness.parent_process import die_with_parent; die_with_parent(int(sys.argv[1]))"
    )
    for parent, code in ((os.getpid(), 0), (1, 1)):
        done = subprocess.run(
            [sys.executable, "-c", program, str(parent)], capture_output=True, timeout=PROGRESS_TIMEOUT_S
        )
        assert done.returncode == code, done.stderr
    assert b"the process that started this one has exited" in done.stderr


@pytest.mark.extended
def test_torchrun_signal_ignored_at_start_stays_ignored(tmp_path):
    """A real torchrun under nohup, which gets SIGHUP as its terminal is closed; SIGTERM ends it."""
    rank = "import os, pathlib, signal, sys, time; hup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN\n"
    rank += "pathlib.Path(sys.argv[1], 'up').write_text(str(hup))\n"
    rank += "while not pathlib.Path(sys.argv[1], 'go').exists(): time.sleep(0.05)\n"
    (tmp_path / "rank.py").write_text(rank)
    command = ["nohup", sys.executable, "-m", "prime_rl.trainer.torchrun", "--standalone", "--nproc-per-node=1"]
    process = subprocess.Popen([*command, str(tmp_path / "rank.py"), str(tmp_path)], stdin=subprocess.DEVNULL)
    try:
        until((tmp_path / "up").exists, "the rank")
        process.send_signal(signal.SIGHUP)
        (tmp_path / "go").touch()
        assert process.wait(PROGRESS_TIMEOUT_S) == 0
        assert (tmp_path / "up").read_text() == "True"
    finally:
        process.kill()


@pytest.mark.extended
def test_torchrun_second_sigterm_does_not_interrupt_the_wait_for_the_ranks(tmp_path):
    """A rank that saves a checkpoint for longer than the time between two signals."""
    (tmp_path / "rank.py").write_text(
        "import pathlib, signal, sys, time\nhere = pathlib.Path(sys.argv[1])\n"
        "signal.signal(signal.SIGTERM, lambda *_: (here / 'asked').touch())\n(here / 'up').touch()\n"
        "while not (here / 'go').exists(): time.sleep(0.05)\n(here / 'saved').touch()\n"
    )
    command = [sys.executable, "-m", "prime_rl.trainer.torchrun", "--standalone", "--nproc-per-node=1"]
    process = subprocess.Popen([*command, str(tmp_path / "rank.py"), str(tmp_path)], stderr=subprocess.PIPE)
    try:
        for name in ("up", "asked"):
            until((tmp_path / name).exists, name)
            process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):  # it waits for its rank
            process.wait(1)
        (tmp_path / "go").touch()
        assert process.wait(PROGRESS_TIMEOUT_S) == 128 + signal.SIGTERM
        assert (tmp_path / "saved").exists()
        assert b"Traceback" not in process.stderr.read()
    finally:
        process.kill()


@pytest.mark.extended
def test_cause_replaces_error_files_of_other_ranks(tmp_path):
    """A real torchrun whose second rank is killed, after the first has left its word."""
    (tmp_path / "rank.py").write_text(
        "import os, signal, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)\n"
    )
    error = tmp_path / "error.json"
    error.write_text(json.dumps({"code": 1, "message": "rank 0 lost another rank", "attempt": "0"}))
    command = [sys.executable, "-m", "prime_rl.trainer.torchrun", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "PRIME_RL_ERROR_FILE": str(error), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1"}
    done = subprocess.run([*command, str(tmp_path / "rank.py")], env=environment, timeout=120, capture_output=True)
    assert done.returncode == 1
    assert "rank 1 (pid " in json.loads(error.read_text())["message"]
    assert "was killed by SIGKILL" in json.loads(error.read_text())["message"]
