"""scripts/run_tests.py: what fails once is unstable, what fails twice or in numbers is red."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "run_tests.py"
PLANTED = """
import os, pathlib, pytest

def fails_once(name, fail):
    file = pathlib.Path(os.environ["PLACE"], name)
    if not file.exists():
        file.touch()
        fail()

def wrong():
    raise AssertionError("planted")

@pytest.mark.parametrize("case", ["a b", "c[d]", "e", "f"])
def test_case(case):
    if case in os.environ["ONCE"].split(","):
        fails_once(case, wrong)

def test_kills_its_worker():
    if os.environ["KIND"] == "crash":
        fails_once("crash", lambda: os._exit(9))

def test_is_wrong():
    assert os.environ["KIND"] != "broken", "always"
"""
CASES = [
    ("", "", 0, []),
    ("c[d]", "", 0, ["unstable: test_planted.py::test_case[c[d]]: failed (AssertionError: planted), passed alone"]),
    ("e", "crash", 0, ["unstable: test_planted.py::test_case[e]", "unstable: test_planted.py::test_kills_its_worker"]),
    ("e", "broken", 1, ["unstable: test_planted.py::test_case[e]", "broken: test_planted.py::test_is_wrong: failed ("]),
    ("a b,c[d],e,f", "", 1, ["4 tests failed, which are too many to run again"]),
]


@pytest.mark.extended
@pytest.mark.parametrize(("once", "kind", "code", "lines"), CASES)
def test_run_tests_reports_unstable_and_broken_tests(once, kind, code, lines, tmp_path):
    (tmp_path / "test_planted.py").write_text(PLANTED)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -n 1\n")
    environment = os.environ | {"ONCE": once, "KIND": kind, "PLACE": str(tmp_path)}
    command = [sys.executable, str(SCRIPT)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    reported = [line for line in done.stdout.splitlines() if line.startswith("gate: ")]
    assert done.returncode == code, done.stdout + done.stderr
    for line in lines:
        assert any(line in one for one in reported), reported
    assert any("unstable" in line for line in reported) == any("unstable" in line for line in lines)
