"""The HTTP process decides about policies without torch and vllm."""

import subprocess
import sys


def test_modules_of_the_server_import_neither_torch_nor_vllm():
    modules = (
        "request_layer, routes, server, node_registry, policy.engine_group, policy.named_adapters, "
        "policy.policy_manager, policy.weight_checks, vllm.engine_arguments"
    )
    names = [f"prime_rl.inference.{name}" for name in modules.split(", ")]
    code = f"import sys; import {', '.join(names)}; print({{'torch', 'vllm'}} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
