"""The vocabulary that the three processes share, as frozen dataclasses. No torch, no vllm."""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, order=True, slots=True)
class PolicyVersion:
    """Version v of the policy: the step that made it, in the branch it was made in.

    Version 0 is the base model; step n trains version n and makes version n + 1. Branches count the rewinds of a
    run, so versions order lexicographically: whatever a rewound run publishes is newer than what it abandoned.
    """

    branch: int
    step: int

    def __str__(self) -> str:
        """Give the form that travels as the engine's weight version, e.g. `0.12`."""
        return f"{self.branch}.{self.step}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `str(version)` back. Raises ValueError on anything else."""
        branch, _, step = text.partition(".")
        return cls(int(branch), int(step))


@dataclass(frozen=True, slots=True)
class Sample:
    """One token sequence to train on; entry t of every array describes token t.

    Attributes:
        tokens: int32 [T], prompt and completion.
        loss_mask: bool [T], True where the policy sampled the token.
        logprobs: float32 [T], the sampler's log-probability of the token (0 where it was not sampled).
        versions: int32 [T], step of the policy version that sampled the token (-1 where none did).
    """

    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Rollout:
    """One finished episode of one example: what to train on and how it was scored.

    Attributes:
        samples: one sample, or several where turns branch.
        reward: the environment's score.
        metrics: the environment's named scores, unweighted.
        is_truncated: a completion was cut by its token limit.
        text: the conversation for people to read: (role, content) in order. Model output: untrusted.
    """

    samples: tuple[Sample, ...]
    reward: float
    metrics: dict[str, float]
    is_truncated: bool
    text: tuple[tuple[str, str], ...]

    @property
    def sampled_tokens(self) -> int:
        """How many tokens the policy sampled, over all samples."""
        return sum(int(sample.loss_mask.sum()) for sample in self.samples)


@dataclass(frozen=True, slots=True)
class Group:
    """The finished rollouts of one example; scored, dispatched and shipped as one.

    Attributes:
        group_id: position in the endless stream of examples.
        rollouts: G of them.
        env: name of the environment.
        example: index of the example in the environment's data set.
        temperature: that the rollouts were sampled with.
        top_k: likeliest tokens that the sampler kept at most; 0 is all.
        top_p: mass of the likeliest tokens that it kept; 1 is all.
        min_p: it kept tokens at least this likely relative to the likeliest; 0 is all.
    """

    group_id: int
    rollouts: tuple[Rollout, ...]
    env: str
    example: int
    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def rewards(self) -> NDArray[np.float64]:
        """The rollouts' rewards, float64 [G]."""
        return np.array([rollout.reward for rollout in self.rollouts], np.float64)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The rollouts' sampled tokens, int64 [G]."""
        return np.array([rollout.sampled_tokens for rollout in self.rollouts], np.int64)
