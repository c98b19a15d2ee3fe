"""Rewards of verifiers' classic API in an interpreter of their own: failures are recorded instead of counted as 0."""

import asyncio
import contextlib
import contextvars
import functools
import inspect
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .values import NotANumber, Refused, describe, finite_number, was_cancelled

_REWARD_KEYS = ("reward", "score")


class Scoring:
    """What the reward functions of one group have done besides returning numbers.

    Attributes:
        metrics: further metrics of functions that return a dictionary, by id of the state.
        failures: as `score` returns them, with the id of the state; None for the whole group.
        unknown: names of metrics without a value, by id of the state.
    """

    def __init__(self) -> None:
        self.metrics: dict[int, dict[str, float]] = {}
        self.failures: list[tuple[int | None, dict[str, Any]]] = []
        self.unknown: dict[int, list[str]] = {}


current_scoring: contextvars.ContextVar[Scoring | None] = contextvars.ContextVar("scoring", default=None)


def semaphore(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the semaphore that 0.1.8 asks for."""
    return {"score_sem": contextlib.nullcontext()} if "score_sem" in inspect.signature(function).parameters else {}


def rubrics_in(rubric: Any) -> Iterator[Any]:
    """Yield a rubric and those in it."""
    yield rubric
    for inner in getattr(rubric, "rubrics", ()):
        yield from rubrics_in(inner)


def _weighted(rubric: Any) -> Iterator[tuple[Any, float]]:
    return zip(rubric.funcs, rubric.weights, strict=False)


def weights_of(rubric: Any) -> dict[str, float]:
    """Return the weight of each reward function by the name of its metric, for those that share it with no other."""
    pairs = [(func.__name__, float(weight)) for each in rubrics_in(rubric) for func, weight in _weighted(each)]
    names = [name for name, _ in pairs]
    return {name: weight for name, weight in pairs if names.count(name) == 1}


def scores_jointly(rubric: Any) -> bool:
    """Return whether the reward of a rollout may depend on the others of its group."""
    import verifiers as vf

    known = ("Rubric", "RubricGroup", "EnvGroupRubric")
    own = "score_group" in vars(rubric) and not isinstance(rubric.score_group, functools.partial)
    defining = next(kind for kind in type(rubric).__mro__ if "score_group" in vars(kind))
    is_known = defining.__name__ in known and defining.__module__.startswith(vf.__name__)
    return own or not is_known or any(map(rubric._is_group_func, rubric.funcs))


def prepare_rubrics(outer: Any) -> set[str]:
    """Let the failures of reward functions be recorded; return the names of their metrics.

    Verifiers requires every function to have a name, and never calls a `score_rollout` that a subclass overrides.
    """
    names = set[str]()
    for rubric in rubrics_in(outer):
        if not hasattr(rubric, "funcs"):
            raise Refused(f"its rubric {type(rubric).__name__} has no list `funcs` of reward functions")
        if not getattr(rubric, "_is_checked", False):
            given = {func.__name__ for func in rubric.funcs if hasattr(func, "__name__")}
            checked = []
            for func, weight in _weighted(rubric):
                name = name_of(func)
                if not hasattr(func, "__name__"):
                    numbered = (f"{name}_{number}" for number in itertools.count(2))
                    name = next(free for free in itertools.chain([name], numbered) if free not in given)
                    given.add(name)
                checked.append(_checked(func, name, weight, rubric._is_group_func(func)))
            rubric.funcs = checked
            rubric._is_checked = True
            defining = next(
                kind for kind in type(rubric).__mro__ if {"score_rollout", "score_group"} & vars(kind).keys()
            )
            if "score_group" not in vars(defining):
                rubric.score_group = functools.partial(_score_each, rubric)
        names.update(func.__name__ for func in rubric.funcs)
    return names


async def _score_each(rubric: Any, states: Sequence[Any], **_: Any) -> None:
    await asyncio.gather(*(rubric.score_rollout(state, **semaphore(rubric.score_rollout)) for state in states))


def _checked(func: Callable[..., Any], name: str, weight: float, is_group: bool) -> Callable[..., Any]:
    """Return a reward function whose failures are recorded: verifiers would count them as 0.

    A dictionary is a reward (`reward` or `score`) and further metrics.
    """
    signature = inspect.signature(func)
    parameters = signature.parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    holder = "states" if is_group else "state"
    added = holder not in parameters

    async def checked(**objects: Any) -> Any:
        holds: Any = objects.get(holder)
        if added and not takes_all:
            del objects[holder]
        scoring, started = current_scoring.get(), time.monotonic()
        try:
            value = func(**objects)
            value = await value if inspect.isawaitable(value) else value
            _check_process_pool(func, name, time.monotonic() - started)
            if is_group:
                return _numbers(name, value, len(holds))
            reward, metrics = _split(name, value, weight)
        except BaseException as error:  # programs that a model writes call sys.exit()
            if scoring is None or was_cancelled(error):
                raise
            failure = {"function": name, "weight": weight, **describe(error)}
            if not isinstance(error, NotANumber):
                failure["message"] = f"reward function {name} raised {failure['message']}"
            scoring.failures.append((None if is_group else id(holds), failure))
            return [0.0] * len(holds) if is_group else 0.0
        if scoring is not None:
            scoring.metrics.setdefault(id(holds), {}).update(metrics)
            if reward is None:
                scoring.unknown.setdefault(id(holds), []).append(name)
        return reward or 0.0

    checked.__name__ = name
    extra = [inspect.Parameter(holder, inspect.Parameter.KEYWORD_ONLY)] if added else []
    last = [each for each in parameters.values() if each.kind is each.VAR_KEYWORD]
    named = [each for each in parameters.values() if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
    keyword = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in named]
    checked.__signature__ = signature.replace(parameters=[*keyword, *extra, *last])  # type: ignore[attr-defined]
    return checked


def _check_process_pool(func: Any, name: str, elapsed_seconds: float) -> None:
    """Raise, or exit, where `MathRubric` counts 0: its process pool is too slow, or broken."""
    rubric = getattr(func, "__self__", None)
    if getattr(getattr(rubric, "executor", None), "_broken", False):
        print(f"the process pool of {name} is broken", file=sys.stderr, flush=True)
        os._exit(1)
    limit_seconds = getattr(rubric, "HARD_TIMEOUT_SECONDS", None)
    if limit_seconds is not None and elapsed_seconds >= limit_seconds:
        raise NotANumber(f"{name} did not end within {limit_seconds:.0f} s: its process pool is too busy")


def name_of(func: Any) -> str:
    """Return the name of a function, also of a partial one."""
    while isinstance(func, functools.partial):
        func = func.func
    return str(getattr(func, "__name__", type(func).__name__))


def _split(name: str, value: Any, weight: float) -> tuple[float | None, dict[str, float]]:
    if not isinstance(value, Mapping):
        return finite_number(f"reward function {name}", value), {}
    key = next((key for key in _REWARD_KEYS if key in value), None)
    if key is None and weight != 0:
        raise NotANumber(f"reward function {name} returned a dictionary without 'reward' or 'score'")
    reward = None if key is None else finite_number(f"{key!r} of reward function {name}", value[key])
    metrics = {}
    for other in [other for other in value if other != key]:
        with contextlib.suppress(NotANumber):  # only this metric is missing
            metrics[f"{name}/{other}"] = finite_number(str(other), value[other])
    return reward, metrics


def _numbers(name: str, values: Any, count: int) -> list[float]:
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__") or len(values) != count:
        raise NotANumber(f"reward function {name} returned {values!r:.80} for a group of {count}")
    return [finite_number(f"reward function {name}", value) for value in values]
