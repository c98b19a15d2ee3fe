"""Loads an environment with the verifiers API that it is written for: classic `load_environment`, or v1 tasksets."""

import importlib.util
from collections.abc import Callable
from importlib.metadata import version

from prime_rl.configs.shared.blocks import EnvConfig
from prime_rl.core.errors import ConfigError, summarize_exception
from prime_rl.core.loopback import bypass_proxies
from prime_rl.core.types import Split
from prime_rl.rollouts.environment_backend import LAST_CLASSIC, EnvironmentBackend
from prime_rl.rollouts.environments.environment_id import find_environment
from prime_rl.rollouts.rendering.renderer import Renderer


def load(
    config: EnvConfig,
    renderer: Renderer | None,
    split: Split,
    keep_messages: bool = False,
    warn: Callable[[str], None] | None = None,
) -> EnvironmentBackend:
    """Load an environment. A module with `load_environment` is a classic one.

    Args:
        config: the environment.
        renderer: converts between messages and tokens; None if the server renders and is a `ChatServer`.
        split: which examples.
        keep_messages: make every rollout a `Conversation`, as always with a `ChatServer`.
        warn: gets warnings about the environment, now and later.

    Raises:
        ConfigError: there is none, it rejects its arguments, or needs another verifiers release.
    """
    bypass_proxies()  # of the policy endpoint, and of the tool servers of a taskset
    found = find_environment(config.id)
    has_classic_api = importlib.util.find_spec("verifiers.legacy") is not None
    needs_classic_api = ConfigError(
        f"environment {config.id!r} uses the classic API, which verifiers {version('verifiers')} does not have; "
        f"run `uv pip install verifiers=={LAST_CLASSIC}`"
    )
    try:
        module = found.load()
    except Exception as error:  # foreign code may raise anything
        if isinstance(error, AttributeError | ImportError) and not has_classic_api:
            raise needs_classic_api from error
        reason = summarize_exception(error, full=True)
        raise ConfigError(f"environment {config.id!r} cannot be imported: {reason}") from error
    if not hasattr(module, "load_environment"):
        from prime_rl.rollouts.verifiers.verifiers_v1 import TasksetEnvironment

        return TasksetEnvironment(config, found.module, renderer, split, keep_messages, warn)
    if not has_classic_api:
        raise needs_classic_api
    from prime_rl.rollouts.verifiers.verifiers_classic import ClassicEnvironment

    return ClassicEnvironment(config, found.module, renderer, split, keep_messages, warn)
