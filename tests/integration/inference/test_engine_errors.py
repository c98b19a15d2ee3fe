"""An engine that does not start: its own error, and no files that stay."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.support.command import clean_environment, executable
from tests.support.server import free_port

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(600)]
BAD_MEMORY = ["--vllm.kv-cache-memory-bytes", "100"]
BAD_THREADS = {"VLLM_CPU_OMP_THREADS_BIND": "no-such-processor"}
SPAWNED = ["--vllm.distributed-executor-backend", "mp"]  # engine and worker start as on a GPU


@pytest.mark.parametrize(
    ("arguments", "environment", "error"),
    [
        pytest.param(BAD_MEMORY, {}, "ValueError: No available memory for the cache blocks", id="forked engine"),
        pytest.param(
            [*SPAWNED, *BAD_MEMORY], {}, "ValueError: No available memory for the cache", id="spawned engine",
            marks=pytest.mark.extended,
        ),
        pytest.param(
            SPAWNED, BAD_THREADS, "ValueError: invalid literal", id="worker",
            marks=[pytest.mark.extended, pytest.mark.release],
        ),
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
    left = {path.name for path in folder.iterdir()}
    shutil.rmtree(folder)
    assert left <= {f"torchinductor_{os.getuid()}"}
