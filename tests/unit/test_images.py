"""docker/: the files pass hadolint, and describe how the images run."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "docker"
FILES = sorted(FOLDER.glob("Dockerfile.*"))


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed (.ci/run installs it)")
@pytest.mark.parametrize("file", FILES, ids=lambda path: path.suffix[1:])
def test_dockerfile_passes_hadolint(file):
    done = subprocess.run(["hadolint", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.suffix[1:])
def test_dockerfile_runs_without_root_and_forwards_signals(file):
    text = file.read_text()
    assert re.findall(r"^USER (.+)$", text, re.MULTILINE)[-1] == "1001"
    assert 'ENTRYPOINT ["tini", "-g", "--"]' in text
