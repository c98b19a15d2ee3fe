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
import importlib
import importlib.util
import inspect
import json
import math
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HEADER = struct.Struct("<I")
"""Length of the JSON text that follows."""

MAX_FRAME_BYTES = 256 << 20
MAX_DEPTH = 64

_PR_SET_PDEATHSIG = 1
_INFRASTRUCTURE = {"InfraError", "SandboxError", "TunnelError", "TransportError", "APIConnectionError"}
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

    It uses public attributes only: `init_state` of the environment, `funcs` and `score_group` of rubrics.
    """

    def __init__(self, module: Any, args: Mapping[str, Any], split: str, convert: Callable[[Any], None]) -> None:
        """Load the environment and one split of its examples; `convert` makes dictionaries of a state's messages.

        Raises Refused, or what the environment raises.
        """
        import verifiers as vf

        self.env = module.load_environment(**args)
        if not isinstance(self.env, vf.Environment):
            raise Refused(f"load_environment() returned {type(self.env).__name__}, not an environment of verifiers")
        own = [getattr(self.env, name, None) is not None for name in ("eval_dataset", "eval_dataset_source")]
        self.eval_split = "own" if any(own) or _overrides(self.env, "get_eval_dataset", vf.Environment) else "train"
        self.rows = self.env.get_dataset() if split == "train" else self.env.get_eval_dataset()
        self._convert = convert
        self._client: Any = None
        self._wrap = _client_wrapper()
        self.rubrics = list(_rubrics(self.env))
        self.weights: dict[str, float] = {}
        for rubric in self.rubrics:
            rubric.funcs[:] = [
                _checked(func, weight) for func, weight in zip(rubric.funcs, rubric.weights, strict=True)
            ]
            names = [func.__name__ for func in rubric.funcs]
            self.weights.update(zip(names, map(float, rubric.weights), strict=True))
        for env in _environments(self.env):
            _report_states(env)

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, example: int) -> dict[str, Any]:
        """Return the columns of an example, with its prompt and tools in OpenAI's form."""
        row = dict(self.rows[example])
        env = self._environment(row)
        tools = getattr(env, "tool_defs", None) or getattr(env, "oai_tools", None) or ()
        return {"row": row, "prompt": _messages(row.get("prompt"), "user"), "tools": list(map(_tool, tools))}

    def _environment(self, row: Mapping[str, Any]) -> Any:
        find = getattr(self.env, "get_env_for_task", None)
        return find(row["task"]) if find is not None and isinstance(row.get("task"), str) else self.env

    async def rollout(self, example: int, base_url: str, api_key: str) -> tuple[Any, dict[str, Any]]:
        """Run one rollout; return its state, and what the worker needs of it."""
        states: list[Any] = []
        _states.set(states)
        sampling = {
            name: value
            for name, value in (getattr(self.env, "sampling_args", None) or {}).items()
            if (name, value) not in (("n", 1), ("extra_body", {}))
        }
        client, timed_out = self._make_client(base_url, api_key), False
        try:
            state = await self.env.rollout(dict(self.rows[example]), client, "policy", sampling)
        except asyncio.CancelledError:  # at its time limit it is scored with its turns so far
            if not states or not states[-1].get("trajectory"):
                raise
            state, timed_out = states[-1], True
            await self._complete(state)
        error = state.get("error")
        if error is not None and not timed_out:
            raise error if isinstance(error, BaseException) else RuntimeError(repr(error))
        steps = [
            {
                "id": _field(step.get("response"), "id"),
                "reward": step.get("reward"),
                "advantage": step.get("advantage"),
            }
            for step in state.get("trajectory") or ()
        ]
        return state, {
            "prompt": _messages(state.get("prompt"), "user"),
            "completion": _messages(state.get("completion"), "assistant"),
            "steps": steps,
            "advantage": state.get("advantage"),
            "stop_condition": state.get("stop_condition"),
            "is_truncated": bool(state.get("is_truncated") or state.get("prompt_too_long") or timed_out),
            "timed_out": timed_out,
        }

    async def _complete(self, state: Any) -> None:
        """Set the completion of a state whose rollout was interrupted."""
        if state.get("completion"):
            return
        last, before = state["trajectory"][-1], len(state["prompt"])
        state["completion"] = [*last["prompt"], *last["completion"]][before:]

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
                takes_semaphore = "score_sem" in inspect.signature(rubric.score_group).parameters
                await rubric.score_group(states, **({"score_sem": contextlib.nullcontext()} if takes_semaphore else {}))
            else:
                for state in states:
                    state["reward"], state["metrics"] = 0.0, {}
        finally:
            _scoring.reset(token)
        place = {id(state): index for index, state in enumerate(states)}
        scores = []
        for state in states:
            metrics = dict(state.get("metrics") or {})
            for name in scoring.unknown.get(id(state), ()):
                metrics.pop(name, None)
            scores.append({"reward": state["reward"], "metrics": {**metrics, **scoring.metrics.get(id(state), {})}})
        failures = [{**failure, "rollout": None if one is None else place[one]} for one, failure in scoring.failures]
        return {"scores": scores, "failures": failures, "jointly": any(map(_scores_jointly, self.rubrics))}

    async def clean_up(self, states: Sequence[Any]) -> None:
        """Let the rubrics release the resources of rollouts, such as sandboxes."""
        for rubric in self.rubrics:
            if (cleanup := getattr(rubric, "cleanup", None)) is not None:
                for state in states:
                    await cleanup(state)


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


