"""Scores a group with its rubric: a reward function that raises or returns no number fails, it never counts as 0.

`patch_verifiers` replaces private names of one release of verifiers' classic API, which it checks.

Correctness: `Rubric._call_individual_reward_func` and `Rubric._call_group_reward_func` catch all exceptions of a reward
function and of `float()` of its value, log them and count 0. Both are replaced on the class by `call_checked`, so
rubrics inside a `RubricGroup` or `EnvGroup` and functions that are added later are included. Without it this fails:
tests/unit/rollouts/test_verifiers_classic.py::test_a_reward_that_is_none_is_an_error

CPU time, with unchanged results; without them the tests of test_classic_patches.py fail:

- signatures of functions are read once instead of at each call of a reward function, stop condition or handler;
- a reward function that does not wait runs without a task;
- the tokens of a response are parsed in the event loop instead of a thread: they are views, nothing is computed;
- rows of plain JSON values are copied without `copy.deepcopy`.
"""

import asyncio
import functools
import inspect
import itertools
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence, Set
from contextvars import ContextVar
from copy import copy, deepcopy
from dataclasses import dataclass, field
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

from verifiers.envs import environment
from verifiers.envs.env_group import ENV_GROUP_INFO_KEY as ENV_GROUP_INFO_KEY
from verifiers.envs.env_group import EnvGroupRubric as EnvGroupRubric
from verifiers.rubrics import rubric as rubric_module
from verifiers.rubrics.rubric import Rubric
from verifiers.rubrics.rubric_group import RubricGroup
from verifiers.utils import async_utils, message_utils, response_utils

from prime_rl.core.errors import ConfigError
from prime_rl.rollouts.environment_backend import (
    LAST_CLASSIC,
    CallParameters,
    call_parameters,
    signature,
    split_scores,
)
from prime_rl.rollouts.group_attempts import (
    ZERO_HINT,
    EnvironmentFailed,
    WorkerUnusable,
    as_number,
    contain_failures,
    reward_failure,
)
from prime_rl.rollouts.rendering.messages import last_reply, normalise
from prime_rl.rollouts.separate.message_dicts import patch_messages, use_message_dicts


@dataclass(slots=True)
class Scoring:
    """The failures of reward functions while one group is scored; see `score_group`.

    Attributes:
        failures: with the id of the state; None for the whole group.
        unknown: states and names of metrics without a value.
        metrics: states and further metrics of a function that returns a dictionary.
        zeros: number of failed functions that count 0, by id of the state.
    """

    zero: bool
    warn: Callable[[str, str], None]
    failures: list[tuple[int | None, EnvironmentFailed]] = field(default_factory=list)
    unknown: list[tuple[Any, str]] = field(default_factory=list)
    metrics: list[tuple[Any, dict[str, float]]] = field(default_factory=list)
    zeros: Counter[int] = field(default_factory=Counter)

    def failed(self, func: Any, states: Sequence[Any], weight: float, failure: EnvironmentFailed) -> None:
        """Record the failure of a function for the states that it was called with."""
        if weight == 0:
            self.warn(f"metric {func.__name__}", f"{failure}; it has weight 0, so only its metric is missing")
            self.unknown += [(state, func.__name__) for state in states]
        elif self.zero and not failure.is_infrastructure:
            self.warn(f"reward {func.__name__}", f"{failure}; it counts as 0 (env.reward_errors)")
            self.zeros.update(map(id, states))
        else:
            if not failure.is_infrastructure:
                failure = EnvironmentFailed(f"{failure} {ZERO_HINT}")
            self.failures.append((id(states[0]) if len(states) == 1 else None, failure))


_scoring: ContextVar[Scoring | None] = ContextVar("scoring", default=None)


