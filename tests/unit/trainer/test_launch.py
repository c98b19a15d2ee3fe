"""The rank that was killed is named, whatever the others say of it and whatever torchrun does to them."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from prime_rl.run import surroundings
from prime_rl.supervisor.process import LAUNCHER
from prime_rl.trainer import launch
from prime_rl.trainer.launch import cause_of


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
        ({"r1": (-9, 5), "r0": (1, 5), "r2": (-15, 5)}, "rank 1 (pid 101) was killed by SIGKILL, perhaps for want of"),
        ({"r0": (1, 5), "r1": (-9, 8)}, None),  # the kill is torchrun's
        ({"r0": (1, 5), "r1": (-15, 5)}, None),
        ({"r0": (-6, 5), "r1": (-9, 5)}, "rank 1 (pid 101) was killed by SIGKILL"),
        ({"r0": (-6, 5), "r1": (-15, 6)}, "rank 0 (pid 100) was killed by SIGABRT"),
        ({"r0": (-7, 5)}, "rank 0 (pid 100) was killed by SIGBUS, perhaps because a disk or /dev/shm is full"),
    ],
)
def test_who_died_first_is_named_and_nobody_that_torchrun_ended(ranks, said):
    cause = cause_of(failed(**ranks), surroundings.oom_kills())
    assert cause is None if said is None else cause.startswith(said)


def test_a_kill_that_the_kernel_counts_is_told_as_such(tmp_path, monkeypatch):
    monkeypatch.setattr("prime_rl.trainer.launch.how_it_died", surroundings.how_it_died)
    monkeypatch.setattr(surroundings, "oom_kills", lambda: 4)
    assert "the kernel has meanwhile killed for want of memory" in (cause_of(failed(r0=(-9, 1)), kills=3) or "")
    assert "perhaps" in (cause_of(failed(r0=(-9, 1)), kills=4) or "")


def test_ranks_are_told_who_starts_them(monkeypatch):
    told = []
    monkeypatch.setenv(LAUNCHER, "")
    monkeypatch.setattr(sys, "argv", ["launch"])
    monkeypatch.setattr(launch, "torchrun", lambda: told.append(os.environ[LAUNCHER]))
    launch.main()
    assert told == [str(os.getpid())]


def test_a_rank_whose_torchrun_is_gone_by_the_end_of_its_imports_ends():
    """The next one to start on this directory would find it at work."""
    program = "import sys; from prime_rl.supervisor.process import follow_parent; follow_parent(int(sys.argv[1]))"
    for parent, code in ((os.getpid(), 0), (1, 1)):
        done = subprocess.run([sys.executable, "-c", program, str(parent)], capture_output=True, timeout=60)
        assert done.returncode == code, done.stderr
    assert b"the process that started this one is gone" in done.stderr


@pytest.mark.extended
def test_the_cause_takes_the_place_of_what_others_have_left(tmp_path):
    """A real torchrun whose second rank is killed, after the first has left its word."""
    (tmp_path / "rank.py").write_text(
        "import os, signal, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)\n"
    )
    error = tmp_path / "error.json"
    error.write_text(json.dumps({"code": 1, "message": "rank 0 lost another rank", "attempt": "0"}))
    command = [sys.executable, "-m", "prime_rl.trainer.launch", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "PRIME_RL_ERROR_FILE": str(error), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1"}
    done = subprocess.run([*command, str(tmp_path / "rank.py")], env=environment, timeout=120, capture_output=True)
    assert done.returncode == 1
    assert "rank 1 (pid " in json.loads(error.read_text())["message"]
    assert "was killed by SIGKILL" in json.loads(error.read_text())["message"]
