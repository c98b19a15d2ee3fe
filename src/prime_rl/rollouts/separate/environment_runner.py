"""Runs one environment in a Python interpreter of its own, for the environment worker that started it.

A script: it needs only the standard library, on Python 3.10 or later, and the environment's own packages. It imports
nothing of prime_rl. The worker sends calls over a socket, as a length (4 bytes, little endian) and a JSON object; see
`_Runner`. The environment samples from the worker's OpenAI endpoint, which records the tokens.
"""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this script: the environment imports nothing from it

import asyncio
import contextlib
import contextvars
import ctypes
import functools
import hashlib
import importlib
import importlib.util
import inspect
import itertools
import json
import math
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from decimal import Decimal
from pathlib import Path, PurePath
from typing import Any
from uuid import UUID

HEADER = struct.Struct("<I")
"""Length of the JSON text that follows."""

MAX_DEPTH = 64
_NUM_THREADS = 512
"""Threads of tools and rewards, as in environment workers."""

_PR_SET_PDEATHSIG = 1
_INFRASTRUCTURE = {
    *("InfraError", "SandboxError", "TunnelError", "TransportError", "APIConnectionError"),
    *("ClientConnectionError", "TimeoutError"),
}
_REWARD_KEYS = ("reward", "score")


class _NotANumber(ValueError):
    """A reward function returned no finite number; the message names the function."""


class Refused(Exception):
    """The environment cannot be run: bad arguments, no examples, an unsupported API."""


class _Scoring:
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


_scoring: contextvars.ContextVar[_Scoring | None] = contextvars.ContextVar("scoring", default=None)
_states: contextvars.ContextVar[list[Any] | None] = contextvars.ContextVar("states", default=None)