async def score_group(
    rubric: Rubric,
    states: Sequence[Any],
    zero: bool = False,
    warn: Callable[[str, str], None] = lambda topic, message: None,
) -> dict[int, EnvironmentFailed]:
    """Score the states of one group, in place.

    With `zero`, a reward function that raises, or returns no finite number, counts as 0, except for infrastructure
    failures. The metric `reward_errors` counts them. `warn` gets a topic and a warning for each failed function that
    has weight 0 or counts as 0.

    Returns:
        The failures of single rollouts, by index.

    Raises:
        EnvironmentFailed: a function of the whole group raised, or did not return a list of finite numbers.
    """
    _prepare(rubric)
    for state in states:
        use_message_dicts(state)
    scoring = Scoring(zero, warn)
    token = _scoring.set(scoring)
    try:
        with contain_failures():
            await rubric.score_group(states)
    finally:
        _scoring.reset(token)
    for state, name in scoring.unknown:
        (state["metrics"] or {}).pop(name, None)
    for state, metrics in scoring.metrics:
        state["metrics"] = {**(state["metrics"] or {}), **metrics}
    failures: dict[int, EnvironmentFailed] = {}
    place = {id(state): index for index, state in enumerate(states)}
    for identity, failure in scoring.failures:
        if identity is None:
            raise failure
        failures.setdefault(place[identity], failure)
    if zero:
        for state in states:
            state["metrics"]["reward_errors"] = float(scoring.zeros[id(state)])
    return failures


def with_rewards(rubric: Any, rewards: Sequence[tuple[Callable[..., Any], float]]) -> Any:
    """Return a rubric that scores with `rubric` (None: no rubric) and with further functions of given weights.

    These functions may also take `text`, the last reply, or `texts` for a whole group.
    """
    if not rewards:
        return rubric
    functions, weights = zip(*rewards, strict=True)
    added = Rubric(funcs=list(functions), weights=list(weights), parser=getattr(rubric, "parser", None))
    added.class_objects = {**getattr(rubric, "class_objects", {}), **added.class_objects}
    added.add_score_object_provider(lambda state: {"text": _text(state)})
    added.add_group_score_object_provider(lambda states: {"texts": list(map(_text, states))})
    return added if rubric is None else RubricGroup([rubric, added])


def group_rubric(rubric: Any, inner: Rubric | None) -> Any:
    """Return the rubric of an `EnvGroup`, with the one of the environment that ran in place of its `EnvGroupRubric`.

    `EnvGroupRubric` adds a 0 for each metric of the other environments, ignores functions that are added to it, and
    fails in nested groups.
    """
    if type(rubric) is EnvGroupRubric:
        if not rubric.funcs:
            return inner
        added = copy(rubric)
        added.__class__ = Rubric
        return added if inner is None else RubricGroup([inner, added])
    if not counts_environments(rubric):
        return rubric
    changed = copy(rubric)
    changed.rubrics = [part for each in rubric.rubrics if (part := group_rubric(each, inner)) is not None]
    return changed if changed.rubrics else None


def counts_environments(rubric: Any) -> bool:
    """Return whether the rubric of an `EnvGroup` contains the one that scores its environments."""
    if isinstance(rubric, RubricGroup):
        return any(map(counts_environments, rubric.rubrics))
    return type(rubric) is EnvGroupRubric


def scores_jointly(rubric: Any) -> bool:
    """Return whether the reward of a rollout may depend on the others of its group."""
    if rubric is None or type(rubric).score_group not in (Rubric.score_group, RubricGroup.score_group):
        return rubric is not None
    return bool(rubric.has_group_rewards) or any(map(scores_jointly, getattr(rubric, "rubrics", ())))


def reward_weights(rubric: Any) -> dict[str, float]:
    """Return the weight of each reward function by the name of its metric, for display.

    Functions of one name share a metric, whose parts are unknown, so they are left out.
    """
    pairs = list(_weighted(rubric))
    counts = Counter(name for name, _ in pairs)
    return {name: weight for name, weight in pairs if counts[name] == 1}


def _weighted(rubric: Any) -> Iterator[tuple[str, float]]:
    for function, weight in zip(getattr(rubric, "funcs", ()), getattr(rubric, "weights", ()), strict=False):
        yield function.__name__, float(weight)
    for inner in getattr(rubric, "rubrics", ()):
        yield from _weighted(inner)


def _text(state: Any) -> str:
    completion = state["completion"]
    return completion if isinstance(completion, str) else last_reply(normalise(completion))


def _prepare(rubric: Any) -> None:
    """Work around two limits of `Rubric.score_group`.

    It never calls a `score_rollout` that a subclass overrides, and requires every function to have a name.
    """
    for inner in getattr(rubric, "rubrics", ()):
        _prepare(inner)
    _name_functions(rubric.funcs)
    defining = next(kind for kind in type(rubric).__mro__ if {"score_rollout", "score_group"} & vars(kind).keys())
    if "score_group" not in vars(defining):

        async def score_each(states: Sequence[Any]) -> None:
            await asyncio.gather(*(rubric.score_rollout(state) for state in states))

        rubric.score_group = score_each


