"""The model client of v1 environments: answers the calls of verifiers' interception server.

Verifiers sends the id of the trace as the session id, which selects the recorder. The recorder's token ids,
log-probabilities and versions are used, not those of the trace.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verifiers.v1.clients import Client
from verifiers.v1.dialects import ChatDialect, Dialect
from verifiers.v1.errors import ProviderError
from verifiers.v1.graph import PendingTurn
from verifiers.v1.types import AssistantMessage, Response, SamplingConfig, ToolCall, Usage

from prime_rl.rollouts.clients.inference_client import InferenceError, InferenceServerLost
from prime_rl.rollouts.clients.openai_chat_client import PromptTooLong
from prime_rl.rollouts.recorder import Recorder
from prime_rl.rollouts.replies import Reply
from prime_rl.rollouts.trajectory_merging import Mask

CONTEXT_OVERFLOW = "maximum context length"
"""Phrase in the error by which chat harnesses recognise a full context."""


@dataclass(frozen=True, slots=True)
class TraceClient:
    """The recorder and the sampling parameters of one trace.

    Attributes:
        recorder: records the model calls.
        sampling: vLLM sampling parameters.
        answers: verifiers' messages and our replies.
    """

    recorder: Recorder
    sampling: Mapping[str, Any]
    answers: list[tuple[AssistantMessage, Reply]] = field(default_factory=list)

    def trained(self, trace: Any) -> dict[Reply, Mask]:
        """Return the replies in the trace, without those that verifiers rejected or a hook rewrote."""
        kept = {id(node.message) for node in trace.nodes}
        return {reply: True for message, reply in self.answers if id(message) in kept}


class InterceptionClient(Client):
    """Answers the model calls of all running traces.

    Attributes:
        traces: clients by the id of the trace.
    """

    def __init__(self) -> None:
        self.traces: dict[str, TraceClient] = {}

    async def get_response(
        self,
        dialect: Dialect,
        body: dict[str, Any],
        sampling: SamplingConfig,
        session_id: str | None = None,
        turn: PendingTurn | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """Sample one reply; ProviderError if it fails. Only `max_tokens` of the caller's sampling is used."""
        trace = self.traces.get(session_id or "")
        if trace is None or not isinstance(dialect, ChatDialect):
            raise ProviderError("only chat completions of a running rollout are supported", status_code=400)
        limits = [limit for limit in (body.get("max_tokens"), trace.sampling.get("max_tokens")) if limit]
        try:
            reply = await trace.recorder.ask(
                body["messages"],
                [tool for tool in body.get("tools") or () if tool.get("type") == "function"],
                {**trace.sampling, **({"max_tokens": min(limits)} if limits else {})},
            )
        except (PromptTooLong, InferenceError, InferenceServerLost, ValueError) as error:
            prefix = ""
            if isinstance(error, PromptTooLong):
                prefix = f"{CONTEXT_OVERFLOW}: "
            elif isinstance(error, ValueError):
                prefix = "the messages cannot be rendered: "
            raise ProviderError(f"{prefix}{error}", status_code=400) from error  # 400: no retry, the group has failed
        response = _response(str(body.get("model", "")), reply)
        trace.answers.append((response.message, reply))
        return response


def _response(model: str, reply: Reply) -> Response:
    calls = [
        ToolCall(id=call_id, name=call.name, arguments=call.arguments)
        for call_id, call in zip(reply.call_ids, reply.parsed.calls, strict=True)
    ]
    message = AssistantMessage(
        content=reply.parsed.content, reasoning_content=reply.parsed.reasoning, tool_calls=calls or None
    )
    usage = Usage(prompt_tokens=reply.prompt_tokens, completion_tokens=reply.completion_tokens)
    raw = reply.chat_completion("chatcmpl", model)  # the format that harnesses read
    response = Response(
        id="", created=raw["created"], model=model, message=message, finish_reason=reply.finish_reason, usage=usage
    )
    response.raw = raw
    return response