class ClassicEnvironment:
    """An environment of verifiers' classic API, of releases 0.1.8 to 0.3.

    Of the environment and its rubrics it replaces `init_state`, `funcs` and, where verifiers never calls an overridden
    `score_rollout`, `score_group`.
    """

    def __init__(self, module: Any, args: Mapping[str, Any], split: str, convert: Callable[[Any], None]) -> None:
        """Load the environment and one split of its examples; `convert` makes dictionaries of a state's messages.

        Raises Refused, or what the environment raises.
        """
        import verifiers as vf

        self.env = module.load_environment(**args)
        if not isinstance(self.env, vf.Environment):
            raise Refused(f"load_environment() returned {type(self.env).__name__}, not an environment of verifiers")
        for env in _environments(self.env):
            _check_environment(env, split)
            _report_states(env)
        own = [getattr(self.env, name, None) is not None for name in ("eval_dataset", "eval_dataset_source")]
        self.eval_split = "own" if any(own) or _overrides(self.env, "get_eval_dataset", vf.Environment) else "train"
        self.rows = self.env.get_dataset() if split == "train" else self.env.get_eval_dataset()
        self._check_answers()
        self._convert = convert
        self._members: dict[int, Any] = {}
        """The environment of each state inside groups, by the id of the state."""
        self._client: Any = None
        self._wrap = _client_wrapper()
        self._names = {id(env): _prepare_rubrics(env.rubric) for env in _environments(self.env)}
        rubrics = [rubric for env in _environments(self.env) for rubric in _rubrics(env.rubric)]
        self._weights = {id(env): _weights_of(env.rubric) for env in _environments(self.env)}
        self.scores_jointly = any(map(_scores_jointly, rubrics))

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, example: int) -> dict[str, Any]:
        """Return the columns of an example, with its prompt and tools in OpenAI's form."""
        row = dict(self.rows[example])
        member = self._member(row)
        tools = getattr(member, "tool_defs", None) or getattr(member, "oai_tools", None) or ()
        return {"row": row, "prompt": _messages(row.get("prompt"), "user"), "tools": list(map(_tool, tools))}

    def _member(self, row: Mapping[str, Any]) -> Any:
        """Return the environment of a row of `rows` inside groups."""
        env = self.env
        while getattr(env, "envs", None):
            if hasattr(env, "_route_child_input"):
                name, row, _ = env._route_child_input(row)
                env = env.get_env_for_name(name)
            else:
                env = env.get_env_for_task(row["task"])
        return env

    def _check_answers(self) -> None:
        """Raise Refused if a reward function compares with an answer that no example has: verifiers passes ""."""
        columns = getattr(self.rows, "column_names", None) or ["answer"]
        if "answer" in columns or not type(self.env).__module__.startswith("verifiers."):
            return
        for rubric in _rubrics(self.env.rubric):
            for func in rubric.funcs:
                wanted = inspect.signature(func).parameters.get("answer")
                if wanted is not None and wanted.default is wanted.empty:
                    raise Refused(
                        f"its examples have no column 'answer' (but {', '.join(map(repr, columns))}), which the reward "
                        f"function {_name_of(func)} takes"
                    )

    async def rollout(
        self, example: int, base_url: str, api_key: str, sampling: Mapping[str, Any], states: list[Any]
    ) -> dict[str, Any]:
        """Run one rollout; return what the worker needs of its state, the last of `states`."""
        _states.set(states)
        row, sampling = dict(self.rows[example]), dict(sampling)
        member = self._member(row)
        for env in (self.env, member):
            given = getattr(env, "sampling_args", None) or {}
            sampling |= {name: value for name, value in given.items() if (name, value) not in _DEFAULT_SAMPLING}
        client, timed_out = self._make_client(base_url, api_key), False
        try:
            state = await self.env.rollout(row, client, "policy", sampling)
            if state is not (states[-1] if states else None):
                states.append(state)
        except BaseException as error:
            state = states[-1] if states else {}
            if not state.get("is_completed"):
                await _clean_up_old(member, state)
            if not _was_cancelled(error) or not state.get("trajectory"):
                raise
            timed_out = True  # at its time limit it is scored with its turns so far
            state["completion"] = state.get("completion") or _completion_of(state)
        finally:
            self._members.update({id(state): member for state in states[-1:]})
        if _drop_refused_turn(state):
            state["completion"] = _completion_of(state)
        failure = state.get("error")
        if failure is not None and not timed_out:
            raise failure if isinstance(failure, BaseException) else RuntimeError(repr(failure))
        if any(step.get("tokens") is not None for step in state.get("trajectory") or ()):
            raise RuntimeError("it sets `tokens` of a step, which only an environment in prime-rl's interpreter can")
        return {
            "prompt": _messages(state.get("prompt"), "user"),
            "completion": _messages(state.get("completion"), "assistant"),
            "stop_condition": state.get("stop_condition"),
            "is_truncated": bool(state.get("is_truncated") or state.get("prompt_too_long") or timed_out),
            "timed_out": timed_out,
            **_credit(state),
        }

    def _make_client(self, base_url: str, api_key: str) -> Any:
        from openai import AsyncOpenAI

        if self._client is None:
            self._client = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=None)
        client = self._client.with_options(base_url=base_url, api_key=api_key)
        return self._wrap(client)

    async def score(self, states: Sequence[Any]) -> dict[str, Any]:
        """Score the states of one group in place; return rewards, metrics and failures, by index."""
        for state in states:
            self._convert(state)
        scoring, rubric = _Scoring(), self.env.rubric
        token = _scoring.set(scoring)
        try:
            if getattr(self.env, "score_rollouts", True):
                await rubric.score_group(states, **_semaphore(rubric.score_group))
            else:
                for state in states:
                    state["reward"], state["metrics"] = 0.0, {}
        finally:
            _scoring.reset(token)
        place = {id(state): index for index, state in enumerate(states)}
        scores = []
        for state in states:
            member = id(self._members[id(state)])
            others = set().union(*self._names.values()) - self._names[member] - self._names[id(self.env)]
            metrics = dict(state.get("metrics") or {})
            for name in (*others, *scoring.unknown.get(id(state), ())):
                metrics.pop(name, None)
            metrics.update(scoring.metrics.get(id(state), {}))
            score = {"reward": state["reward"], "metrics": metrics, "weights": self._weights[member]}
            scores.append({**score, **_credit(state)})
        failures = [{**failure, "rollout": None if one is None else place[one]} for one, failure in scoring.failures]
        return {"scores": scores, "failures": failures, "jointly": self.scores_jointly}

    async def clean_up(self, states: Sequence[Any]) -> str | None:
        """Let the rubrics release the resources of rollouts, such as sandboxes; return the first failure."""

        async def clean_up_one(state: Any) -> None:
            member = self._members.pop(id(state))
            for rubric in {id(env.rubric): env.rubric for env in (self.env, member)}.values():
                if (cleanup := getattr(rubric, "cleanup", None)) is not None:
                    await cleanup(state)

        results = await asyncio.gather(*map(clean_up_one, states), return_exceptions=True)
        return next((describe(each)["message"] for each in results if isinstance(each, BaseException)), None)


_DEFAULT_SAMPLING: tuple[tuple[str, Any], ...] = (("n", 1), ("extra_body", {}))
"""What the constructor of an environment adds to its `sampling_args`."""

