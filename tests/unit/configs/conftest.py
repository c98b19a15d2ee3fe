"""A working directory with the documented configuration files, and a clean environment."""

import os
from pathlib import Path

import pytest

from prime_rl.configs.inference import InferenceConfig
from prime_rl.configs.orchestrator import OrchestratorConfig

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    """An empty working directory with the repository's configs/; no variable is set that is configuration."""
    variables = {*InferenceConfig.variables, *OrchestratorConfig.variables}
    for name in list(os.environ):
        if name.startswith("PRIME_") or name in variables:
            monkeypatch.delenv(name)
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    monkeypatch.chdir(tmp_path)
    return tmp_path
