"""The patches of verifiers' classic API; they replace private names of one release, which `apply` checks.

Correctness: `Rubric._call_individual_reward_func` and `Rubric._call_group_reward_func` catch all exceptions of a reward
function and of `float()` of its value, log them and count 0. Both are replaced on the class, so that rubrics inside a
`RubricGroup` or `EnvGroup` and functions that are added later are included. Without it this test fails:
tests/unit/rollouts/test_verifiers_classic.py::test_a_reward_that_is_none_is_an_error

CPU time, with unchanged results; without them the tests of test_classic_patches.py fail:

- signatures of functions are read once instead of at each call of a reward function, stop condition or handler;
- a reward function that does not wait runs without an asyncio task per state;
- the tokens of a response are parsed in the event loop instead of a thread: they are views, nothing is computed;
- rows of plain JSON values are copied without `copy.deepcopy`.
"""

import inspect
from collections.abc import Awaitable, Callable, Sequence
from copy import deepcopy
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

from verifiers.envs import environment
from verifiers.rubrics import rubric
from verifiers.utils import async_utils, response_utils

from prime_rl.core.errors import ConfigError
from prime_rl.rollouts.environment_backend import LAST_CLASSIC
from prime_rl.rollouts.verifiers import rubrics, signatures

_ORIGINALS = {
    environment: ("maybe_call_with_named_args", "deepcopy"),
    async_utils: ("maybe_call_with_named_args",),
    rubric: ("maybe_call_with_named_args", "inspect", "asyncio"),
    response_utils: ("asyncio",),
    rubric.Rubric: ("_call_individual_reward_func", "_call_group_reward_func", "score_objects", "group_score_objects"),
}
"""The names that are replaced or called, by their owner."""


def apply() -> None:
    """Patch verifiers, once.

    Raises:
        ConfigError: another release than the one that the patches are written for is installed.
    """
    if hasattr(rubric.Rubric, "_prime_rl_patched"):
        return
    lacking = [name for owner, names in _ORIGINALS.items() for name in names if not hasattr(owner, name)]
    if lacking or (installed := version("verifiers")) != LAST_CLASSIC:
        found = f"lacks {lacking[0]}" if lacking else f"is {installed}"
        raise ConfigError(
            f"environments of the classic API need verifiers {LAST_CLASSIC}, but the installed release {found}; "
            f"run `uv pip install verifiers=={LAST_CLASSIC}`"
        )
    rubric.Rubric._prime_rl_patched = True
    _patch_reward_calls(rubric.Rubric)
    rubric.inspect = SimpleNamespace(signature=signatures.signature)
    rubric.asyncio = SimpleNamespace(gather=rubrics.gather_calls)
    response_utils.asyncio = SimpleNamespace(to_thread=_call)
    environment.deepcopy = copy_plain
    for module in (environment, async_utils, rubric):
        module.maybe_call_with_named_args = call_with_named_args


def _patch_reward_calls(kind: Any) -> None:
    call_one, call_group = kind._call_individual_reward_func, kind._call_group_reward_func

    def call_one_checked(self: Any, func: Callable[..., Any], state: Any) -> Awaitable[Any]:
        scoring = rubrics.scoring_now()
        return call_one(self, func, state) if scoring is None else rubrics.RewardCall(scoring, self, func, [state])

    def call_group_checked(self: Any, func: Callable[..., Any], states: Sequence[Any]) -> Awaitable[Any]:
        scoring = rubrics.scoring_now()
        if scoring is None:
            return call_group(self, func, states)
        return rubrics.RewardCall(scoring, self, func, states, is_group=True)

    kind._call_individual_reward_func = call_one_checked
    kind._call_group_reward_func = call_group_checked


async def call_with_named_args(func: Callable[..., Any], **objects: Any) -> Any:
    """Call a function with those of the objects that it has parameters for, and await an awaitable result."""
    parameters = signatures.call_parameters(func)
    result = func(**parameters.select(objects))
    return await result if parameters.is_coroutine or inspect.isawaitable(result) else result


def copy_plain(value: Any) -> Any:
    """Return a deep copy: directly for dictionaries, lists and immutable values, else by `copy.deepcopy`."""
    kind = type(value)
    if kind in _IMMUTABLE:
        return value
    if kind is dict and all(type(key) is str for key in value):
        return {key: copy_plain(inner) for key, inner in value.items()}
    if kind is list:
        return [copy_plain(inner) for inner in value]
    return deepcopy(value)


_IMMUTABLE = frozenset({str, int, float, bool, bytes, type(None)})


async def _call(func: Callable[[], Any]) -> Any:
    return func()