_HOOKS = ("run_rollout", "run_group", "_run_rollout_state", "_run_group_states")


def _check_environment(env: Any, split: str) -> None:
    """Refuse an environment with features that would otherwise be ignored."""
    import verifiers as vf

    kind = vf.EnvGroup if isinstance(env, vf.EnvGroup) else vf.Environment
    for hook in _HOOKS:
        if hasattr(kind, hook) and (hook in vars(env) or getattr(type(env), hook) is not getattr(kind, hook)):
            raise Refused(
                f"it overrides {hook}(), which is not called here; override rollout(), or score in its rubric"
            )
    if split == "train" and getattr(env.rubric, "has_advantages", False):
        raise Refused("it computes advantages (has_advantages of its rubric), which would be ignored")
    if kind is vf.EnvGroup and (type(env.rubric).__name__ != "EnvGroupRubric" or env.rubric.funcs):
        raise Refused("it adds rewards to an EnvGroup, or replaces its rubric, which verifiers ignores")


def _credit(state: Any) -> dict[str, Any]:
    """Return the rewards and advantages of a state and its steps, and the ids of their responses."""
    steps = [
        {"id": _field(step.get("response"), "id"), "reward": step.get("reward"), "advantage": step.get("advantage")}
        for step in state.get("trajectory") or ()
    ]
    return {"steps": steps, "advantage": state.get("advantage")}


def _completion_of(state: Any) -> list[Any]:
    """Return the completion of a state whose rollout did not set it."""
    if not state["trajectory"]:
        return []
    last = state["trajectory"][-1]
    return [*last["prompt"], *last["completion"]][len(state["prompt"]) :]


def _drop_refused_turn(state: Any) -> bool:
    """Remove the turn that 0.1.8 adds with a text of its own if a prompt does not fit; return whether there is one."""
    steps = state.get("trajectory") or []
    if not steps or _field(steps[-1].get("response"), "id") != "overlong-prompt":
        return False
    steps.pop()
    return True


async def _clean_up_old(env: Any, state: Any) -> None:
    """Call the environment's own handlers, which releases before 0.2 call only where a rollout is complete."""
    if state and (clean_up := getattr(env, "_cleanup", None)) is not None:
        with contextlib.suppress(Exception):  # what the rollout raised explains more
            await clean_up(state)