def _rubrics(env: Any) -> Iterator[Any]:
    """Yield the rubrics that contain the reward functions of an environment, each once."""
    seen, waiting = set[int](), [each.rubric for each in _environments(env)]
    while waiting:
        rubric = waiting.pop()
        if rubric is None or id(rubric) in seen:
            continue
        seen.add(id(rubric))
        waiting += getattr(rubric, "rubrics", ())
        if not hasattr(rubric, "funcs"):
            raise Refused(f"its rubric {type(rubric).__name__} has no list `funcs` of reward functions")
        yield rubric


def _scores_jointly(rubric: Any) -> bool:
    names = ("prompts", "completions", "answers", "states", "infos", "tasks")
    return any(not set(names).isdisjoint(inspect.signature(func).parameters) for func in rubric.funcs)


def _report_states(env: Any) -> None:
    """Let `rollout` see the states that an environment makes: an interrupted one is scored with its turns so far."""
    make = env.init_state

    async def init_state(*args: Any, **kwargs: Any) -> Any:
        state = await make(*args, **kwargs)
        if (states := _states.get()) is not None:
            states.append(state)
        return state

    env.init_state = init_state


def _checked(func: Callable[..., Any], weight: float) -> Callable[..., Any]:
    """Return a reward function whose failures are recorded: verifiers would count them as 0.

    A dictionary is a reward (`reward` or `score`) and further metrics.
    """
    parameters = inspect.signature(func).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    holder = "states" if _takes_group(parameters) else "state"
    added = holder not in parameters
    name = _name_of(func)

    async def checked(**objects: Any) -> Any:
        holds: Any = objects.get(holder)
        if added and not takes_all:
            del objects[holder]
        scoring, started = _scoring.get(), time.monotonic()
        try:
            value = func(**objects)
            value = await value if inspect.isawaitable(value) else value
            _check_process_pool(func, name, time.monotonic() - started)
            if holder == "states":
                return _numbers(name, value, len(holds))
            reward, metrics = _split(name, value, weight)
        except Exception as error:
            if scoring is None:
                raise
            failure = {"function": name, "weight": weight, **describe(error)}
            if isinstance(error, _NotANumber):
                failure["message"] = str(error)
            else:
                failure["message"] = f"reward function {name} raised {failure['message']}"
            scoring.failures.append((id(holds) if holder == "state" else None, failure))
            return 0.0 if holder == "state" else [0.0] * len(holds)
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
    checked.__signature__ = inspect.Signature([*keyword, *extra, *last])  # type: ignore[attr-defined]
    return checked


def _check_process_pool(func: Any, name: str, elapsed_seconds: float) -> None:
    """Raise, or exit, where `MathRubric` counts 0: its process pool was too slow, or is broken for ever."""
    rubric = getattr(func, "__self__", None)
    if getattr(getattr(rubric, "executor", None), "_broken", False):
        print(f"the process pool of {name} is broken", file=sys.stderr, flush=True)
        os._exit(1)
    limit_seconds = getattr(rubric, "HARD_TIMEOUT_SECONDS", None)
    if limit_seconds is not None and elapsed_seconds >= limit_seconds:
        raise TimeoutError(f"no answer within {limit_seconds:.0f} s: its process pool is too busy")


