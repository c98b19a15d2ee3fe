"""Rewards and advantages that a classic environment sets itself: in its state, or in steps of the trajectory.

Verifiers fills the same fields when it scores a group, so they are read before.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from prime_rl.core.types import Credit
from prime_rl.rollouts.group_failures import EnvironmentFailed, UnsupportedEnvironment, as_number
from prime_rl.rollouts.replies import Reply

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
        """Whether a step has a reward."""
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
    if value is None:
        return None
    try:
        return as_number(name, value)
    except (TypeError, ValueError) as error:
        raise EnvironmentFailed(f"{name} is {value!r:.80}, not a number") from error
