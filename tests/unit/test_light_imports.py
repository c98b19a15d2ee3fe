"""The orchestrator and the configuration run where neither torch nor vllm is installed, or wanted in memory."""

import json
import subprocess
import sys

import pytest

MODULES = [
    "prime_rl.orchestrator.setup",
    "prime_rl.configs.rl",
    "prime_rl.configs.sft",
    "prime_rl.configs.eval",
    "prime_rl.monitor",
    "prime_rl.orchestrator.evals.offline",
    "prime_rl.orchestrator.evals.synthesis",
    "prime_rl.run.batch",
    "prime_rl.entrypoints.rl",
    "prime_rl.entrypoints.doctor",
    "prime_rl.entrypoints.orchestrator",
]


@pytest.mark.parametrize("module", MODULES)
def test_importing_loads_neither_torch_nor_vllm(module):
    code = f"import json, sys, {module}; print(json.dumps([m for m in ('torch', 'vllm') if m in sys.modules]))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1]) == []
