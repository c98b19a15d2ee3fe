"""An engine that does not start: its own error, and no files that stay."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import psutil
import pytest

from tests.support.command import children_of, clean_environment, executable, until
from tests.support.server import free_port

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(600)]
BAD_MEMORY = ["--vllm.kv-cache-memory-bytes", "100"]
BAD_THREADS = {"VLLM_CPU_OMP_THREADS_BIND": "no-such-processor"}
SPAWNED = ["--vllm.distributed-executor-backend", "mp"]  # engine and worker start as on a GPU


@pytest.mark.parametrize(
    ("arguments", "environment", "error"),
    [
        pytest.param(BAD_MEMORY, {}, "ValueError: No available memory for the cache blocks", id="forked engine"),
        pytest.param([*SPAWNED, *BAD_MEMORY], {}, "ValueError: No available memory for the cache", id="spawned engine"),
        pytest.param(SPAWNED, BAD_THREADS, "ValueError: invalid literal", id="worker", marks=pytest.mark.release),
    ],
)  # fmt: skip
def test_engine_that_does_not_start_is_reported_with_its_own_error(models, arguments, environment, error):
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # pytest's own are too long for sockets
    done = subprocess.run(
        [executable("inference"), "--model.name", str(models.base), "--server.port", str(free_port()), *arguments],
        env=clean_environment() | environment | {"TMPDIR": str(folder)}, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 1 and line.startswith(f"error: an engine did not start: {error}")
    assert_removed(folder)


def test_engine_that_a_signal_ends_is_reported_as_such(models):
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    command = [executable("inference"), "--model.name", str(models.base), "--server.port", str(free_port())]
    server = subprocess.Popen(
        [*command, *SPAWNED], env=clean_environment() | {"TMPDIR": str(folder)}, stderr=subprocess.PIPE, text=True
    )
    until(lambda: len(find_engines(server.pid)) > 0, "the engine")
    find_engines(server.pid)[0].kill()
    [line] = [line for line in server.communicate(timeout=300)[1].splitlines() if line.startswith("error: ")]
    assert server.returncode == 1 and line.startswith("error: an engine ended while it started")
    assert_removed(folder)


def find_engines(server):
    children = children_of(psutil.Process(server))
    return [child for child in children if any("spawn_main" in argument for argument in child.cmdline())]


def assert_removed(folder):
    left = {path.name for path in folder.iterdir()}
    shutil.rmtree(folder)
    assert left <= {f"torchinductor_{os.getuid()}"}
