"""Environments of verifiers' classic API in an interpreter of their own."""

import asyncio
import contextlib
import contextvars
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .classic_rewards import (
    Scoring,
    current_scoring,
    name_of,
    prepare_rubrics,
    rubrics_in,
    scores_jointly,
    semaphore,
    weights_of,
)
from .values import (
    Refused,
    Request,
    arguments_of,
    describe,
    field,
    plain,
    plain_messages,
    was_cancelled,
)

_states: contextvars.ContextVar[list[Any] | None] = contextvars.ContextVar("states", default=None)


class ClassicAdapter:
    """An environment of verifiers' classic API, of releases 0.1.8 to 0.3.

    Of the environment and its rubrics it replaces `init_state`, `funcs` and, where verifiers never calls an overridden
    `score_rollout`, `score_group`.
    """

    def __init__(
        self, module: Any, args: Mapping[str, Any], split: str, convert: Callable[[Any], None], request: Request
    ) -> None:
        """Load the environment and one split of its examples; `convert` makes dictionaries of a state's messages.

        `request` asks the worker. Raises Refused, or what the environment raises.
        """
        import verifiers as vf

        self._arguments = arguments_of(module.load_environment)
        self.env = module.load_environment(**args)
        if not isinstance(self.env, vf.Environment):
            raise Refused(f"load_environment() returned {type(self.env).__name__}, not an environment of verifiers")
        for env in _environments(self.env):
            _check_environment(env, split, is_inner=env is not self.env)
            _report_states(env)
        own = [getattr(self.env, name, None) is not None for name in ("eval_dataset", "eval_dataset_source")]
        overrides = type(self.env).get_eval_dataset is not vf.Environment.get_eval_dataset
        self.eval_split = "own" if any(own) or overrides else "train"
        self.rows = self.env.get_dataset() if split == "train" else self.env.get_eval_dataset()
        self._check_answers()
        self._convert = convert
        self._members: dict[int, Any] = {}
        """The environment of each state inside groups, by the id of the state."""
        self._client: Any = None
        self._request, self._wrap = request, _client_wrapper()
        self._names = {id(env): prepare_rubrics(env.rubric) for env in _environments(self.env)}
        rubrics = [rubric for env in _environments(self.env) for rubric in rubrics_in(env.rubric)]
        self._weights = {id(env): weights_of(env.rubric) for env in _environments(self.env)}
        self._scores_jointly = any(map(scores_jointly, rubrics))
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
        weights = self._weights_for(self._member(dict(self.rows[0])))
        return {"api": "classic", "arguments": self._arguments, "rewards": weights}

    def _weights_for(self, member: Any) -> dict[str, float]:
        """Return the weights of the reward functions of an environment, and of those that its group adds."""
        own = self._weights[id(member)]
        added = {} if member is self.env else self._weights[id(self.env)]
        return {name: weight for name, weight in (own | added).items() if not (name in own and name in added)}

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
        for rubric in rubrics_in(self.env.rubric):
            for func in rubric.funcs:
                wanted = inspect.signature(func).parameters.get("answer")
                if wanted is not None and wanted.default is wanted.empty:
                    raise Refused(
                        f"its examples have no column 'answer' (but {', '.join(map(repr, columns))}), which the reward "
                        f"function {name_of(func)} takes"
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
        _answer_directly(client, self._request)
        return self._wrap(client)

    async def score(self, rollouts: Sequence[int]) -> dict[str, Any]:
        """Score the states of one group in place; return rewards, metrics and failures, by index."""
        states = [self._rollouts[number][0] for number in rollouts]
        for number, state in zip(rollouts, states, strict=True):
            _restore(state, self._rollouts[number][1])
            self._convert(state)
        scoring, rubric = Scoring(), self.env.rubric
        token = current_scoring.set(scoring)
        try:
            if getattr(self.env, "score_rollouts", True):
                await rubric.score_group(states, **semaphore(rubric.score_group))
            else:
                for state in states:
                    state["reward"], state["metrics"] = 0.0, {}
        finally:
            current_scoring.reset(token)
        place = {id(state): index for index, state in enumerate(states)}
        scores = []
        for state in states:
            member = self._members[id(state)]
            others = set().union(*self._names.values()) - self._names[id(member)] - self._names[id(self.env)]
            metrics = dict(state.get("metrics") or {})
            for name in (*others, *scoring.unknown.get(id(state), ())):
                metrics.pop(name, None)
            metrics.update(scoring.metrics.get(id(state), {}))
            score = {"reward": state["reward"], "metrics": metrics, "weights": self._weights_for(member)}
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


def _check_environment(env: Any, split: str, is_inner: bool) -> None:
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
    if kind is not vf.EnvGroup:
        return
    parts = [each for each in rubrics_in(env.rubric) if type(each).__name__ == "EnvGroupRubric"]
    if len(parts) != 1 or (is_inner and parts != [env.rubric]):
        raise Refused(
            "it replaces the rubric of an EnvGroup, or adds one to an EnvGroup in another one, so rewards would be "
            "missing; call add_rubric() of the outermost EnvGroup instead"
        )
    if parts[0].funcs:
        raise Refused(
            "it adds functions to the rubric of an EnvGroup, which ignores them; call its add_rubric() instead"
        )


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


def _answer_directly(client: Any, request: Request) -> None:
    """Let the worker answer the chat completions of an OpenAI client over its connection, without HTTP."""
    send = client.post

    async def post(path: str, *, cast_to: Any, body: Any = None, options: Any = None, **others: Any) -> Any:
        given = {name: value for name, value in (options or {}).items() if value is not None}
        further = given.pop("extra_json", None) or {}
        is_response = str(getattr(cast_to, "__module__", "")).startswith("httpx")
        is_whole = not any(others.get(name) for name in ("stream", "files", "content"))
        is_usual = isinstance(body, Mapping) and is_whole and given.keys() <= _WITHOUT_EFFECT
        is_known = is_response or hasattr(cast_to, "model_validate")
        if path == "/chat/completions" and is_usual and is_known:
            content = {name: value for name, value in body.items() if type(value).__name__ not in ("NotGiven", "Omit")}
            try:
                status, answer = await request("chat", key=client.api_key, path=path, body=content | further)
            except (TypeError, ValueError):
                pass  # values that only openai can send
            else:
                if status != 200:
                    raise _status_error(client, status, answer)
                return cast_to(status, json=answer) if is_response else cast_to.model_validate(answer)
        return await send(path, cast_to=cast_to, body=body, options=options or {}, **others)

    client.post = post


_WITHOUT_EFFECT = {"security", "synthesize_event_and_data"}
"""Options with which openai sends the same body."""


def _status_error(client: Any, status: int, answer: Any) -> Exception:
    """Return what openai raises for a response."""
    kind = next(kind for kind in type(client._client).__mro__ if kind.__module__.startswith("httpx"))
    http = sys.modules[kind.__module__.partition(".")[0]]  # httpx or httpx2
    sent = http.Request("POST", f"{client.base_url}chat/completions")
    error: Exception = client._make_status_error_from_response(http.Response(status, json=answer, request=sent))
    return error


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


def _environments(env: Any) -> Iterator[Any]:
    yield env
    for inner in getattr(env, "envs", None) or ():
        yield from _environments(inner)


def _report_states(env: Any) -> None:
    """Let `rollout` see the states that an environment makes: an interrupted one is scored with its turns so far."""
    make = env.init_state

    async def init_state(*args: Any, **kwargs: Any) -> Any:
        state = await make(*args, **kwargs)
        if (states := _states.get()) is not None:
            states.append(state)
        return state

    env.init_state = init_state


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
