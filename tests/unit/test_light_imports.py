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
    "prime_rl.supervisor.planning.plan_changes",
    "prime_rl.entrypoints.orchestrator",
    "prime_rl.api.run",
    "prime_rl.api.guides",
]


def run(code):
    """Run a program in a new process; return the lines that it prints."""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_import_loads_neither_torch_nor_vllm():
    code = f"""
import importlib, sys, prime_rl
print([name for name in ("pydantic", "torch", "transformers") if name in sys.modules])
for module in {MODULES}:
    importlib.import_module(module)
    assert not {{"torch", "vllm", "wandb"}} & sys.modules.keys(), module
print([name for name in prime_rl.__all__ if getattr(prime_rl, name).__name__ != name])
print([name for name in ("torch", "vllm") if name in sys.modules])
"""
    assert run(code) == ["[]", "[]", "[]"]


HELP = """
import contextlib, sys
from prime_rl.configs.loading.base_config import BaseConfig
from prime_rl.entrypoints import COMMAND
for option in ("-h", "--help-all"):
    sys.argv = ["COMMAND", option]
    with contextlib.suppress(SystemExit):
        COMMAND.main()
models = [BaseConfig]
for model in models:
    models += model.__subclasses__()
assert len(models) > 15
compiled = [model.__name__ for model in models if vars(model).get("__pydantic_complete__")]
print([name for name in ("torch", "vllm", "psutil") if name in sys.modules] + compiled)
"""


@pytest.mark.extended(after=2)
@pytest.mark.parametrize("command", ["rl", "sft", "trainer", "orchestrator", "inference", "eval", "synthesize"])
def test_help_loads_no_torch_and_compiles_no_validator(command):
    lines = run(HELP.replace("COMMAND", command))
    default_instances = ["AdamWConfig"] if command == "sft" else []  # its default has another learning rate
    assert lines[-1:] == [str(default_instances)]
    assert sum(line.startswith(f"Usage: uv run {command}") for line in lines) == 2
