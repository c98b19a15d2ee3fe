"""Programs that use the Python API, in an empty folder, with the real processes on a CPU."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from tests.integration.rl.conftest import orphans_are_ours
from tests.support.command import END_TIMEOUT_SECONDS, alive, clean_environment, offspring, until
from tests.support.server import free_port

ROOT = Path(__file__).parents[3]
PROGRAM_TIMEOUT_SECONDS = 800  # on a heavily loaded machine; up to 110 s on an idle one
__all__ = ["orphans_are_ours"]  # a fixture: `Program.others` finds the orphans


class Program:
    """A running Python program and the processes that it has started."""

    def __init__(self, text: str, folder: Path) -> None:
        """Write `text` to `folder`/train.py and start it."""
        self.folder, self._before = folder, set(offspring())
        (folder / "train.py").write_text(text)
        ports = {"PRIME_INFERENCE__SERVER__PORT": str(free_port())}
        with (folder / "output.txt").open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "train.py"],
                cwd=folder,
                env=clean_environment() | ports | {"PYTHONUNBUFFERED": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def output(self) -> str:
        """What it has printed."""
        return (self.folder / "output.txt").read_text(errors="replace")  # perhaps half a character so far

    def wait(self) -> str:
        """Wait for the end; return the output. Raises AssertionError if it failed."""
        code = self.process.wait(timeout=PROGRAM_TIMEOUT_SECONDS)
        assert code == 0, self.output[-3000:]
        return self.output

    def others(self) -> list[psutil.Process]:
        """The living processes that the program has started, orphans included."""
        found = offspring()
        return [found[pid] for pid in set(found) - self._before - {self.process.pid} if alive(found[pid])]

    def assert_nothing_left(self) -> None:
        """Check that all processes end."""
        until(lambda: not self.others(), f"the end of {self.others()}", END_TIMEOUT_SECONDS)

    def clean_up(self) -> None:
        """Kill what a failed test has left."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for process in self.others():
            with suppress(psutil.NoSuchProcess):  # it has just ended
                process.kill()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Program]]:
    """Start programs in a folder that has only the recipes and some data."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    rows = [{"prompt": f"abc{i}", "completion": f"{i}cba"} for i in range(64)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    programs: list[Program] = []

    def _start(text: str) -> Program:
        programs.append(Program(text, tmp_path))
        return programs[-1]

    yield _start
    for program in programs:
        program.clean_up()
