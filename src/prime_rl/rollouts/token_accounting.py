"""Counts the tokens that groups sample, and the rollouts and tokens that are discarded, by reason."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from prime_rl.core.types import Rollout

REASONS = ("retried", "failed", "replayed", "unused", "cancelled")
"""Why rollouts are discarded that are neither trained on nor dropped by a filter.

retried: an infrastructure failure; the rollout was retried in the same group.
failed: the rollout failed, or another one did and the whole group was dropped.
replayed: the worker or server was lost; the group was run again.
unused: model calls that are no turn of a rollout. They count as no rollout.
cancelled: the group was cancelled.
"""


@dataclass(slots=True)
class DiscardedWork:
    """Discarded rollouts and sampled tokens, by reason (`REASONS`)."""

    rollouts: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)

    def add(self, reason: str, rollouts: int, tokens: int) -> None:
        """Add to the counts of a reason."""
        self.rollouts[reason] += rollouts
        self.tokens[reason] += tokens

    @classmethod
    def total(cls, parts: Iterable["DiscardedWork"]) -> "DiscardedWork":
        """Return the sum."""
        total = cls()
        for part in parts:
            total.rollouts.update(part.rollouts)
            total.tokens.update(part.tokens)
        return total

    def metrics(self) -> dict[str, float]:
        """Return `rollouts/<reason>` and `tokens/lost/<reason>` for every reason."""
        rollouts = {f"rollouts/{reason}": float(self.rollouts[reason]) for reason in REASONS if reason != "unused"}
        return rollouts | {f"tokens/lost/{reason}": float(self.tokens[reason]) for reason in REASONS}


ACTIVITIES = ("environment", "engine", "scoring")
"""What a rollout takes time for.

environment: its turns, without the wait for the engine.
engine: waiting for completions.
scoring: the reward functions, if the environment scores groups after their rollouts; else part of `environment`.
"""


@dataclass(slots=True)
class RolloutSeconds:
    """Seconds by activity (`ACTIVITIES`) of the rollouts that finished."""

    rollouts: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(ACTIVITIES, 0.0))

    def add(self, rollouts: int, seconds: Mapping[str, float]) -> None:
        """Add a group."""
        self.rollouts += rollouts
        for activity, value in seconds.items():
            self.seconds[activity] += value

    def take_means(self) -> dict[str, float]:
        """Return the seconds per rollout by activity, and start again; {} without rollouts."""
        means = {activity: value / self.rollouts for activity, value in self.seconds.items()} if self.rollouts else {}
        self.rollouts, self.seconds = 0, dict.fromkeys(ACTIVITIES, 0.0)
        return means


class GroupAccount:
    """Counts the tokens that one group samples, and the seconds that its rollouts take.

    Attributes:
        sampled: all tokens so far.
        discarded: rollouts and tokens by reason that the running group has discarded.
        seconds: by activity (`ACTIVITIES`), over the rollouts that finished.
        on_stuck: called when a cancelled rollout of the group does not end.
    """

    def __init__(
        self, on_tokens: Callable[[int], None] = lambda count: None, on_stuck: Callable[[], None] = lambda: None
    ) -> None:
        """Start at 0; `on_tokens` is called with the tokens of each completion."""
        self.on_stuck = on_stuck
        self.sampled = 0
        self.discarded: dict[str, tuple[int, int]] = {}
        self.seconds: dict[str, float] = {}
        self._on_tokens = on_tokens

    def count(self, tokens: int) -> None:
        """Count the tokens of a completion."""
        self.sampled += tokens
        self._on_tokens(tokens)

    def add_seconds(self, activity: str, seconds: float) -> None:
        """Add the seconds of one rollout, or of the scoring of the group."""
        self.seconds[activity] = self.seconds.get(activity, 0.0) + seconds

    def discard(self, reason: str, rollouts: int, tokens: int) -> None:
        """Count rollouts that the group continues without."""
        before = self.discarded.get(reason, (0, 0))
        self.discarded[reason] = before[0] + rollouts, before[1] + tokens

    def close(self, rollouts: Sequence[Rollout]) -> dict[str, tuple[int, int]]:
        """Return the discarded work of a group that ended with these rollouts."""
        unused = self._remaining - sum(rollout.sampled_tokens for rollout in rollouts)
        return self.discarded | ({"unused": (0, unused)} if unused else {})

    def close_failed(self, reason: str, rollouts: int) -> dict[str, tuple[int, int]]:
        """Return the discarded work of a group that ended without its rollouts."""
        self.discard(reason, rollouts - self.discarded.get("failed", (0, 0))[0], self._remaining)
        return self.discarded

    @property
    def _remaining(self) -> int:
        return self.sampled - sum(tokens for _, tokens in self.discarded.values())
