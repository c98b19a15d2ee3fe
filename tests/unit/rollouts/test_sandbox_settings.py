"""The block [sandbox] reaches the code of environments, in their worker processes."""

from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest

from prime_rl.configs.environment import EnvConfig
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.sandbox import SandboxConfig
from prime_rl.core.errors import ConfigError
from prime_rl.orchestrator.orchestrator_setup import model_access
from prime_rl.rollouts.group_attempts import config_errors
from prime_rl.rollouts.workers.environment_pool import EnvironmentPool
from prime_rl.rollouts.workers.protocol import LoadEnvironment, ModelAccess, decode_command, frame
from prime_rl.rollouts.workers.worker_main import load_backend
from prime_rl_sandbox.execution import SandboxConfigError, SandboxSettings, use_settings
from prime_rl_sandbox.sandbox import Sandbox
from tests.support.fake_engine import fake_engine
from tests.support.isolation import needs_isolation
from tests.support.worker_launcher import launcher_with


def test_every_key_is_a_setting():
    values = {name: 2**28 + number for number, name in enumerate(sorted(SandboxConfig.model_fields))}
    del values["backend"]
    values |= {"remote_image": "python:3.13", "paths": ["/opt/packages"], "preload": ["numpy"]}
    settings = SandboxConfig(backend="unsafe-subprocess", **values).settings
    found = {field.name: getattr(settings, field.name) for field in fields(settings) if field.name != "limits"}
    found |= {field.name: getattr(settings.limits, field.name) for field in fields(settings.limits)}
    values |= {"paths": (Path("/opt/packages"),), "preload": ("numpy",)}
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


def test_settings_of_a_run_reach_its_environments(tokenizer_dir, installed):
    model = {"name": str(tokenizer_dir)}
    config = OrchestratorConfig(model=model, sandbox={"memory_bytes": 2**27, "num_jails": 3, "backend": "bwrap"})
    command = LoadEnvironment(EnvConfig(id="showing_environment"), "train", model_access(config, 10))
    try:
        with pytest.raises(ConfigError, match=rf"memory_bytes={2**27},.* num_jails=3"):
            load_backend(decode_command(frame(command)[4:]), print)
    finally:
        use_settings(SandboxSettings())


def test_config_refuses_an_unknown_backend_and_a_path_that_the_sandbox_hides():
    with pytest.raises(ValueError, match="bwrap"):
        SandboxConfig(backend="docker")
    with pytest.raises(ValueError, match=r"sandbox.paths: /proc/1 .*; use another folder"):
        SandboxConfig(paths=["/proc/1"])


def test_error_of_the_sandbox_is_a_config_error_with_its_whole_message():
    error = SandboxConfigError("this host refuses namespaces; " + "x" * 400)
    with pytest.raises(ConfigError) as caught, config_errors("environment 'a' does not load"):
        raise RuntimeError("failed to load") from error  # as verifiers does
    assert str(caught.value) == f"environment 'a' does not load: {error}"


OWN_SANDBOX = """
import verifiers as vf
from datasets import Dataset
from prime_rl.sandbox.shared_sandbox import SharedSandbox


class Recorded(SharedSandbox):
    async def close(self):
        await super().close()
        open({!r}, "a").write("closed")


sandbox = Recorded(num_jails=1, num_warm=1)


def load_environment():
    async def reward():
        return float((await (await sandbox.open()).run("print(3)")).stdout)

    return vf.SingleTurnEnv(dataset=Dataset.from_list([{{"question": "a"}}]), rubric=vf.Rubric(funcs=[reward]))
"""


@needs_isolation
async def test_worker_closes_the_sandboxes_of_its_environments(tmp_path, tokenizer_dir):
    """Remote machines would outlive it."""
    record = tmp_path / "record"
    (tmp_path / "own_sandbox.py").write_text(OWN_SANDBOX.format(str(record)))
    access = ModelAccess("m", str(tokenizer_dir))
    async with (
        launcher_with(tmp_path) as launcher,
        fake_engine() as engine,
        EnvironmentPool(EnvConfig(id="own_sandbox"), launcher, access) as pool,
    ):
        (rollout,) = await pool.run_group(0, 1, engine.url, {"max_tokens": 3}, 400)
        assert rollout.reward == 3 and not record.exists()
    assert record.read_text() == "closed"


@pytest.mark.parametrize("name", ["execution", "python_env", "sandbox", "shared_sandbox"])
def test_earlier_name_is_the_module_of_the_package(name):
    assert import_module(f"prime_rl.sandbox.{name}") is import_module(f"prime_rl_sandbox.{name}")
