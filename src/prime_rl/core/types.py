"""Data types that the three processes share, as frozen dataclasses without torch or vllm."""

from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

Split = Literal["train", "eval"]

EvalSplit = Literal["own", "train", "none"]
"""Evaluation examples are a separate split, or the training examples; `none`: the environment has no splits."""


@dataclass(frozen=True, order=True, slots=True)
class PolicyVersion:
    """Version of the policy, ordered by (branch, step).

    Version 0 is the base model; step n trains version n and produces version n + 1. Each rollback of a run starts a
    new branch, so that its versions are newer than those that it abandons.
    """

    branch: int
    step: int

    def __str__(self) -> str:
        """Return the form that is used as the engine's weight version, e.g. `0.12`."""
        return f"{self.branch}.{self.step}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `str(version)`. Raises ValueError if malformed."""
        branch, _, step = text.partition(".")
        return cls(int(branch), int(step))


@dataclass(frozen=True, slots=True)
class Routes:
    """The experts that the sampler chose for n tokens in a row, for router replay.

    Attributes:
        dtype: numpy's name of the element type, |u1 or <u2.
        shape: n, layers of the model (those without experts hold zeros), experts per token.
        data: the elements in C order.
    """

    dtype: Literal["|u1", "<u2"]
    shape: tuple[int, int, int]
    data: bytes = field(repr=False)

    @classmethod
    def of(cls, array: NDArray[Any]) -> Self:
        """Store an array [n, layers, experts per token] of uint8 or uint16."""
        return cls("|u1" if array.dtype == np.uint8 else "<u2", array.shape, array.tobytes())

    @property
    def array(self) -> NDArray[Any]:
        """The ids of the experts. Raises ValueError if `data` has another size than `shape`."""
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class Sample:
    """One token sequence to train on; entry t of every array describes token t.

    Attributes:
        tokens: int32 [T], prompts and completions.
        loss_mask: bool [T], True where the policy sampled the token.
        logprobs: float32 [T], the sampler's log-probability of the token (0 if it was not sampled).
        versions: int32 [T], step of the policy version that sampled the token (-1 if none did).
        credits: int32 [T], index of the token's credit in `Rollout.credits`; None: the first of all tokens.
        routes: of all T tokens, zeros for the last one, which no sampler has processed; None: not recorded.
    """

    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    credits: NDArray[np.int32] | None = None
    routes: Routes | None = None

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Credit:
    """What a part of a rollout is credited with: one of several agents, or a turn.

    The advantages of a group compare parts with the same name and context; a part whose context no other part of that
    name has is compared by name alone.

    Attributes:
        name: of the agent or the turn.
        reward: of the part.
        advantage: given by the environment; None: computed from the rewards.
        context: identifies the agent's task if tasks differ within a group.
        is_truncated: a completion of the agent reached its token limit; None: as in the rollout.
    """

    name: str
    reward: float
    advantage: float | None = None
    context: str = ""
    is_truncated: bool | None = None


@dataclass(frozen=True, slots=True)
class Rollout:
    """One finished episode of one example.

    Attributes:
        samples: token sequences to train on; several if the turns branch.
        reward: the environment's score.
        metrics: the environment's named scores, unweighted.
        is_truncated: a completion reached its token limit.
        text: the conversation as (role, content) pairs, for display. Model output: untrusted.
        credits: of its parts; empty: all tokens are credited with `reward`.
        answer: the reference answer of its example, for display; None: it has none.
        messages: in the normal form of `rendering.messages`, with tool calls and reasoning; empty: `text` is complete.
        tools: definitions of the tools that the model was offered, in OpenAI's form.
        weights: of the metrics that are reward functions, for display.
        sample_counts: of the metrics `samples/<name>`: `false_forks/<cause>` are samples that began although a
            conversation continued, `tokens_trained_twice` are 0.
    """

    samples: tuple[Sample, ...]
    reward: float
    metrics: dict[str, float]
    is_truncated: bool
    text: tuple[tuple[str, str], ...]
    credits: tuple[Credit, ...] = field(default=(), kw_only=True)
    answer: str | None = field(default=None, kw_only=True)
    messages: tuple[dict[str, Any], ...] = field(default=(), kw_only=True)
    tools: tuple[dict[str, Any], ...] = field(default=(), kw_only=True)
    weights: dict[str, float] = field(default_factory=dict, kw_only=True)
    sample_counts: dict[str, int] = field(default_factory=dict, kw_only=True)

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """The messages in the form that chat templates read. Model output: untrusted."""
        return list(self.messages) or [{"role": role, "content": content} for role, content in self.text]

    def is_sample_truncated(self, sample: Sample) -> bool:
        """Whether a completion of the agent of `sample`, or of the rollout if it has one agent, reached its limit."""
        own = None if sample.credits is None else self.credits[sample.credits[0]].is_truncated
        return self.is_truncated if own is None else own

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the policy sampled, over all samples."""
        return sum(int(np.count_nonzero(sample.loss_mask)) for sample in self.samples)


@dataclass(frozen=True, slots=True)
class Conversation(Rollout):
    """A rollout that always has its messages, for evaluation and synthesis.

    Attributes:
        completion_tokens: number of sampled tokens, also for a server that returns no tokens.
        versions: oldest and newest policy version that may have sampled it, if it has no samples.
    """

    completion_tokens: int = field(kw_only=True)
    versions: tuple[int, int] | None = field(default=None, kw_only=True)

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens the model sampled, as the server reports it."""
        return self.completion_tokens


@dataclass(frozen=True, slots=True)
class Group:
    """The finished rollouts of one example, which are scored, dispatched and shipped together.

    Attributes:
        group_id: position in the stream of examples.
        rollouts: the G rollouts.
        env: name of the environment.
        example: index of the example in the environment's data set.
        temperature: sampling temperature.
        top_k: number of most likely tokens that the sampler kept; 0 keeps all.
        top_p: probability mass of the most likely tokens that it kept; 1 keeps all.
        min_p: smallest probability, relative to the most likely token, that it kept; 0 keeps all.
        server: URL of the inference server that sampled it; "" if an earlier release wrote the group.
    """

    group_id: int
    rollouts: tuple[Rollout, ...]
    env: str
    example: int
    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    server: str = ""

    @property
    def rewards(self) -> NDArray[np.float64]:
        """Reward per rollout, float64 [G]."""
        return np.array([rollout.reward for rollout in self.rollouts], np.float64)

    @property
    def part_offsets(self) -> NDArray[np.int64]:
        """First part of each rollout among the P parts of the group, int64 [G + 1]; without credits it is one part."""
        return np.cumsum([0, *(max(1, len(rollout.credits)) for rollout in self.rollouts)])

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of sampled tokens per rollout, int64 [G]."""
        return np.array([rollout.sampled_tokens for rollout in self.rollouts], np.int64)
