"""The model client of one classic verifiers rollout, and the rewards and advantages that its environment sets itself.

Verifiers fills the same fields of states and steps when it scores a group, so they are read before.
"""

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, overload

import numpy as np
from numpy.typing import NDArray
from pydantic_core import SchemaSerializer, core_schema
from verifiers.clients.client import Client
from verifiers.errors import ModelError, OverlongPromptError
from verifiers.types import Messages, Response, ResponseMessage, ResponseTokens, Tool, ToolCall, Usage

from prime_rl.core.types import Credit
from prime_rl.rollouts.clients.inference_client import InferenceError, InferenceServerLost
from prime_rl.rollouts.clients.openai_chat_client import PromptTooLong
from prime_rl.rollouts.clients.raw_openai_client import AnsweredCall, PolicyEndpoint, context_of, raw_client
from prime_rl.rollouts.group_attempts import Attempt, UnsupportedEnvironment, as_number
from prime_rl.rollouts.policy_call import policy_call
from prime_rl.rollouts.recorder import Recorder
from prime_rl.rollouts.rendering.messages import Reply, Turn

_RETURNED = frozenset({"logprobs", "return_token_ids"})
"""Details that the tokens of a response contain."""


class RolloutClient(Client):
    """The model client of one rollout.

    Attributes:
        recorder: records the calls.
        attempt: that it serves.
        state: of the rollout, as passed with the last call.
        calls: those that were answered during the rollout, until `end_rollout()`.
        credit: what the environment has set before it is scored.
    """

    def __init__(
        self,
        warn: Callable[[str, str], None],
        recorder: Recorder,
        attempt: Attempt,
        sampling: Mapping[str, Any],
        endpoint: PolicyEndpoint,
    ) -> None:
        """Serve one rollout with the run's `sampling` parameters; `warn` gets a topic and a warning."""
        super().__init__(None)
        self._endpoint = endpoint
        self.recorder = recorder
        self.attempt = attempt
        self.state: Any = None
        self.calls: list[AnsweredCall] = []
        self.credit = GivenCredit()
        self._raw: Any = None
        self._key: str | None = None
        self._has_ended = self._is_scored = False
        self._warn = warn
        self._sampling = dict(sampling)
        self._prefix = f"{secrets.token_hex(8)}-"

    @property
    def client(self) -> Any:
        """An `openai.AsyncOpenAI` that samples from the policy; its replies in the completion are trained on."""
        if self._raw is None:
            self._raw = raw_client(self._answer_raw, self.base_url, self.api_key)
        return self._raw

    @property
    def base_url(self) -> str:
        """Address of the same API for a client of the environment's own; it needs `api_key`."""
        return self._endpoint.base_url

    @property
    def api_key(self) -> str:
        """Key for `base_url` until the group ends, or this attempt fails."""
        if self._key is None:
            self._key = self._endpoint.add(self._answer_raw)
        return self._key

    def end_calls(self) -> None:
        """Refuse further calls, such as those of tasks that the environment has left, and end those of `api_key`."""
        self._has_ended = True
        if self._key is not None:
            self._endpoint.remove(self._key)

    def release(self) -> None:
        """End all calls, and drop the state."""
        self.end_calls()
        self.state = None  # the state refers to its client: without the cycle both are freed at once

    @property
    def is_raw(self) -> bool:
        """Whether the environment has asked for the raw client, or its key."""
        return self._key is not None

    def end_rollout(self) -> None:
        """Record no further `calls`: those of reward functions are no part of the rollout."""
        self._is_scored = True

    async def _ask(self, request: Mapping[str, Any], returned: Iterable[str] = (), is_raw: bool = False) -> Reply:
        if self._has_ended:
            raise ValueError("the rollout of this client has ended")
        reply = await policy_call(self.recorder, request, self._sampling, self._warn, returned)
        if not self._is_scored:
            self.calls.append(AnsweredCall(reply, is_raw, context_of(request["messages"]) if self.is_raw else None))
        return reply

    async def _answer_raw(self, body: Mapping[str, Any]) -> dict[str, Any]:
        try:
            reply = await self._ask(body, is_raw=True)
        except PromptTooLong as error:  # in words from which releases of verifiers recognise it
            raise ValueError(f"{error}, so it exceeds the model's context length") from error
        except (InferenceError, InferenceServerLost) as error:
            raise ValueError(str(error)) from error  # the recorder keeps what explains the end of the rollout
        return reply.chat_completion(f"{self._prefix}{self.recorder.replies.index(reply)}", str(body.get("model", "")))

    def raise_failure(self) -> None:
        """Raise the error that explains all others, if there is one."""
        if (error := self.recorder.server_error) is not None:
            raise error

    def reply(self, response: Any) -> Reply | None:
        """Return the reply behind `response` or a copy of it; None if it is from another client."""
        name = response.get("id") if isinstance(response, Mapping) else getattr(response, "id", None)
        if not isinstance(name, str) or not name.startswith(self._prefix):
            return None
        return self.recorder.replies[int(name.removeprefix(self._prefix))]

    async def get_response(
        self,
        prompt: Messages,
        model: str,
        sampling_args: dict[str, Any],
        tools: list[Tool] | None = None,
        state: Any = None,
        **_: Any,
    ) -> Response:
        """Sample one turn; verifiers calls the model only through this method."""
        self.state = state if state is not None else self.state
        if not isinstance(sampling_args or {}, Mapping):
            raise ValueError(f"sampling_args is {sampling_args!r:.80}, not a dictionary of sampling parameters")
        request = {**(sampling_args or {}), "messages": prompt, "tools": await self.to_native_tools(tools)}
        try:
            reply = await self._ask(request, _RETURNED)
        except (PromptTooLong, InferenceError, InferenceServerLost) as error:
            kind = OverlongPromptError if isinstance(error, PromptTooLong) else ModelError
            raise kind(str(error)) from error
        return _response(f"{self._prefix}{self.recorder.replies.index(reply)}", model, reply)

    async def to_native_tool(self, tool: Tool) -> dict[str, Any]:
        """Return the definition of a tool in the form of chat templates."""
        return tool_definition(tool)

    async def close(self) -> None:
        """Do nothing: other rollouts use the same connection."""

    # The other abstract methods serve the default get_response(), which is overridden.
    setup_client = to_native_prompt = get_native_response = None
    raise_from_native_response = from_native_response = None


