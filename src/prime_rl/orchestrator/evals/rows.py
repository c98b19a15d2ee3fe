"""What is kept of a played example: one line of a results file."""

from typing import Any, Literal

import msgspec

from prime_rl.orchestrator.workers.conversation import Conversation
from prime_rl.types import Rollout

FailureKind = Literal["environment", "overlong", "refused"]


class Failure(msgspec.Struct, frozen=True):
    """Why an example has no rollouts.

    Attributes:
        kind: the environment failed, a prompt did not fit, or the server refused a request.
        message: one line.
    """

    kind: FailureKind
    message: str


class RolloutRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """One rollout.

    Attributes:
        reward: the environment's score.
        metrics: its named scores.
        is_truncated: cut by a token limit.
        tokens: sampled tokens; of a chat server what it says.
        messages: the conversation in the form that chat templates read. Model output: untrusted.
        tools: definitions of the tools that the model was offered.
        min_version: oldest policy version that sampled a token, if the server tells.
        max_version: newest.
    """

    reward: float
    metrics: dict[str, float]
    is_truncated: bool
    tokens: int
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []
    min_version: int | None = None
    max_version: int | None = None

    @classmethod
    def of(cls, rollout: Rollout) -> "RolloutRow":
        """Keep what is worth keeping of a rollout; its tokens are not."""
        messages: list[dict[str, Any]] = [{"role": role, "content": content} for role, content in rollout.text]
        tools: list[dict[str, Any]] = []
        if isinstance(rollout, Conversation):
            messages, tools = list(rollout.messages), list(rollout.tools)
        sampled = [sample.versions[sample.versions >= 0] for sample in rollout.samples]
        versions = [int(end) for array in sampled if len(array) for end in (array.min(), array.max())]
        if isinstance(rollout, Conversation) and rollout.versions is not None:
            versions += rollout.versions
        return cls(
            reward=rollout.reward,
            metrics=rollout.metrics,
            is_truncated=rollout.is_truncated,
            tokens=rollout.sampled_tokens,
            messages=messages,
            tools=tools,
            min_version=min(versions, default=None),
            max_version=max(versions, default=None),
        )


class ExampleRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """One example: either its rollouts, or why there are none."""

    example: int
    rollouts: list[RolloutRow] = []
    failure: Failure | None = None
