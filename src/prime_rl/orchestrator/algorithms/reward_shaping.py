"""Shapes the rewards of a group before its advantages are computed. Pure functions; the results are finite (I10)."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from prime_rl.configs.rollouts.advantage import LengthBonusConfig, LengthPenaltyConfig, RewardShapingConfig
from prime_rl.orchestrator.algorithms.advantages import Scores, bounded


def shape_rewards(config: RewardShapingConfig, scores: Scores, zero_truncated: bool = False) -> NDArray[np.float64]:
    """Return the rewards float64 [G] after truncation, the length bonus and the length penalty, in this order.

    With `zero_truncated`, rollouts with a completion that was cut by its token limit get reward 0.
    """
    scores = bounded(scores)
    if zero_truncated and scores.truncated is not None:
        scores = replace(scores, rewards=np.where(scores.truncated, 0.0, scores.rewards))
    if config.length_bonus is not None:
        scores = replace(scores, rewards=length_bonus(config.length_bonus, scores))
    if config.length_penalty is not None:
        scores = replace(scores, rewards=length_penalty(config.length_penalty, scores))
    return scores.rewards


def length_bonus(config: LengthBonusConfig, scores: Scores) -> NDArray[np.float64]:
    """Return R_i (1 + w clip(1 - L_i / mean L of the best, 0, 1)) for the best rollouts, R_i for the others.

    The best rollouts have the largest reward of the group, if it is positive. A wrong answer gains nothing by being
    short.
    """
    rewards, lengths = scores.rewards, scores.lengths
    best = (rewards == rewards.max()) & (rewards > 0)
    mean = lengths[best].mean() if best.any() else 0.0
    if mean <= 0:
        return rewards
    bonus = config.weight * np.clip(1 - lengths / mean, 0, 1)
    return np.where(best, rewards * (1 + bonus), rewards)


def length_penalty(config: LengthPenaltyConfig, scores: Scores) -> NDArray[np.float64]:
    """Return R_i - mean(R) (a L_i / max L + b I_i / max I + c T_i / max T), L sampled tokens, I inputs, T turns.

    The group's mean reward scales the penalty. A negative mean counts as 0, since it would reward length.
    """
    share = np.zeros_like(scores.rewards)
    weights = config.output_weight, config.input_weight, config.turns_weight
    for weight, amounts in zip(weights, (scores.lengths, scores.inputs, scores.turns), strict=True):
        if amounts is not None:
            share += weight * (amounts / max(1, int(amounts.max())))
    return np.asarray(scores.rewards - max(0.0, float(scores.rewards.mean())) * share)
