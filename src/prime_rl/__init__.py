"""prime-rl: asynchronous reinforcement learning of language models with a hard bound on staleness.

Layers, each of which imports only earlier ones: core < storage < liveness < configs < monitors < rollouts <
evaluation < orchestrator | trainer | inference < supervisor < entrypoints < api.
Orchestrator, trainer and inference are separate processes: they never import each other and exchange files (storage)
and HTTP requests. The names below are the Python API (docs/python_api.md); each is imported when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prime_rl.api.commands import evaluate as evaluate
    from prime_rl.api.commands import load_environment as load_environment
    from prime_rl.api.commands import sft as sft
    from prime_rl.api.guides import FSDP2Trainer as FSDP2Trainer
    from prime_rl.api.guides import Orchestrator as Orchestrator
    from prime_rl.api.guides import PrimeIntellectRLAdapter as PrimeIntellectRLAdapter
    from prime_rl.api.guides import SimpleSFTTrainer as SimpleSFTTrainer
    from prime_rl.api.guides import vLLMInference as vLLMInference
    from prime_rl.api.policy_client import PolicyClient as PolicyClient
    from prime_rl.api.policy_files import load_policy as load_policy
    from prime_rl.api.run import Run as Run
    from prime_rl.api.steps import Step as Step
    from prime_rl.core.errors import ConfigError as ConfigError
    from prime_rl.core.errors import RunError as RunError

_MODULES = {
    "Run": "api.run",
    "Step": "api.steps",
    "sft": "api.commands",
    "evaluate": "api.commands",
    "load_environment": "api.commands",
    "load_policy": "api.policy_files",
    "PolicyClient": "api.policy_client",
    "ConfigError": "core.errors",
    "RunError": "core.errors",
    "FSDP2Trainer": "api.guides",
    "vLLMInference": "api.guides",
    "Orchestrator": "api.guides",
    "SimpleSFTTrainer": "api.guides",
    "PrimeIntellectRLAdapter": "api.guides",
}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    """Import a name of the Python API."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
