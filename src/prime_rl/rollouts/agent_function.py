"""Agents outside the sandbox: a coroutine function of the user in the worker, or programs that ask a `gateway`.

Either is called once per rollout, in place of the harness of a v1 taskset (`FunctionHarness`), and speaks to the model
at `base_url` like any program.
"""

import asyncio
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp

from prime_rl.configs.environment import EnvConfig
from prime_rl.core.api_key import GATEWAY_KEY_VAR, read_api_key
from prime_rl.core.errors import ConfigError
from prime_rl.core.http_requests import answers
from prime_rl.core.import_utils import load_function
from prime_rl.rollouts.environment_backend import CallParameters, call_parameters
from prime_rl.rollouts.group_attempts import EnvironmentFailed, as_number
from prime_rl.rollouts.separate.values import AGENT_VALUES, GATEWAY_ENDED, OWN_METRICS, CallAgent

_RETRY_SECONDS = 1.0
_SILENCE_SECONDS = 60.0
"""A gateway writes every 10 s."""


def check_gateway(config: EnvConfig) -> None:
    """Raise ConfigError if the environment has a gateway that does not answer; later, its rollouts wait for it."""
    if config.gateway is not None and not answers(f"{config.gateway.rstrip('/')}/health"):
        raise ConfigError(f"env.gateway of environment {config.id!r}: {_no_answer(config.gateway)}")


def _no_answer(gateway: str) -> str:
    return f"{gateway} does not answer; start it with `gateway`"


def load_agent(config: EnvConfig, warn: Callable[[str, str], None]) -> CallAgent | None:
    """Return what calls the agent of an environment; None if it has none, or a program. `warn`: `EnvironmentBackend`.

    Raises:
        ConfigError: the function cannot be imported, is no coroutine function, or takes what no agent gets.
    """
    if config.gateway is not None:
        return _gateway_agent(config, config.gateway, warn)
    if config.agent is None:
        return None
    key = f"env.agent of environment {config.id!r}"
    function = load_function(config.agent, key)
    what = f"{key} = {config.agent!r}"
    if not inspect.iscoroutinefunction(function) and not inspect.iscoroutinefunction(type(function).__call__):
        raise ConfigError(f"{what} is {_describe(function)}")
    parameters = call_parameters(function)
    _check_parameters(parameters, what)
    own = function.keywords if isinstance(function, functools.partial) else {}

    async def call(values: Mapping[str, Any]) -> dict[str, float]:
        returned = await function(**{**parameters.select(values), **own})
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise asyncio.CancelledError  # it has caught that of its time limit
        return _numbers(returned)

    return call


def _describe(function: Any) -> str:
    """Return what is not a coroutine function, and what to do."""
    if inspect.isclass(function):
        return "a class; name an `async def` function, or an object with an `async def __call__`"
    if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        return "a generator; return the reward instead of yielding"
    return "no `async def` function; wrap it with asyncio.to_thread"


def _check_parameters(parameters: CallParameters, what: str) -> None:
    for each in parameters.signature.parameters.values():
        if each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL):
            continue
        is_given = each.name in AGENT_VALUES and each.kind is not each.POSITIONAL_ONLY
        if not is_given and each.default is each.empty:
            raise ConfigError(f"{what} takes {each.name!r}; an agent gets {', '.join(AGENT_VALUES)}, by their names")


def _numbers(returned: Any) -> dict[str, float]:
    """Return `reward` and metrics from what an agent returned: a number, a dict of numbers, or None."""
    if returned is None:
        return {}
    given = dict(returned) if isinstance(returned, Mapping) else {"reward": returned}
    if given.get("reward", 0) is None:
        del given["reward"]
    if own := [name for name in OWN_METRICS if name in given]:
        raise EnvironmentFailed(f"the agent returned {own[0]!r}, which is a metric of prime-rl")
    return {str(name): as_number(f"what the agent returned as {name!r}", value) for name, value in given.items()}


def _gateway_agent(config: EnvConfig, gateway: str, warn: Callable[[str, str], None]) -> CallAgent:
    """Return what offers a rollout to a gateway, and awaits the report of an agent."""
    url, key = gateway.rstrip("/"), read_api_key(GATEWAY_KEY_VAR)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    async def call(values: Mapping[str, Any]) -> dict[str, float]:
        if values["mcp_urls"]:
            raise EnvironmentFailed("the task has tools, which agents behind a gateway cannot reach")
        shown = {name: values[name] for name in ("messages", "prompt", "task", "model", "role")}
        offer = {
            "values": {"environment": config.label, **shown},
            "endpoint": values["base_url"],
            "secret": values["api_key"],
        }
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=_SILENCE_SECONDS)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
            while True:
                try:
                    async with session.post(f"{url}/offers", json=offer) as response:
                        answer = await response.json()
                    break
                except aiohttp.ClientConnectorError:  # it starts again; the rollout has a time limit
                    warn("gateway", f"{_no_answer(gateway)}; rollouts wait for it")
                    await asyncio.sleep(_RETRY_SECONDS)
                except (aiohttp.ClientError, ValueError) as error:
                    raise ConnectionError(f"{GATEWAY_ENDED}: {error!r}") from error
        if "numbers" not in answer:
            raise EnvironmentFailed(answer.get("failure") or f"the gateway: {answer['error']['message']}")
        return _numbers(answer["numbers"])

    return call