def _name_functions(funcs: Sequence[Any]) -> None:
    """Give functions without a name, such as `functools.partial`, a unique one; metrics are named after it."""
    names = {func.__name__ for func in funcs if hasattr(func, "__name__")}
    for func in funcs:
        if hasattr(func, "__name__"):
            continue
        inner = func
        while isinstance(inner, functools.partial):
            inner = inner.func
        name = getattr(inner, "__name__", type(inner).__name__)
        candidates = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
        func.__name__ = next(free for free in candidates if free not in names)
        names.add(func.__name__)


def has_cleanup(rubric: Any) -> bool:
    """Return whether `rubric.cleanup` does anything."""
    if rubric._cleanup_handlers or "cleanup" in vars(rubric):
        return True
    if type(rubric).cleanup not in (Rubric.cleanup, RubricGroup.cleanup):
        return True
    return any(has_cleanup(inner) for inner in getattr(rubric, "rubrics", ()))


async def call_checked(
    scoring: Scoring, rubric: Any, func: Callable[..., Any], states: Sequence[Any], is_group: bool
) -> Any:
    """Call a reward function for one state, or for a group; return its value, or values.

    A failure is recorded, and the value is 0.
    """
    name = f"reward function {func.__name__}"
    started, parameters = time.monotonic(), call_parameters(func)

    def checked(value: Any) -> Any:
        if is_group:
            value = _as_numbers(len(states), name, value)
        elif isinstance(value, Mapping):
            value = _record_scores(scoring, rubric, func, states[0], value)
        else:
            value = as_number(name, value)
        _check_wait(func, name, time.monotonic() - started)
        _check_process_pool(func)
        return value

    try:
        with contain_failures():
            objects = rubric.group_score_objects(states) if is_group else _objects(rubric, states[0], parameters)
            value = func(**parameters.select(objects))
            if not inspect.isawaitable(value):
                return checked(value)
        if not parameters.never_waits:
            await asyncio.sleep(0)  # `gather_values` makes a task of the rest
        with contain_failures():
            return checked(await value)
    except EnvironmentFailed as error:
        scoring.failed(func, states, _weight(rubric, func), reward_failure(name, error))
        return [0.0] * len(states) if is_group else 0.0


def _record_scores(scoring: Scoring, rubric: Any, func: Any, state: Any, value: Mapping[Any, Any]) -> float:
    """Record the metrics that a function returned; return its reward, 0 without one."""
    reward, metrics = split_scores(func, value, _weight(rubric, func), scoring.warn)
    scoring.metrics.append((state, metrics))
    if reward is None:
        scoring.unknown.append((state, func.__name__))
    return reward or 0.0


async def gather_values(*calls: Any) -> list[Any]:
    """Return the results as `asyncio.gather`, with a task only for a call that waits.

    Other tasks run between slow calls.
    """
    results, tasks, turn = [], {}, time.monotonic()
    try:
        for index, call in enumerate(calls):
            result = None
            try:
                if getattr(call, "cr_code", None) is call_checked.__code__:
                    call.send(None)
                tasks[index] = asyncio.ensure_future(call)
            except StopIteration as end:
                result = end.value
            results.append(result)
            if time.monotonic() - turn > _TURN_SECONDS:
                await asyncio.sleep(0)
                turn = time.monotonic()
    except BaseException:
        for task in tasks.values():
            task.cancel()
        for call in calls[len(results) :]:
            call.close()
        raise
    for index, value in zip(tasks, await asyncio.gather(*tasks.values()), strict=True):
        results[index] = value
    return results


_TURN_SECONDS = 0.01
"""Time after which the other tasks of the worker get a turn."""


def _objects(rubric: Any, state: Any, parameters: CallParameters) -> Mapping[str, Any]:
    """Return `rubric.score_objects`, only those that the function takes if they are parts of the state."""
    names = parameters.names
    if (
        parameters.takes_all
        or not names <= _OF_STATE.keys()
        or rubric.score_object_providers
        or not names.isdisjoint(rubric.class_objects)
        or getattr(rubric.score_objects, "__func__", None) is not Rubric.score_objects
    ):
        objects: Mapping[str, Any] = rubric.score_objects(state)
        return objects
    return {name: _OF_STATE[name](state) for name in names}


_OF_STATE: dict[str, Callable[[Any], Any]] = {
    "state": lambda state: state,
    "prompt": lambda state: state["prompt"],
    "completion": lambda state: state["completion"],
    "answer": lambda state: state.get("answer", ""),
    "info": lambda state: state.get("info", {}),
}
"""The objects that `Rubric.score_objects` takes from a state."""