def _semaphore(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the semaphore that 0.1.8 asks for."""
    return {"score_sem": contextlib.nullcontext()} if "score_sem" in inspect.signature(function).parameters else {}


def _rubrics(rubric: Any) -> Iterator[Any]:
    """Yield a rubric and those in it."""
    yield rubric
    for inner in getattr(rubric, "rubrics", ()):
        yield from _rubrics(inner)


def _weighted(rubric: Any) -> Iterator[tuple[Any, float]]:
    return zip(rubric.funcs, rubric.weights, strict=False)


def _weights_of(rubric: Any) -> dict[str, float]:
    """Return the weight of each reward function by the name of its metric, for those that share it with no other."""
    pairs = [(func.__name__, float(weight)) for each in _rubrics(rubric) for func, weight in _weighted(each)]
    names = [name for name, _ in pairs]
    return {name: weight for name, weight in pairs if names.count(name) == 1}


def _prepare_rubrics(outer: Any) -> set[str]:
    """Let the failures of reward functions be recorded; return the names of their metrics.

    Verifiers requires every function to have a name, and never calls a `score_rollout` that a subclass overrides.
    """
    names = set[str]()
    for rubric in _rubrics(outer):
        if not hasattr(rubric, "funcs"):
            raise Refused(f"its rubric {type(rubric).__name__} has no list `funcs` of reward functions")
        if not getattr(rubric, "_is_checked", False):
            given = {func.__name__ for func in rubric.funcs if hasattr(func, "__name__")}
            checked = []
            for func, weight in _weighted(rubric):
                name = _name_of(func)
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
    await asyncio.gather(*(rubric.score_rollout(state, **_semaphore(rubric.score_rollout)) for state in states))


class _EmptyText(str):
    """An empty reply that is true when first asked: releases before 0.1.11 ask whether there is content."""

    _was_asked = False

    def __bool__(self) -> bool:
        was_asked, self._was_asked = self._was_asked, True
        return not was_asked


def _client_wrapper() -> Callable[[Any], Any]:
    """Return what makes the client of this verifiers release from one of openai.

    It accepts an empty reply, as content "": that is a sample, and counts what the reward functions give it.
    """
    try:
        from verifiers.clients import OpenAIChatCompletionsClient
    except ImportError:  # releases before 0.1.11 take the client of openai
        return _accept_empty_replies

    class Client(OpenAIChatCompletionsClient):
        async def raise_from_native_response(self, response: Any) -> None:
            pass

        async def from_native_response(self, response: Any) -> Any:
            converted = await super().from_native_response(response)
            if converted.message.content is None:
                converted.message.content = ""
            return converted

    return Client


def _accept_empty_replies(client: Any) -> Any:
    completions = client.chat.completions
    create = completions.create

    async def create_accepting(*args: Any, **kwargs: Any) -> Any:
        response = await create(*args, **kwargs)
        for choice in response.choices:
            choice.message.content = choice.message.content or _EmptyText()
        return response

    completions.create = create_accepting
    return client


def _overrides(env: Any, name: str, kind: Any) -> bool:
    return getattr(type(env), name) is not getattr(kind, name)


def _environments(env: Any) -> Iterator[Any]:
    yield env
    for inner in getattr(env, "envs", None) or ():
        yield from _environments(inner)


def _scores_jointly(rubric: Any) -> bool:
    """Return whether the reward of a rollout may depend on the others of its group."""
    import verifiers as vf

    known = ("Rubric", "RubricGroup", "EnvGroupRubric")
    own = "score_group" in vars(rubric) and not isinstance(rubric.score_group, functools.partial)
    defining = next(kind for kind in type(rubric).__mro__ if "score_group" in vars(kind))
    is_known = defining.__name__ in known and defining.__module__.startswith(vf.__name__)
    return own or not is_known or any(map(rubric._is_group_func, rubric.funcs))


def _report_states(env: Any) -> None:
    """Let `rollout` see the states that an environment makes: an interrupted one is scored with its turns so far."""
    make = env.init_state

    async def init_state(*args: Any, **kwargs: Any) -> Any:
        state = await make(*args, **kwargs)
        if (states := _states.get()) is not None:
            states.append(state)
        return state

    env.init_state = init_state


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
        scoring, started = _scoring.get(), time.monotonic()
        try:
            value = func(**objects)
            value = await value if inspect.isawaitable(value) else value
            _check_process_pool(func, name, time.monotonic() - started)
            if is_group:
                return _numbers(name, value, len(holds))
            reward, metrics = _split(name, value, weight)
        except BaseException as error:  # programs that a model writes call sys.exit()
            if scoring is None or _was_cancelled(error):
                raise
            failure = {"function": name, "weight": weight, **describe(error)}
            if not isinstance(error, _NotANumber):
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
        raise _NotANumber(f"{name} did not end within {limit_seconds:.0f} s: its process pool is too busy")


def _name_of(func: Any) -> str:
    while isinstance(func, functools.partial):
        func = func.func
    return str(getattr(func, "__name__", type(func).__name__))


def _split(name: str, value: Any, weight: float) -> tuple[float | None, dict[str, float]]:
    if not isinstance(value, Mapping):
        return _number(f"reward function {name}", value), {}
    key = next((key for key in _REWARD_KEYS if key in value), None)
    if key is None and weight != 0:
        raise _NotANumber(f"reward function {name} returned a dictionary without 'reward' or 'score'")
    reward = None if key is None else _number(f"{key!r} of reward function {name}", value[key])
    metrics = {}
    for other in [other for other in value if other != key]:
        with contextlib.suppress(_NotANumber):  # only this metric is missing
            metrics[f"{name}/{other}"] = _number(str(other), value[other])
    return reward, metrics


def _numbers(name: str, values: Any, count: int) -> list[float]:
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__") or len(values) != count:
        raise _NotANumber(f"reward function {name} returned {values!r:.80} for a group of {count}")
    return [_number(f"reward function {name}", value) for value in values]


def _number(what: str, value: Any) -> float:
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise _NotANumber(f"{what} is {value!r:.80}, not a number")
    number = float(value)
    if not math.isfinite(number):
        raise _NotANumber(f"{what} is {number}, not a finite number")
    return number


def _restore(state: Any, given: Mapping[str, Any]) -> None:
    """Undo what an earlier attempt at scoring has set, which reward functions may read."""
    if given["advantage"] is None:
        state["advantage"] = None
    for step, before in zip(state.get("trajectory") or (), given["steps"], strict=False):
        for name in ("reward", "advantage"):
            if before[name] is None:
                step[name] = None


def use_message_dicts() -> Callable[[Any], None]:
    """Let messages be dictionaries with attributes in releases whose messages are objects; return what converts states.

    Loaded from its file: this interpreter has no prime_rl.
    """
    types = importlib.import_module("verifiers.types")
    if not hasattr(types, "CustomBaseModel"):  # before 0.1.11 messages are dictionaries
        return lambda state: None
    spec = importlib.util.spec_from_file_location("_message_dicts", Path(__file__).with_name("message_dicts.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.patch_messages()
    convert: Callable[[Any], None] = module.use_message_dicts
    return convert


def _messages(value: Any, role: str) -> list[Any]:
    """Return a prompt or completion as messages; plain text becomes a message of `role`."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return [_plain(message) for message in value or ()]


def _tool(tool: Any) -> Any:
    """Return a tool in OpenAI's form."""
    fields = _plain(tool)
    return fields if "function" in fields else {"type": "function", "function": fields}


def _field(holder: Any, name: str) -> Any:
    return holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)