def tool_definition(tool: Tool) -> dict[str, Any]:
    """Return the definition of a tool in the form of chat templates."""
    return {"type": "function", "function": tool.model_dump(exclude_none=True)}


def _response(name: str, model: str, reply: Reply) -> Response:
    calls = [
        ToolCall(id=call_id, name=call.name, arguments=call.arguments)
        for call_id, call in zip(reply.call_ids, reply.parsed.calls, strict=True)
    ]
    message = ResponseMessage(
        content=reply.parsed.content,
        reasoning_content=reply.parsed.reasoning,
        tool_calls=calls or None,
        finish_reason=reply.finish_reason,
        is_truncated=reply.is_truncated,
        tokens=ResponseTokens.model_construct(**view_turn(reply.turn)) if reply.turn is not None else None,
    )
    used, sampled = reply.prompt_tokens, reply.completion_tokens
    usage = Usage(prompt_tokens=used, reasoning_tokens=0, completion_tokens=sampled, total_tokens=used + sampled)
    return Response(id=name, created=0, model=model, usage=usage, message=message)


class TokenView(Sequence[Any]):
    """A read-only list of a turn's numbers that shares the memory of the rollout; slices and sums are lists.

    With separate lists for each turn, memory would grow with the square of the number of turns.
    """

    __slots__ = ("_array", "turn")
    __pydantic_serializer__ = SchemaSerializer(
        core_schema.any_schema(serialization=core_schema.plain_serializer_function_ser_schema(list))
    )
    """Environments dump responses, also to JSON."""

    def __init__(self, turn: Turn, array: Callable[[], NDArray[Any]]) -> None:
        """View the array of `turn` that `array` returns at each access."""
        self.turn = turn
        self._array = array

    def __len__(self) -> int:
        return len(self._array())

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self._array()[index].tolist()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._array().tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __add__(self, other: Sequence[Any]) -> list[Any]:
        return [*self, *other]

    def __radd__(self, other: Sequence[Any]) -> list[Any]:
        return [*other, *self]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self._array(), dtype)

    def __repr__(self) -> str:
        return repr(list(self))


def is_whole(tokens: Mapping[str, Any], turn: Turn) -> bool:
    """Return whether the tokens of a step are still the views of the whole turn."""
    views = (tokens["completion_ids"], tokens["completion_mask"])
    return all(type(view) is TokenView and view.turn is turn for view in views)