def _weight(rubric: Any, func: Any) -> float:
    """Return the maximum weight of a function in a rubric."""
    pairs = zip(rubric.funcs, rubric.weights, strict=True)
    return max((abs(weight) for other, weight in pairs if other == func), default=1.0)


def _as_numbers(count: int, name: str, values: Any) -> list[float]:
    is_ordered = hasattr(values, "__len__") and not isinstance(values, str | bytes | Mapping | Set)
    if not is_ordered or len(values) != count:
        raise EnvironmentFailed(f"{name} returned {values!r:.80} for a group of {count}")
    return [as_number(name, value) for value in values]


def _check_wait(func: Callable[..., Any], name: str, elapsed_seconds: float) -> None:
    """Raise instead of the 0 that `MathRubric` counts for an answer that waited too long for its process pool."""
    limit_seconds = getattr(getattr(func, "__self__", None), "HARD_TIMEOUT_SECONDS", None)
    if limit_seconds is not None and elapsed_seconds >= limit_seconds:
        raise EnvironmentFailed(f"{name} did not end within {limit_seconds:.0f} s: its process pool is too busy")


def _check_process_pool(func: Callable[..., Any]) -> None:
    """Exit this worker if the process pool of `func` is broken.

    `MathRubric` would count 0 for every later answer, because its pool does not restart. A new worker has a new pool.
    """
    executor = getattr(getattr(func, "__self__", None), "executor", None)
    if broken := getattr(executor, "_broken", False):
        raise WorkerUnusable(f"the process pool of {func!r} is broken: {broken}")


_ORIGINALS = {
    environment: ("maybe_call_with_named_args", "deepcopy"),
    async_utils: ("maybe_call_with_named_args",),
    rubric_module: ("maybe_call_with_named_args", "inspect", "asyncio"),
    message_utils: ("normalize_messages", "maybe_normalize_messages"),
    response_utils: ("asyncio", "parse_response_message"),
    Rubric: ("_call_individual_reward_func", "_call_group_reward_func", "score_objects", "group_score_objects"),
}
"""The names that are replaced or called, by their owner."""


def patch_verifiers() -> None:
    """Patch verifiers, once.

    Raises:
        ConfigError: another release than the one that the patches are written for is installed.
    """
    if hasattr(Rubric, "_prime_rl_patched"):
        return
    lacking = [name for owner, names in _ORIGINALS.items() for name in names if not hasattr(owner, name)]
    if lacking or (installed := version("verifiers")) != LAST_CLASSIC:
        found = f"lacks {lacking[0]}" if lacking else f"is {installed}"
        raise ConfigError(
            f"environments of the classic API need verifiers {LAST_CLASSIC}, but the installed release {found}; "
            f"run `uv pip install verifiers=={LAST_CLASSIC}`"
        )
    Rubric._prime_rl_patched = True
    _patch_reward_calls(Rubric)
    patch_messages()
    rubric_module.inspect = SimpleNamespace(signature=signature)
    rubric_module.asyncio = SimpleNamespace(gather=gather_values)
    response_utils.asyncio = SimpleNamespace(to_thread=_call)
    environment.deepcopy = copy_plain
    for module in (environment, async_utils, rubric_module):
        module.maybe_call_with_named_args = call_with_named_args


def _patch_reward_calls(kind: Any) -> None:
    call_one, call_group = kind._call_individual_reward_func, kind._call_group_reward_func

    def call_one_checked(self: Any, func: Callable[..., Any], state: Any) -> Coroutine[Any, Any, Any]:
        if (scoring := _scoring.get()) is None:
            return call_one(self, func, state)
        return call_checked(scoring, self, func, [state], is_group=False)

    def call_group_checked(self: Any, func: Callable[..., Any], states: Sequence[Any]) -> Coroutine[Any, Any, Any]:
        if (scoring := _scoring.get()) is None:
            return call_group(self, func, states)
        return call_checked(scoring, self, func, states, is_group=True)

    kind._call_individual_reward_func = call_one_checked
    kind._call_group_reward_func = call_group_checked


async def call_with_named_args(func: Callable[..., Any], **objects: Any) -> Any:
    """Call a function with those of the objects that it has parameters for, and await an awaitable result."""
    result = func(**call_parameters(func).select(objects))
    return await result if inspect.isawaitable(result) else result


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
