"""Every command can be started as a module, and its help can be piped to `head`."""

import os
import re
import subprocess
import sys

import pytest

from tests.support.sources import SCRIPTS, SOURCES

TARGETS = {target.removesuffix(":main") for target in SCRIPTS.values()}


def test_modules_of_entrypoints_are_commands():
    files = {path for path in SOURCES if re.fullmatch(r"prime_rl/entrypoints/[a-z]\w*\.py", path)}
    assert {path.removesuffix(".py").replace("/", ".") for path in files} <= TARGETS


@pytest.mark.extended(after=1)
@pytest.mark.parametrize("module", sorted(TARGETS))
def test_command_help_with_a_reader_that_exits_is_silent(module, tmp_path):
    line = f"set -o pipefail; {sys.executable} -m {module} --help | head -n 1"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.stderr == ""
    assert done.stdout.lower().startswith("usage: ")
    assert done.returncode in (0, 128 + 13), "SIGPIPE"


@pytest.mark.extended
def test_command_help_with_a_closed_stdout_is_silent(tmp_path):
    line = f"{sys.executable} -m prime_rl.entrypoints.sft --help >&-"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.extended
def test_command_on_a_terminal_without_unicode_escapes_its_output(tmp_path):
    program = [sys.executable, "-m", "prime_rl.entrypoints.sft", "--output-dir", "\u00e4", "--dry-run"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environment)
    assert (done.returncode, done.stderr) == (0, "") and r'output_dir = "\xe4"' in done.stdout


@pytest.mark.extended
@pytest.mark.parametrize(
    ("command", "arguments", "error"),
    [
        *((each, "--env.id nosuch", "env.0.id = nosuch is not installed") for each in ("eval", "synthesize")),
        ("orchestrator", "--env.id nosuch", "env.0.id = nosuch is not installed"),
        ("synthesize", "--env.id nosuch --dry-run", "env.0.id = nosuch is not installed"),
        ("sft", "--data.name nosuch.jsonl --dry-run", "data.name: nosuch.jsonl does not exist"),
        ("synthesize", "--from nosuch", "from = nosuch does not exist"),
        *(
            (each, "--model.name me/nosuch", "model.name = me/nosuch is not in the cache, and ")
            for each in ("trainer", "sft", "inference", "tinker-server")
        ),
    ],
)
def test_command_with_an_unknown_source_writes_nothing(command, arguments, error, tmp_path):
    arguments = [*arguments.split(), "--output-dir", str(tmp_path / "outputs")]
    program = [sys.executable, "-m", SCRIPTS[command].removesuffix(":main"), *arguments]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 2 and done.stderr.startswith(f"error: {error}")
    assert list(tmp_path.iterdir()) == []
