"""The pages of docs/reference are generated from the code."""

import subprocess
import sys

from tests.unit.configs.conftest import REPOSITORY


def test_reference_pages_are_up_to_date():
    command = [sys.executable, REPOSITORY / "scripts/generate_reference.py", "--check"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
