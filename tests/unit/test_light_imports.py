"""The orchestrator and the configuration load neither torch nor vllm."""

import subprocess
import sys

import pytest

MODULES = [
    "prime_rl.orchestrator.orchestrator_setup",
    "prime_rl.configs.rl",
    "prime_rl.configs.sft",
    "prime_rl.configs.eval",
    "prime_rl.monitors",
    "prime_rl.evaluation.offline",
    "prime_rl.evaluation.synthesis",
    "prime_rl.storage.batch",
    "prime_rl.entrypoints.rl",
    "prime_rl.entrypoints.init.project",
    "prime_rl.entrypoints.doctor",
    "prime_rl.entrypoints.orchestrator",
    "prime_rl.api.run",
    "prime_rl.api.guides",
]


def test_import_loads_neither_torch_nor_vllm():
    code = f"""
import importlib, sys
for module in {MODULES}:
    importlib.import_module(module)
    assert not {{"torch", "vllm"}} & sys.modules.keys(), module
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("command", ["rl", "trainer", "orchestrator", "inference", "sft", "eval", "synthesize"])
def test_help_loads_no_torch_and_compiles_no_validator(command):
    code = f"""
import sys
from prime_rl.entrypoints import {command}
from prime_rl.configs.loading.base_config import BaseConfig
for option in ("-h", "--help-all"):
    sys.argv = ["{command}", option]
    try:
        {command}.main()
    except SystemExit:
        pass
models = [BaseConfig]
for model in models:
    models += model.__subclasses__()
assert len(models) > 15
compiled = [model.__name__ for model in models if vars(model).get("__pydantic_complete__")]
print([name for name in ("torch", "vllm", "psutil") if name in sys.modules] + compiled)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    default_instances = ["AdamWConfig"] if command == "sft" else []  # its default has another learning rate
    assert result.stdout.splitlines()[-1:] == [str(default_instances)], result.stderr or result.stdout.splitlines()[-1]
    assert result.stdout.count(f"Usage: uv run {command}") == 2


def test_package_alone_imports_nothing_and_its_names_exist():
    code = """
import sys, prime_rl
print([name for name in ("pydantic", "torch", "transformers") if name in sys.modules])
print([name for name in prime_rl.__all__ if getattr(prime_rl, name).__name__ != name])
print([name for name in ("torch", "vllm") if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.stdout.splitlines() == ["[]", "[]", "[]"], result.stderr