def view_turn(turn: Turn) -> dict[str, TokenView]:
    """Return the ids, masks and log-probabilities of a turn under verifiers' names."""
    sampled = len(turn.generation.token_ids)
    return {
        "prompt_ids": TokenView(turn, lambda: turn.sequence.ids[: turn.start]),
        "prompt_mask": TokenView(turn, lambda: np.broadcast_to(np.int32(0), turn.start)),
        "completion_ids": TokenView(turn, lambda: turn.generation.token_ids),
        "completion_mask": TokenView(turn, lambda: np.broadcast_to(np.int32(1), sampled)),
        "completion_logprobs": TokenView(turn, lambda: turn.generation.logprobs),
    }


StepRewards = Literal["ignore", "add", "included"]


@dataclass(frozen=True, slots=True)
class StepCredit:
    """What an environment has set in one step; `reply` is None if another model answered."""

    reply: Reply | None
    reward: float | None
    advantage: float | None


@dataclass(frozen=True, slots=True)
class GivenCredit:
    """What an environment has set in one rollout.

    Attributes:
        advantage: of the rollout; None if it is not set.
        steps: of the trajectory, in order.
    """

    advantage: float | None = None
    steps: tuple[StepCredit, ...] = ()

    @classmethod
    def read(cls, state: Any, find_reply: Callable[[Any], Reply | None]) -> Self:
        """Read an unscored state. Raises EnvironmentFailed if a value is not a finite number."""
        steps = tuple(
            StepCredit(
                find_reply(step.get("response")),
                _number("the reward of a step", step.get("reward")),
                _number("the advantage of a step", step.get("advantage")),
            )
            for step in state.get("trajectory") or ()
        )
        return cls(_number("state['advantage']", state.get("advantage")), steps)

    @property
    def has_rewards(self) -> bool:
        """Whether at least one step has a reward of its own."""
        return any(step.reward is not None for step in self.steps)

    @property
    def has_advantages(self) -> bool:
        """Whether the rollout or a step has an advantage."""
        return self.advantage is not None or any(step.advantage is not None for step in self.steps)

    @property
    def total(self) -> float:
        """Sum of the rewards of the steps."""
        return sum(step.reward or 0.0 for step in self.steps)

    def restore(self, state: Any) -> None:
        """Undo what an earlier attempt at scoring has set, which reward functions may read."""
        if self.advantage is None and state.get("advantage") is not None:
            state["advantage"] = None
        for step, given in zip(state.get("trajectory") or (), self.steps, strict=False):
            for name in ("reward", "advantage"):
                if getattr(given, name) is None and step.get(name) is not None:
                    step[name] = None

    def credits(self, trained: Mapping[Reply, Any], reward: float, mode: StepRewards) -> dict[Reply, Credit] | None:
        """Return the credit of each trained turn; None if all have the rollout's `reward`, which includes `total`.

        A turn is credited with the reward that comes after it: `reward` without the rewards of earlier steps. It is, by
        the setting alone, also if no step of this rollout has a reward: it is compared with rollouts whose steps do.
        Turns are numbered as steps, also those that are not trained. A given advantage takes the place of the one that
        is computed.
        """
        by_turn = mode != "ignore"
        if not by_turn and not self.has_advantages:
            return None
        advantages = {step.reply: step.advantage for step in self.steps}
        remaining = self._remaining(reward) if by_turn else {}
        numbers = dict.fromkeys([*(step.reply for step in self.steps if step.reply is not None), *trained])
        credits = dict[Reply, Credit]()
        for number, reply in enumerate(numbers):
            if reply not in trained:
                continue
            advantage = advantages.get(reply)
            advantage = self.advantage if advantage is None else advantage
            separate = by_turn or advantages.get(reply) is not None
            credits[reply] = Credit(f"turn {number}" if separate else "", remaining.get(reply, reward), advantage)
        return credits

    def _remaining(self, reward: float) -> dict[Reply | None, float]:
        remaining = dict[Reply | None, float]()
        for step in self.steps:
            remaining[step.reply] = reward
            reward -= step.reward or 0.0
        return remaining


def check_scored(given: GivenCredit, state: Any) -> None:
    """Raise UnsupportedEnvironment if the rubric has set rewards or advantages of single steps.

    Verifiers gives all steps without a value the same one.
    """
    steps = state.get("trajectory") or ()
    for name in ("reward", "advantage"):
        open_steps = [after for before, after in zip(given.steps, steps, strict=False) if getattr(before, name) is None]
        if len({after.get(name) for after in open_steps}) > 1:
            raise UnsupportedEnvironment(
                f"its rubric sets `{name}` of single steps, which would be ignored; set it in add_trajectory_step(), "
                "or return rewards from the rubric"
            )


def _number(name: str, value: Any) -> float | None:
    return None if value is None else as_number(name, value)