def _takes_group(parameters: Mapping[str, Any]) -> bool:
    """Return whether verifiers calls a function for a whole group, which it tells from plural names."""
    return not {"prompts", "completions", "answers", "states", "tasks", "infos"}.isdisjoint(parameters)


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
    if callable(convert := getattr(value, "tolist", None)):  # arrays
        return _plain(convert(), depth + 1)
    return str(value)


def describe(error: BaseException) -> dict[str, Any]:
    """Return an exception as one line, and whether a retry may succeed."""
    while isinstance(inner := getattr(error, "exceptions", None), tuple) and inner:
        error = inner[0]
    text = " ".join(str(error).split())
    message = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return {"message": message, "infrastructure": _is_infrastructure(error), "overlong": _is_overlong(error)}


def _is_infrastructure(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, ConnectionError | TimeoutError):
            return True
        if _INFRASTRUCTURE & {kind.__name__ for kind in type(error).__mro__}:
            return True
        status = getattr(error, "status_code", getattr(error, "status", None))
        if isinstance(status, int) and (500 <= status < 600 or status in (408, 429)):
            return True
        error = error.__cause__
    return False


def _is_overlong(error: BaseException) -> bool:
    return "OverlongPromptError" in {kind.__name__ for kind in type(error).__mro__}


class _Runner:
    """Answers the calls of the worker.

    | call | arguments | result |
    |---|---|---|
    | `load` | id, path, args, split | examples, eval_split, verifiers, weights |
    | `row` | example | row, prompt, tools |
    | `rollout` | rollout (its number), example, base_url, api_key | see `ClassicEnvironment.rollout` |
    | `score` | rollouts | scores, failures, jointly |
    | `release` | rollouts | |
    | `cancel` | call | no answer |
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._environment: ClassicEnvironment | None = None
        self._states: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._running: dict[int, asyncio.Task[None]] = {}
        self._writer: asyncio.StreamWriter | None = None

    async def serve(self) -> None:
        """Answer calls until the worker disconnects."""
        reader, self._writer = await asyncio.open_connection(sock=self._connection, limit=MAX_FRAME_BYTES)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
                call = json.loads(await reader.readexactly(length))
                if call["op"] == "cancel":
                    if (task := self._running.get(call["call"])) is not None:
                        task.cancel()
                    continue
                self._running[call["call"]] = asyncio.create_task(self._answer(call))
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _answer(self, call: dict[str, Any]) -> None:
        number = call["call"]
        try:
            answer = {"result": await getattr(self, f"_{call['op']}")(call)}
        except asyncio.CancelledError:
            answer = {"error": {"kind": "cancelled", "message": "it was cancelled", "infrastructure": False}}
        except Refused as error:
            answer = {"error": {"kind": "refused", "message": str(error), "infrastructure": False}}
        except (Exception, SystemExit) as error:  # noqa: BLE001 # foreign code may raise anything
            answer = {"error": {"kind": "environment", **describe(error)}}
        finally:
            self._running.pop(number, None)
        assert self._writer is not None
        text = json.dumps(_plain({"call": number, **answer})).encode()
        self._writer.write(HEADER.pack(len(text)) + text)
        await self._writer.drain()

    async def _load(self, call: dict[str, Any]) -> dict[str, Any]:
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
            "weights": self._environment.weights,
        }

    async def _row(self, call: dict[str, Any]) -> dict[str, Any]:
        assert self._environment is not None
        return self._environment.row(call["example"])

    async def _rollout(self, call: dict[str, Any]) -> dict[str, Any]:
        assert self._environment is not None
        state, result = await self._environment.rollout(call["example"], call["base_url"], call["api_key"])
        self._states[call["rollout"]] = state, result
        return result

    async def _score(self, call: dict[str, Any]) -> dict[str, Any]:
        assert self._environment is not None
        scored = [self._states[number] for number in call["rollouts"]]
        for state, given in scored:
            _restore(state, given)
        return await self._environment.score([state for state, _ in scored])

    async def _release(self, call: dict[str, Any]) -> None:
        assert self._environment is not None
        states = [self._states.pop(number)[0] for number in call["rollouts"] if number in self._states]
        await self._environment.clean_up(states)


def _import(name: str, path: str | None) -> Any:
    """Import the module of an environment: a file, or a module of an installed package."""
    if path is None:
        return importlib.import_module(name)
    sys.path.append(str(Path(path).parent))
    spec = importlib.util.spec_from_file_location(name, path)
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
    connection.setblocking(False)
    asyncio.run(_Runner(connection).serve())


if __name__ == "__main__":
    main()
