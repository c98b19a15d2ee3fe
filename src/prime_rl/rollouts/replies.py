"""What one model call returns: the sampled tokens, and the message that they are."""

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Generation:
    """One sampled completion of T tokens.

    Attributes:
        token_ids: int32 [T].
        logprobs: float32 [T], of the sampled tokens, temperature applied.
        versions: int32 [T], step of the policy version that sampled each token. The engine reports it per token; it is
            never inferred from time (I5).
        is_truncated: cut by `max_tokens`.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    is_truncated: bool


@dataclass(slots=True, eq=False)
class GrowingSequence:
    """The token ids of a sample that later turns may extend, int32."""

    ids: NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """The tokens of one model call. Its prompt is stored only in the sequence.

    Attributes:
        sequence: the ids of prompt and completion, and of later turns that extend it.
        start: length of the prompt.
        generation: the completion.
        parent: the turn that it extends: the prompt starts with the parent's prompt and completion.
    """

    sequence: GrowingSequence
    start: int
    generation: Generation
    parent: "Turn | None"

    @property
    def end(self) -> int:
        """Length of prompt and completion."""
        return self.start + len(self.generation.token_ids)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call: the function's name, and its arguments as the text of a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Parsed:
    """A parsed message.

    Attributes:
        content: the text without reasoning and calls; stripped of outer white space if there are calls.
        calls: in order.
        reasoning: the text between the reasoning tags; None without tags.
    """

    content: str
    calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """One answered model call.

    Attributes:
        parsed: the sampled message.
        call_ids: an id for each tool call, unique in the rollout.
        is_truncated: cut by a token limit.
        prompt_tokens: number of tokens in the prompt.
        completion_tokens: number of sampled tokens.
        tools: definitions of the offered tools, in OpenAI's form.
        turn: the tokens, if the server returns them.
        versions: oldest and newest policy version that may have sampled it, if the server returns no tokens.
    """

    parsed: Parsed
    call_ids: tuple[str, ...]
    is_truncated: bool
    prompt_tokens: int
    completion_tokens: int
    tools: list[dict[str, Any]] = field(default_factory=list)
    turn: Turn | None = None
    versions: tuple[int, int] | None = None

    @property
    def finish_reason(self) -> str:
        """Why the completion ended, in OpenAI's terms."""
        if self.is_truncated:
            return "length"
        return "tool_calls" if self.parsed.calls else "stop"

    def message(self) -> dict[str, Any]:
        """Return the message in OpenAI's form."""
        message: dict[str, Any] = {"role": "assistant", "content": self.parsed.content}
        if self.parsed.reasoning is not None:
            message["reasoning_content"] = self.parsed.reasoning
        if self.parsed.calls:
            message["tool_calls"] = [
                {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call_id, call in zip(self.call_ids, self.parsed.calls, strict=True)
            ]
        return message

    def chat_completion(self, name: str, model: str) -> dict[str, Any]:
        """Return the reply as OpenAI's chat completion with the id `name`."""
        used, sampled = self.prompt_tokens, self.completion_tokens
        return {
            "id": name,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": model,
            "choices": [{"index": 0, "message": self.message(), "finish_reason": self.finish_reason}],
            "usage": {"prompt_tokens": used, "completion_tokens": sampled, "total_tokens": used + sampled},
        }
