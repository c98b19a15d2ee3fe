"""docs/reference/config.md is generated from the models."""

import subprocess
import sys

from tests.unit.configs.conftest import REPOSITORY


def test_reference_page_is_up_to_date():
    command = [sys.executable, REPOSITORY / "scripts/generate_reference.py", "config", "--check"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
