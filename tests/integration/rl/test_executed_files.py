"""Which files of prime_rl a run executes in its steady state, traced in all its processes.

docs/life_of_a_rollout.md lists them: those of the rollout itself in its steps, the others in its last table.
"""

import re
from pathlib import Path

import pytest

from prime_rl.storage.artifact import MANIFEST
from tests.integration.rl.conftest import StartCommand, own_server, rl_values
from tests.support.command import Command

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(900)]

REPOSITORY = Path(__file__).parents[3]
PAGE = REPOSITORY / "docs/life_of_a_rollout.md"
OTHERS = "## What else runs"

# Every Python process of the run imports this at its start. A line per second and file: its time, its path.
SITECUSTOMIZE = """
import os, sys, threading, time

SOURCES, FOLDER = {sources!r}, {folder!r}
files, seen, output = {{}}, set(), [0, None]

def hook(frame, event, argument):
    if event != "call":
        return
    code = frame.f_code
    path = files.get(code)
    if path is None:
        name = code.co_filename
        path = files[code] = name[len(SOURCES):] if name.startswith(SOURCES) and code.co_name != "<module>" else ""
    if path and (line := f"{{int(time.time())}} {{path}}\\n") not in seen:
        seen.add(line)
        if output[0] != os.getpid():  # also after a fork
            output[:] = os.getpid(), os.open(f"{{FOLDER}}/{{os.getpid()}}", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        os.write(output[1], line.encode())

sys.setprofile(hook)
threading.setprofile(hook)
"""


def traced(run: Command, folder: Path, first: int, last: int) -> set[str]:
    """Return the files that were executed from batch `first` to batch `last`."""
    begin, end = ((run.paths.rollouts(step) / MANIFEST).stat().st_mtime for step in (first, last))
    lines = [line.split() for file in folder.iterdir() for line in file.read_text().splitlines()]
    # Whole seconds: in that of batch `last` a fast machine may also end the run.
    return {path for second, path in lines if begin <= int(second) < int(end)}


def test_page_lists_the_files_that_a_rollout_executes(
    start: StartCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "trace"
    (folder / "hook").mkdir(parents=True)
    files = folder / "files"
    files.mkdir()
    sources = f"{REPOSITORY / 'src/prime_rl'}/"
    (folder / "hook/sitecustomize.py").write_text(SITECUSTOMIZE.format(sources=sources, folder=str(files)))
    monkeypatch.setenv("PYTHONPATH", str(folder / "hook"))
    run = start("rl", rl_values(tmp_path / "run", inference=own_server(), max_steps=20), tmp_path / "run")
    assert run.end() == 0, run.story()
    executed = traced(run, files, 3, 16)

    path, others = (set(re.findall(r"\(\.\./src/prime_rl/(\S+?\.py)", part)) for part in PAGE.read_text().split(OTHERS))
    assert path <= executed, f"not executed: {sorted(path - executed)}"
    assert executed <= path | others, f"not on the page: {sorted(executed - path - others)}"
