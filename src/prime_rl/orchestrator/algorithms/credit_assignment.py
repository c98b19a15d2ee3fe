"""The advantages of a batch, one for each part of a rollout (`Credit`). Most rollouts have only one part.

group --> comparisons: parts with the same name --> shaped rewards --> advantage function --> advantages of the parts
  |                                                                                                   ^
  `-- advantages that the environment gives ----------------------------------------------------------'
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.core.types import Credit, Group, Rollout
from prime_rl.orchestrator.algorithms.advantages import Advantage, Scores, has_zero_advantages
from prime_rl.orchestrator.algorithms.reward_shaping import shape_rewards


@dataclass(frozen=True, slots=True)
class Comparison:
    """Parts of a group that are compared with each other.

    Attributes:
        scores: input of the advantage function, with shaped rewards.
        parts: int64, their indices among the parts of the group (`Group.part_offsets`).
    """

    scores: Scores
    parts: NDArray[np.int64]


def part_advantages(
    advantage: Advantage, groups: Sequence[Group], config: OrchestratorConfig
) -> list[NDArray[np.float64]]:
    """Return the advantages of the parts of each group, float64 [P]; P is the number of rollouts without credits."""
    compared = [comparisons(group, config) for group in groups]
    scores = [comparison.scores for of_group in compared for comparison in of_group]
    computed = iter(advantage(scores) if scores else ())
    advantages = [_given(group) for group in groups]
    for of_group, values in zip(compared, advantages, strict=True):
        for comparison in of_group:
            values[comparison.parts] = next(computed)
    return advantages


def has_only_zero_advantages(group: Group, config: OrchestratorConfig) -> bool:
    """Return whether every advantage of the group is 0 in any batch. Raises ConfigError as `advantage_function`."""
    compared = comparisons(group, config)
    return not _given(group).any() and all(has_zero_advantages(config.advantage, one.scores) for one in compared)


def comparisons(group: Group, config: OrchestratorConfig) -> list[Comparison]:
    """Return which parts of a group are compared. Parts with a given advantage are not."""
    if any(rollout.credits for rollout in group.rollouts):
        found = [_comparison(members) for members in _members(group)]
    else:
        found = [Comparison(Scores.of(group), np.arange(len(group.rollouts)))]
    shaping, zero_truncated = config.reward_shaping, config.zero_truncated_completions
    return [
        replace(one, scores=replace(one.scores, rewards=shape_rewards(shaping, one.scores, zero_truncated)))
        for one in found
    ]


@dataclass(frozen=True, slots=True)
class _Part:
    index: int
    credit: Credit
    length: int
    is_truncated: bool


def _members(group: Group) -> list[list[_Part]]:
    """Return the parts without a given advantage, by what they are compared with."""
    parts = [part for part in _parts(group) if part.credit.advantage is None]
    counts = Counter((part.credit.name, part.credit.context) for part in parts)
    members: dict[tuple[str, str | None], list[_Part]] = {}
    for part in parts:
        name, context = part.credit.name, part.credit.context
        members.setdefault((name, context if counts[name, context] > 1 else None), []).append(part)
    return [*members.values()]


def _comparison(parts: Sequence[_Part]) -> Comparison:
    scores = Scores(
        rewards=np.array([part.credit.reward for part in parts], np.float64),
        lengths=np.array([part.length for part in parts], np.int64),
        truncated=np.array([part.is_truncated for part in parts], np.bool_),
    )
    return Comparison(scores, np.array([part.index for part in parts], np.int64))


def _parts(group: Group) -> Iterator[_Part]:
    index = 0
    for rollout in group.rollouts:
        credits = rollout.credits or (Credit("", rollout.reward),)
        for credit, length in zip(credits, _lengths(rollout, len(credits)), strict=True):
            is_truncated = rollout.is_truncated if credit.is_truncated is None else credit.is_truncated
            yield _Part(index, credit, int(length), is_truncated)
            index += 1


def _lengths(rollout: Rollout, count: int) -> NDArray[np.int64]:
    """Return the number of sampled tokens of each part."""
    lengths = np.zeros(count, np.int64)
    for sample in rollout.samples:
        owners = np.zeros(len(sample), np.int32) if sample.credits is None else sample.credits
        lengths += np.bincount(owners[sample.loss_mask], minlength=count)
    return lengths


def _given(group: Group) -> NDArray[np.float64]:
    """Return the advantages that the environment gives; 0 for the other parts."""
    given = np.zeros(group.part_offsets[-1], np.float64)
    for start, rollout in zip(group.part_offsets, group.rollouts, strict=False):
        for index, credit in enumerate(rollout.credits):
            given[start + index] = credit.advantage or 0.0
    return given
