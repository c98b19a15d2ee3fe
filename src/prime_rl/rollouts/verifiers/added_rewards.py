"""Reward functions that the configuration adds to an environment (`env.rewards`), for both verifiers APIs.

A function gets the objects that its parameters name: `text` (the last reply), `completion`, `prompt`, `answer`, `info`,
`state`, and those that only one API has: the columns of the example (classic), `task` and `trace` (v1).
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prime_rl.configs.shared.environment_rewards import RewardConfig
from prime_rl.core.errors import ConfigError
from prime_rl.core.import_utils import load_function
from prime_rl.rollouts.group_failures import EnvironmentFailed, as_number, contain_failures
from prime_rl.rollouts.rendering.messages import last_reply, normalise
from prime_rl.rollouts.verifiers.signatures import call_parameters


def load_rewards(configs: Sequence[RewardConfig], env_id: str) -> list[tuple[Callable[..., Any], float]]:
    """Import the functions, with their weights. Each is named after its metric.

    Raises:
        ConfigError: a function cannot be imported, or two have the same name.
    """
    rewards: list[tuple[Callable[..., Any], float]] = []
    for index, config in enumerate(configs):
        function = load_function(config.import_path, f"env.rewards.{index}.import_path of environment {env_id!r}")
        named: Any = functools.partial(function, **config.kwargs)
        named.__name__ = config.label
        rewards.append((named, config.weight))
    check_names([config.label for config in configs], env_id)
    return rewards


def check_names(names: Sequence[str], env_id: str) -> None:
    """Raise ConfigError if two reward functions of an environment have the same name: their metric would be a sum."""
    if duplicates := [name for index, name in enumerate(names) if name in names[:index]]:
        raise ConfigError(
            f"environment {env_id!r} has two reward functions called {duplicates[0]!r}; set env.rewards.name of one"
        )


async def score_trace(
    rewards: Sequence[tuple[Callable[..., Any], float]],
    trace: Any,
    zero: bool,
    warn: Callable[[str, str], None],
) -> tuple[float, dict[str, float]]:
    """Return the sum of the weighted rewards of a v1 trace, and the value of each function.

    With `zero`, a function that raises, or returns no finite number, counts as 0. `warn` gets a topic and a warning for
    each failed function that has weight 0 or counts as 0.

    Raises:
        EnvironmentFailed: a function failed.
    """
    if not rewards:
        return 0.0, {}
    task = trace.task.data
    messages = normalise(trace.messages)
    first = next((index for index, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    objects = {
        "text": last_reply(messages),
        "prompt": messages[:first],
        "completion": messages[first:],
        "answer": getattr(task, "answer", ""),
        "info": getattr(task, "info", {}),
        "state": trace.state,
        "task": task,
        "trace": trace,
    }
    total, values = 0.0, dict[str, float]()
    for function, weight in rewards:
        name = function.__name__
        try:
            values[name] = await _call(function, objects)
        except EnvironmentFailed as failure:
            if weight != 0 and (not zero or failure.is_infrastructure):
                raise
            if weight:
                values[name] = 0.0
            consequence = "it counts as 0 (env.reward_errors)" if weight else "only its metric is missing"
            warn(f"reward {name}", f"{failure}; {consequence}")
        total += weight * values.get(name, 0.0)
    return total, values


async def _call(function: Callable[..., Any], objects: Mapping[str, Any]) -> float:
    name = f"reward function {function.__name__}"
    try:
        with contain_failures():
            value = function(**call_parameters(function).select(objects))
            return as_number(name, await value if inspect.isawaitable(value) else value)
    except EnvironmentFailed as error:
        message = f"{name} raised {error}" if error.__cause__ is not None else str(error)
        raise EnvironmentFailed(message, error.is_infrastructure) from error
