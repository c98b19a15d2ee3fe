"""Faults strike at their point, once, and nowhere else."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.cases import Fault
from tests.chaos.hook.chaos_hook import role_of

HOOK = Path(__file__).parent / "hook"
PROGRAM = """
import os
from pathlib import Path
root = Path(os.environ["CHAOS_RUN"])
(root / "new").mkdir()
(root / "new/file").write_text("x")
for number in range(3):
    (root / "new").rename(root / f"step_{number}")
    (root / f"step_{number}").rename(root / "new")
descriptor = os.open(root / "ledger", os.O_WRONLY | os.O_CREAT)
os.write(descriptor, b"0123456789")
os.fsync(descriptor)
(root / "end").mkdir()
"""


@pytest.fixture
def run_program(tmp_path):
    """Run the program, as `rl`, with a fault armed; the run directory and the exit code."""
    run, chaos, program = tmp_path / "run", tmp_path / "chaos", tmp_path / "rl"
    run.mkdir()
    chaos.mkdir()
    program.write_text(PROGRAM)

    def start(fault, number=1):
        (chaos / "armed.json").write_text(json.dumps(fault.armed(number)))
        environ = {**os.environ, "PYTHONPATH": str(HOOK), "CHAOS_DIR": str(chaos), "CHAOS_RUN": str(run)}
        return run, subprocess.run([sys.executable, program], env=environ, timeout=60).returncode

    return start


@pytest.mark.parametrize(
    ("fault", "there", "missing"),
    [
        (Fault("rl", "mkdir", "new", "before"), "", "new"),
        (Fault("rl", "create", "new/file", "before"), "new", "new/file"),
        (Fault("rl", "rename", r"step_\d", "before", count=2), "new", "step_1"),
        (Fault("rl", "rename", r"step_\d", "after", count=2), "step_1", "step_2"),
        (Fault("rl", "fsync", "ledger", "before"), "ledger", "end"),
        (Fault("rl", "fsync", "ledger", "after"), "ledger", "end"),
    ],
)
def test_fault_strikes_at_its_point(run_program, fault, there, missing):
    run, code = run_program(fault)
    assert code == -signal.SIGKILL
    assert (run / there).exists() and not (run / missing).exists()


def test_fault_in_a_write_leaves_half_of_it(run_program):
    run, code = run_program(Fault("rl", "write", "ledger", "half"))
    assert code == -signal.SIGKILL
    assert (run / "ledger").read_bytes() == b"01234"


@pytest.mark.parametrize(
    "fault",
    [
        Fault("orchestrator", "mkdir", "new", "before"),
        Fault("rl", "mkdir", "ne", "before"),
        Fault("rl", "mkdir", "new", "before", count=2),
        Fault("rl", "rename", r"step_\d", "before", victim="nobody"),
    ],
)
def test_fault_of_another_process_or_point_does_not_strike(run_program, fault):
    run, code = run_program(fault)
    assert code == 0
    assert (run / "end").exists()


def test_fault_strikes_once(run_program, tmp_path):
    fault = Fault("rl", "mkdir", "new", "before")
    assert run_program(fault)[1] == -signal.SIGKILL
    marker = json.loads((tmp_path / "chaos/fired_1.json").read_text())
    assert marker["where"] == "new" and marker["pid"] == marker["by"]
    assert run_program(fault)[1] == 0
    assert (tmp_path / "chaos/pids/rl").exists()


def test_role_of_is_derived_from_the_command():
    assert role_of(["python", "-m", "prime_rl.entrypoints.orchestrator", "@", "x"], {}) == "orchestrator"
    assert role_of(["python", "-u", "-m", "prime_rl.trainer.rl.train"], {"RANK": "1"}) == "rank1"
    assert role_of(["python", "-P", "-m", "prime_rl.rollouts.workers.fork_server", "3"], {}) == "forkserver"
    assert role_of(["python", "/venv/bin/rl", "@", "rl.toml"], {}) == "rl"
    assert role_of(["python", "/engine.py", "x"], {"CHAOS_ENGINE": "/engine.py"}) == "inference"
    assert role_of(["python", "-c", "from multiprocessing.forkserver import main; main(3)"], {}) == "engines"
    assert role_of(["python", "script.py"], {}) == "other"
