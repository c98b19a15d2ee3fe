"""How the rollouts of one environment are recorded: which recorder asks, and what is kept of it."""

from collections.abc import Sequence
from typing import Any

from prime_rl.orchestrator.engine import Engine
from prime_rl.orchestrator.messages import Message, readable
from prime_rl.orchestrator.renderer import Renderer
from prime_rl.orchestrator.workers.chat import ChatRecorder, ChatServer
from prime_rl.orchestrator.workers.conversation import Conversation
from prime_rl.orchestrator.workers.recorder import Recorder, TurnRecorder
from prime_rl.types import Rollout


class Recording:
    """Opens recorders and closes them into rollouts."""

    def __init__(self, renderer: Renderer | None, keep_messages: bool = False) -> None:
        """Record.

        Args:
            renderer: between messages and tokens; None where the server renders, which then has to be a `ChatServer`.
            keep_messages: make every rollout a `Conversation`; those of a `ChatServer` always are.
        """
        self._renderer = renderer
        self._keep_messages = keep_messages

    def prompt_tokens(self, messages: Sequence[Any], tools: list[dict[str, Any]] | None = None) -> int:
        """Return the length of a prompt in tokens; 0 where it is the server that renders it."""
        return len(self._renderer.render(messages, tools or None)) if self._renderer is not None else 0

    def recorder(self, server: Engine | ChatServer, seq_len: int, seed: Sequence[int] | None = None) -> Recorder:
        """Open the recorder of one rollout, whose samples may have `seq_len` tokens."""
        if isinstance(server, ChatServer):
            return ChatRecorder(server, seed)
        assert self._renderer is not None, "an Engine takes tokens"
        return TurnRecorder(server, self._renderer, seq_len, seed)

    def rollout(
        self,
        recorder: Recorder,
        messages: Sequence[Message],
        reward: float,
        metrics: dict[str, float],
        is_truncated: bool,
    ) -> Rollout:
        """Make a rollout of what was recorded.

        Args:
            recorder: of the rollout.
            messages: the conversation in normal form.
            reward: the environment's score.
            metrics: its named scores.
            is_truncated: cut by a limit.
        """
        text = tuple((message["role"], readable(message)) for message in messages)
        samples = recorder.samples()
        if not self._keep_messages and self._renderer is not None:
            return Rollout(samples, reward, metrics, is_truncated, text)
        return Conversation(
            samples, reward, metrics, is_truncated, text,
            messages=tuple(messages), tools=tuple(recorder.tools), completion_tokens=recorder.completion_tokens,
            versions=recorder.versions,
        )  # fmt: skip
