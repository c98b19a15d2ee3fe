"""What decides about policies needs neither torch nor vllm."""

import subprocess
import sys


def test_pure_modules_import_neither_torch_nor_vllm() -> None:
    modules = (
        "adapters, arguments, canary, engine, lease, link, model, named_adapters, nodes, policy, requests, routes, "
        "salt, server, version_header, weights"
    )
    code = f"import sys; from prime_rl.inference import {modules}; print({{'torch', 'vllm'}} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
