"""`rl` over small scripts."""

import json
import subprocess
import sys

import psutil
import pytest

from tests.support.command import PROGRESS_TIMEOUT_SECONDS, until


class Run:
    """`rl` over small scripts."""

    def __init__(self, output_dir, roles, keys=(), **timeouts):
        self.output_dir = output_dir
        driver = [sys.executable, "-m", "tests.unit.supervisor.driver", str(output_dir)]
        self.process = subprocess.Popen(
            [*driver, json.dumps(roles), json.dumps(timeouts), *keys],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait_for_log(self, role, text):
        """Wait for a text in the log of a process, and return the complete lines of the log."""
        log = self.output_dir / "logs" / f"{role}.log"

        def lines():
            # `print` without a buffer writes the parts of a line one by one.
            return "".join(log.read_text().rpartition("\n")[:2]) if log.exists() else ""

        def contains():
            ended = self.process.poll() is not None  # read first, because work before the exit counts
            found = text in lines()
            assert found or not ended, f"rl ended before {log} contained {text!r}"
            return found

        until(contains, f"{text!r} in {log}")
        return lines()

    def pids(self):
        return [child.pid for child in psutil.Process(self.process.pid).children(recursive=True)]

    def end(self):
        """Wait for the end; return exit code and output."""
        output, _ = self.process.communicate(timeout=PROGRESS_TIMEOUT_SECONDS)
        return self.process.returncode, output


@pytest.fixture
def start(tmp_path):
    """Start `rl` over scripts, by role: `start(roles, *keys, **timeouts)` returns a `Run`."""
    runs = []

    def _start(roles, *keys, **timeouts):
        runs.append(Run(tmp_path / "out", roles, keys=keys, **timeouts))
        return runs[-1]

    yield _start
    for run in runs:
        if run.process.poll() is None:
            run.process.kill()