def _plain(value: Any, depth: int = 0) -> Any:
    """Return a value as JSON represents it; what it cannot represent as text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if depth > MAX_DEPTH:
        return "..."
    if isinstance(value, Mapping):
        return {str(key): _plain(inner, depth + 1) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, depth + 1) for inner in value]
    if callable(dump := getattr(value, "model_dump", None)):
        return _plain(dump(exclude_none=True), depth + 1)
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if callable(convert := getattr(value, "tolist", None)):  # arrays
        return _plain(convert(), depth + 1)
    if isinstance(value, date | Decimal | PurePath | UUID | BaseException):
        return str(value)
    if callable(content := getattr(value, "tobytes", None)):  # images
        value = content()
    return hashlib.blake2s(value).hexdigest() if isinstance(value, bytes) else type(value).__qualname__


def describe(error: BaseException) -> dict[str, Any]:
    """Return an exception as one line, and whether a retry may succeed."""
    while isinstance(inner := getattr(error, "exceptions", None), tuple) and inner:
        error = inner[0]
    try:
        text = " ".join(str(error).split())
    except Exception as broken:  # noqa: BLE001 # foreign code
        text = f"its text raises {type(broken).__name__}"
    message = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error, _NotANumber):
        message = text
    if isinstance(error, asyncio.CancelledError) and not _was_cancelled(error):
        message += ", although nothing was cancelled"
    return {"message": message, "infrastructure": _is_infrastructure(error)}


_call: contextvars.ContextVar[int] = contextvars.ContextVar("call", default=0)
_cancelled = set[int]()
"""The running calls that the worker has cancelled."""


def _was_cancelled(error: BaseException) -> bool:
    return isinstance(error, asyncio.CancelledError) and _call.get() in _cancelled


def _is_infrastructure(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, ConnectionError | TimeoutError):
            return True
        if _INFRASTRUCTURE & {kind.__name__ for kind in type(error).__mro__}:
            return True
        status = getattr(error, "status_code", getattr(error, "status", None))
        if isinstance(status, int) and (500 <= status < 600 or status in (408, 425, 429)):
            return True
        error = error.__cause__
    return False


def _frame(message: Mapping[str, Any]) -> bytes:
    text = json.dumps(_plain(message)).encode()
    return HEADER.pack(len(text)) + text


def _error(error: BaseException) -> dict[str, Any]:
    if _was_cancelled(error):
        return {"message": "it was cancelled", "infrastructure": False}
    if isinstance(error, Refused):
        return {"message": str(error), "infrastructure": False}
    return describe(error)


class _Runner:
    """Answers the calls of the worker.

    | call | arguments | result |
    |---|---|---|
    | `load` | id, path, args, split | examples, eval_split, verifiers |
    | `row` | example | row, prompt, tools |
    | `rollout` | rollout (its number), example, base_url, api_key, sampling | see `ClassicEnvironment.rollout` |
    | `score` | rollouts | scores, failures, jointly |
    | `release` | rollouts | a failure, or null |
    | `cancel` | call | no answer |
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._environment: ClassicEnvironment | None = None
        self._states: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._ended: dict[int, asyncio.Future[None]] = {}
        self._running: dict[int, asyncio.Task[None]] = {}
        self._writer: asyncio.StreamWriter | None = None

    def load(self) -> None:
        """Answer the first call, `load`, without an event loop: environments use their own while they load."""
        (length,) = HEADER.unpack(self._receive(HEADER.size))
        call = json.loads(self._receive(length))
        try:
            answer = {"result": self._load(call)}
        except BaseException as error:  # noqa: BLE001 # foreign code may raise anything
            answer = {"error": _error(error)}
        self._connection.sendall(_frame({"call": call["call"], **answer}))

    def _receive(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = self._connection.recv(count - len(parts))
            if not part:
                raise EOFError("the worker has ended")
            parts += part
        return bytes(parts)

    async def serve(self) -> None:
        """Answer calls until the worker disconnects."""
        self._connection.setblocking(False)
        reader, self._writer = await asyncio.open_connection(sock=self._connection)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
                call = json.loads(await reader.readexactly(length))
                number = call["call"]
                if call["op"] != "cancel":
                    self._running[number] = asyncio.create_task(self._answer(call))
                    await asyncio.sleep(0)  # it starts: a task that is cancelled before would never answer
                elif number in self._running:
                    _cancelled.add(number)
                    self._running[number].cancel()
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _answer(self, call: dict[str, Any]) -> None:
        number = call["call"]
        _call.set(number)
        try:
            frame = _frame({"call": number, "result": await getattr(self, f"_{call['op']}")(call)})
        except BaseException as error:  # noqa: BLE001 # foreign code may raise anything; the worker awaits an answer
            frame = _frame({"call": number, "error": _error(error)})
        self._running.pop(number, None)
        _cancelled.discard(number)
        assert self._writer is not None
        self._writer.write(frame)
        await self._writer.drain()

    def _load(self, call: dict[str, Any]) -> dict[str, Any]:
        from importlib.metadata import PackageNotFoundError, version

        try:
            installed = version("verifiers")
        except PackageNotFoundError:
            raise Refused("verifiers is not among its requirements") from None
        convert = use_message_dicts()  # before the environment imports names of verifiers
        module = _import(call["id"], call["path"])
        if not hasattr(module, "load_environment"):
            raise Refused(
                f"{module.__name__} has no load_environment(): in an interpreter of its own only environments of the "
                f"classic API run (it has verifiers {installed})"
            )
        self._environment = ClassicEnvironment(module, call["args"], call["split"], convert)
        return {
            "examples": len(self._environment),
            "eval_split": self._environment.eval_split,
            "verifiers": installed,
        }

    async def _row(self, call: dict[str, Any]) -> dict[str, Any]:
        assert self._environment is not None
        return self._environment.row(call["example"])

    async def _rollout(self, call: dict[str, Any]) -> dict[str, Any]:
        assert self._environment is not None
        number, states = call["rollout"], list[Any]()
        self._ended[number] = ended = asyncio.get_running_loop().create_future()
        result: dict[str, Any] = {}
        try:
            result = await self._environment.rollout(
                call["example"], call["base_url"], call["api_key"], call["sampling"], states
            )
            return result
        finally:
            if states:
                self._states[number] = states[-1], result
            ended.set_result(None)

    async def _score(self, call: dict[str, Any]) -> dict[str, Any]:
        assert self._environment is not None
        scored = [self._states[number] for number in call["rollouts"]]
        for state, given in scored:
            _restore(state, given)
        return await self._environment.score([state for state, _ in scored])

    async def _release(self, call: dict[str, Any]) -> str | None:
        """Forget rollouts, once they have ended; return a failure of their cleanup."""
        assert self._environment is not None
        for number in call["rollouts"]:
            if number in self._ended:
                await self._ended.pop(number)
        return await self._environment.clean_up(
            [self._states.pop(number)[0] for number in call["rollouts"] if number in self._states]
        )


def _import(name: str, path: str | None) -> Any:
    """Import the module of an environment: a file, or a module of an installed package."""
    if path is None:
        return importlib.import_module(name)
    file = Path(path)
    is_package = file.name == "__init__.py"
    sys.path.append(str(file.parent.parent if is_package else file.parent))
    locations = [str(file.parent)] if is_package else None
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=locations)
    if spec is None or spec.loader is None:
        raise Refused(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Serve the socket whose file descriptor is the argument."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.dup2(2, 1)  # environments print to stdout
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    os.register_at_fork(after_in_child=connection.close)  # otherwise the worker would not see that this process ends
    runner = _Runner(connection)
    runner.load()
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    loop.set_default_executor(ThreadPoolExecutor(_NUM_THREADS))
    serving = loop.create_task(runner.serve())
    while not serving.done():
        with contextlib.suppress(SystemExit, KeyboardInterrupt):  # of a task of the environment, which has failed
            loop.run_until_complete(serving)


if __name__ == "__main__":
    main()
