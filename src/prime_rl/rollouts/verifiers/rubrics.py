"""Scores a group with its rubric: a reward function that raises or returns no number fails, it never counts as 0.

The rubrics of verifiers call reward functions through `RewardCall`; see `classic_patches`.
"""

import asyncio
import functools
import inspect
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from verifiers.rubrics.rubric import Rubric
from verifiers.rubrics.rubric_group import RubricGroup

from prime_rl.rollouts.group_failures import EnvironmentFailed, WorkerUnusable, as_number, contain_failures
from prime_rl.rollouts.rendering.messages import last_reply, normalise
from prime_rl.rollouts.verifiers.signatures import call_parameters

Check = Callable[[str, Any], Any]

_OF_STATE: dict[str, Callable[[Any], Any]] = {
    "state": lambda state: state,
    "prompt": lambda state: state["prompt"],
    "completion": lambda state: state["completion"],
    "answer": lambda state: state.get("answer", ""),
    "info": lambda state: state.get("info", {}),
}
"""The objects that `Rubric.score_objects` takes from a state, as it does."""


@dataclass(slots=True)
class Scoring:
    """The failures of reward functions while one group is scored; see `score_group`.

    Attributes:
        failures: with the id of the state; None for the whole group.
        unknown: states and names of metrics without a value.
        zeros: number of failed functions that count 0, by id of the state.
    """

    zero: bool
    warn: Callable[[str, str], None]
    failures: list[tuple[int | None, EnvironmentFailed]] = field(default_factory=list)
    unknown: list[tuple[Any, str]] = field(default_factory=list)
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
    scoring = Scoring(zero, warn)
    token = _scoring.set(scoring)
    try:
        with contain_failures():
            await rubric.score_group(states)
    finally:
        _scoring.reset(token)
    for state, name in scoring.unknown:
        state["metrics"].pop(name, None)
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


class RewardCall:
    """A call of a reward function while its group is scored. Await it, or pass it to `gather_calls`.

    Attributes:
        parameters: of the function.
    """

    __slots__ = ("_check", "_func", "_instead", "_objects", "_rubric", "_scoring", "_states", "parameters")

    def __init__(
        self, scoring: Scoring, rubric: Any, func: Callable[..., Any], states: Sequence[Any], is_group: bool = False
    ) -> None:
        """Describe the call of `func` for one state, or for a group."""
        self.parameters = call_parameters(func)
        self._scoring, self._rubric, self._func, self._states = scoring, rubric, func, states
        self._check: Check = functools.partial(_as_numbers, len(states)) if is_group else as_number
        self._instead = [0.0] * len(states) if is_group else 0.0

    def __await__(self) -> Generator[Any, None, Any]:
        value = self.begin()
        return (yield from value.__await__()) if isinstance(value, Coroutine) else value

    def begin(self) -> Any:
        """Call the function; return its value, or a coroutine that returns it if it has to wait.

        A failure is recorded, and the value is that of a failed function.
        """
        objects = self._objects_of_group() if isinstance(self._instead, list) else self._objects_of_state()
        started = time.monotonic()
        try:
            with contain_failures():
                value = self._func(**self.parameters.select(objects))
                if self.parameters.is_coroutine and not self.parameters.may_suspend:
                    value = _run_to_end(value)
                if inspect.isawaitable(value):
                    return self._finish(value, started)
                return self._checked(value, started)
        except EnvironmentFailed as error:
            return self._failed(error)

    def _objects_of_group(self) -> Mapping[str, Any]:
        objects: Mapping[str, Any] = self._rubric.group_score_objects(self._states)
        return objects

    def _objects_of_state(self) -> Mapping[str, Any]:
        """Return `Rubric.score_objects` of the state; only those that the function takes if they are of the state."""
        rubric, (state,), names = self._rubric, self._states, self.parameters.names
        if (
            self.parameters.takes_all
            or not names <= _OF_STATE.keys()
            or getattr(rubric.score_objects, "__func__", None) is not Rubric.score_objects
            or rubric.score_object_providers
            or not names.isdisjoint(rubric.class_objects)
        ):
            objects: Mapping[str, Any] = rubric.score_objects(state)
            return objects
        return {name: _OF_STATE[name](state) for name in names}

    async def _finish(self, awaitable: Awaitable[Any], started: float) -> Any:
        try:
            with contain_failures():
                return self._checked(await awaitable, started)
        except EnvironmentFailed as error:
            return self._failed(error)

    def _checked(self, value: Any, started: float) -> Any:
        value = self._check(self._name, value)
        _check_wait(self._func, self._name, time.monotonic() - started)
        _check_process_pool(self._func)
        return value

    def _failed(self, error: EnvironmentFailed) -> Any:
        message = f"{self._name} raised {error}" if error.__cause__ is not None else str(error)
        failure = EnvironmentFailed(message, error.is_infrastructure)
        self._scoring.failed(self._func, self._states, _weight(self._rubric, self._func), failure)
        return self._instead

    @property
    def _name(self) -> str:
        return f"reward function {getattr(self._func, '__name__', repr(self._func))}"


async def gather_calls(*calls: Any) -> list[Any]:
    """Return the values of awaitables as `asyncio.gather` does, without a task for a `RewardCall` that cannot wait."""
    values = [
        call.begin() if isinstance(call, RewardCall) and not call.parameters.may_suspend else call for call in calls
    ]
    waiting = [index for index, value in enumerate(values) if inspect.isawaitable(value)]
    if waiting:
        for index, value in zip(waiting, await asyncio.gather(*(values[index] for index in waiting)), strict=True):
            values[index] = value
    return values


def _run_to_end(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError(f"{coroutine!r} waits although it has no await")


def scoring_now() -> Scoring | None:
    """Return the scoring that the current task is part of."""
    return _scoring.get()


def _weight(rubric: Any, func: Any) -> float:
    """Return the maximum weight of a function in a rubric."""
    pairs = zip(rubric.funcs, rubric.weights, strict=True)
    return max((abs(weight) for other, weight in pairs if other == func), default=1.0)


def _as_numbers(count: int, name: str, values: Any) -> list[float]:
    if isinstance(values, str | bytes) or not hasattr(values, "__len__") or len(values) != count:
        raise EnvironmentFailed(f"{name} returned {values!r:.80} for a group of {count}")
    return [as_number(name, value) for value in values]


def _check_wait(func: Callable[..., Any], name: str, elapsed_s: float) -> None:
    """Raise instead of the 0 that `MathRubric` counts for an answer that waited too long for its process pool."""
    limit_s = getattr(getattr(func, "__self__", None), "HARD_TIMEOUT_SECONDS", None)
    if limit_s is not None and elapsed_s >= limit_s:
        raise EnvironmentFailed(f"{name} did not end within {limit_s:.0f} s: its process pool is too busy")


def _check_process_pool(func: Callable[..., Any]) -> None:
    """Exit this worker if the process pool of `func` is broken.

    `MathRubric` would count 0 for every later answer, because its pool does not restart. A new worker has a new pool.
    """
    executor = getattr(getattr(func, "__self__", None), "executor", None)
    if broken := getattr(executor, "_broken", False):
        raise WorkerUnusable(f"the process pool of {func!r} is broken: {broken}")
