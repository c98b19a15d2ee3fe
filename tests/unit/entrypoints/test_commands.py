"""Every command can be started as a module, and its help can be piped to `head`."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import prime_rl.entrypoints

REPOSITORY = Path(__file__).parents[3]
SCRIPTS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"]
FILES = Path(prime_rl.entrypoints.__path__[0]).glob("*.py")
MODULES = sorted(file.stem for file in FILES if "\ndef main(" in file.read_text())


def test_modules_of_entrypoints_are_the_commands():
    assert {f"prime_rl.entrypoints.{module}:main" for module in MODULES} == set(SCRIPTS.values())


@pytest.mark.parametrize("module", MODULES)
def test_command_help_with_a_reader_that_exits_is_silent(module, tmp_path):
    line = f"set -o pipefail; {sys.executable} -m prime_rl.entrypoints.{module} --help | head -n 1"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.stderr == ""
    assert done.stdout.lower().startswith("usage: ")
    assert done.returncode in (0, 128 + 13), "SIGPIPE"
