"""Environments of verifiers' classic API in an interpreter of their own."""

import asyncio
import contextlib
import contextvars
import functools
import importlib
import inspect
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .values import (
    NotANumber,
    Refused,
    arguments_of,
    describe,
    field,
    finite_number,
    plain,
    plain_messages,
    was_cancelled,
)

_REWARD_KEYS = ("reward", "score")


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


class ClassicAdapter:
    """An environment of verifiers' classic API, of releases 0.1.8 to 0.3.

    Of the environment and its rubrics it replaces `init_state`, `funcs` and, where verifiers never calls an overridden
    `score_rollout`, `score_group`.
    """

    def __init__(self, module: Any, args: Mapping[str, Any], split: str, convert: Callable[[Any], None]) -> None:
        """Load the environment and one split of its examples; `convert` makes dictionaries of a state's messages.

        Raises Refused, or what the environment raises.
        """
        import verifiers as vf

        self._arguments = arguments_of(module.load_environment)
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
        self._scores_jointly = any(map(_scores_jointly, rubrics))
        self.warnings: list[tuple[str, str]] = []
        self._rollouts: dict[int, tuple[Any, dict[str, Any]]] = {}
        """State and result of each rollout that has made a state, by its number."""
        self._ended: dict[int, asyncio.Future[None]] = {}

    def __len__(self) -> int:
        return len(self.rows)

    async def row(self, example: int) -> dict[str, Any]:
        """Return the columns of an example, with its prompt and tools in OpenAI's form."""
        row = dict(self.rows[example])
        member = self._member(row)
        tools = getattr(member, "tool_defs", None) or getattr(member, "oai_tools", None) or ()
        return {"row": row, "prompt": plain_messages(row.get("prompt"), "user"), "tools": list(map(_tool, tools))}

    async def describe(self) -> dict[str, Any]:
        """Return the API, the arguments with their defaults, and the weights of the rewards of the first example."""
        weights = self._weights[id(self._member(dict(self.rows[0])))]
        return {"api": "classic", "arguments": self._arguments, "rewards": weights}

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

    async def rollout(self, rollout: int, **arguments: Any) -> dict[str, Any]:
        """Run the rollout with this number; see `_run`."""
        states = list[Any]()
        self._ended[rollout] = ended = asyncio.get_running_loop().create_future()
        result: dict[str, Any] = {}
        try:
            result = await self._run(states=states, **arguments)
            return result
        finally:
            if states:
                self._rollouts[rollout] = states[-1], result
            ended.set_result(None)

    async def _run(
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
            if not was_cancelled(error) or not state.get("trajectory"):
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
            "prompt": plain_messages(state.get("prompt"), "user"),
            "completion": plain_messages(state.get("completion"), "assistant"),
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

    async def score(self, rollouts: Sequence[int]) -> dict[str, Any]:
        """Score the states of one group in place; return rewards, metrics and failures, by index."""
        states = [self._rollouts[number][0] for number in rollouts]
        for number, state in zip(rollouts, states, strict=True):
            _restore(state, self._rollouts[number][1])
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
        return {"scores": scores, "failures": failures, "jointly": self._scores_jointly}

    async def release(self, rollouts: Sequence[int]) -> str | None:
        """Forget rollouts, once they have ended; return the first failure of their cleanup.

        The rubrics release their resources, such as sandboxes.
        """

        async def clean_up_one(state: Any) -> None:
            member = self._members.pop(id(state))
            for rubric in {id(env.rubric): env.rubric for env in (self.env, member)}.values():
                if (cleanup := getattr(rubric, "cleanup", None)) is not None:
                    await cleanup(state)

        for number in rollouts:
            if number in self._ended:
                await self._ended.pop(number)
        states = [self._rollouts.pop(number)[0] for number in rollouts if number in self._rollouts]
        results = await asyncio.gather(*map(clean_up_one, states), return_exceptions=True)
        return next((describe(each)["message"] for each in results if isinstance(each, BaseException)), None)

    async def close(self) -> None:
        """Do nothing: verifiers' own exit handlers release what is left."""


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
        {"id": field(step.get("response"), "id"), "reward": step.get("reward"), "advantage": step.get("advantage")}
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
    if not steps or field(steps[-1].get("response"), "id") != "overlong-prompt":
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


def _name_of(func: Any) -> str:
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


def _restore(state: Any, given: Mapping[str, Any]) -> None:
    """Undo what an earlier attempt at scoring has set, which reward functions may read."""
    if given["advantage"] is None:
        state["advantage"] = None
    for step, before in zip(state.get("trajectory") or (), given["steps"], strict=False):
        for name in ("reward", "advantage"):
            if before[name] is None:
                step[name] = None


def _tool(tool: Any) -> Any:
    """Return a tool in OpenAI's form."""
    fields = plain(tool)
    return fields if "function" in fields else {"type": "function", "function": fields}


def use_message_dicts() -> Callable[[Any], None]:
    """Let messages be dictionaries with attributes in releases whose messages are objects; return what converts states.

    Called before the environment imports names of verifiers.
    """
    types = importlib.import_module("verifiers.types")
    if not hasattr(types, "CustomBaseModel"):  # before 0.1.11 messages are dictionaries
        return lambda state: None
    message_dicts = importlib.import_module(".message_dicts", __package__)
    message_dicts.patch_messages()
    convert: Callable[[Any], None] = message_dicts.use_message_dicts
    return convert
