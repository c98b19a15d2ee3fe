"""A rollout whose messages are kept whole: for evaluation and synthesis, which look at what was said."""

from dataclasses import dataclass
from typing import Any

from prime_rl.types import Rollout


@dataclass(frozen=True, slots=True)
class Conversation(Rollout):
    """A rollout with its messages. Model output: untrusted.

    Attributes:
        messages: in the normal form of `orchestrator.messages`, tool calls and reasoning included.
        tools: definitions of the tools that the model was offered, in OpenAI's form.
        completion_tokens: how many tokens the model sampled; also where there are no samples to count them in.
        versions: oldest and newest policy version that may have sampled it, where there are no samples to tell.
    """

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]
    completion_tokens: int
    versions: tuple[int, int] | None = None

    @property
    def sampled_tokens(self) -> int:
        """How many tokens the model sampled, as the server reports it."""
        return self.completion_tokens
