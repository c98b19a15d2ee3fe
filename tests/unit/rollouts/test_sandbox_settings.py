"""The block [sandbox] reaches the code of environments, in their worker processes."""

import os
from dataclasses import fields
from pathlib import Path

import pytest

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.rollouts.sandbox import SandboxConfig
from prime_rl.configs.shared.blocks import EnvConfig
from prime_rl.core.errors import ConfigError
from prime_rl.orchestrator.orchestrator_setup import model_access
from prime_rl.rollouts.workers.environment_pool import EnvironmentPool
from prime_rl.rollouts.workers.worker_launcher import WorkerLauncher
from prime_rl.sandbox.sandbox import Sandbox
from prime_rl.sandbox.settings import SandboxSettings, use_settings

PACKAGES = Path(__file__).parents[2] / "support/packages"


def test_every_key_is_a_setting():
    values = {name: 2**28 + number for number, name in enumerate(sorted(SandboxConfig.model_fields))}
    del values["backend"]
    values["remote_image"] = "python:3.13"
    settings = SandboxConfig(backend="unsafe-subprocess", **values).settings
    found = {field.name: getattr(settings, field.name) for field in fields(settings) if field.name != "limits"}
    found |= {field.name: getattr(settings.limits, field.name) for field in fields(settings.limits)}
    assert values.items() <= found.items()
    assert found["backend"] == "unsafe-subprocess"
    assert SandboxConfig().settings == SandboxSettings()


def test_sandbox_uses_the_settings_of_the_process_unless_constructed_with_others():
    use_settings(SandboxConfig(backend="unsafe-subprocess", timeout_seconds=3).settings)
    try:
        sandbox = Sandbox()
        assert (sandbox.backend, sandbox.limits.timeout_seconds) == ("unsafe-subprocess", 3)
    finally:
        use_settings(SandboxSettings())
    assert Sandbox("unsafe-subprocess").limits.timeout_seconds == 5


@pytest.mark.slow
async def test_settings_of_a_run_reach_its_environments(tokenizer_dir, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PACKAGES), os.environ.get("PYTHONPATH", "")]))
    model = {"name": str(tokenizer_dir)}
    config = OrchestratorConfig(model=model, sandbox={"memory_bytes": 2**27, "num_jails": 3, "backend": "bwrap"})
    async with WorkerLauncher() as host:
        with pytest.raises(ConfigError, match=r"num_jails=3") as error:
            await EnvironmentPool(EnvConfig(id="showing_environment"), host, model_access(config, 10)).start()
    assert f"memory_bytes={2**27}," in str(error.value)
