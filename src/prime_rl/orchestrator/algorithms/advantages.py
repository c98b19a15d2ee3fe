"""The advantages of a batch, one for each part of a rollout (`Credit`). Most rollouts have only one part.

group --> comparisons: parts with the same name --> shaped rewards --> advantage function --> advantages of the parts
  |                                                                                                   ^
  `-- advantages that the environment gives ----------------------------------------------------------'

Each algorithm is one function. Advantages are always finite (I10), and exactly 0 if all rewards of a group are equal,
unless the algorithm normalises over the batch. `docs/design/algorithms.md` compares the formulas.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from prime_rl.configs import advantage as configs
from prime_rl.configs.advantage import (
    AdvantageConfig,
    CustomAdvantageConfig,
    LengthBonusConfig,
    LengthPenaltyConfig,
    RewardShapingConfig,
)
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.core.errors import ConfigError, summarize_exception
from prime_rl.core.import_utils import check_call, load_function
from prime_rl.core.types import Credit, Group, Rollout, Sample

_STD_FLOOR = 1e-6
_LARGEST = 1e30
"""Rewards and advantages are clipped to this magnitude, so sums, squares and float32 values are finite."""


@dataclass(frozen=True, slots=True)
class Scores:
    """The input of an advantage function for one group of G rollouts; all arrays are [G], None if unknown.

    If rollouts have parts with a reward each, these take the place of the rollouts (`comparisons`).

    Attributes:
        rewards: shaped; finite.
        lengths: sampled tokens.
        inputs: tokens that were given to the model (prompt, tools, user).
        turns: completions.
        truncated: a completion was cut by its token limit.
    """

    rewards: NDArray[np.float64]
    lengths: NDArray[np.int64]
    inputs: NDArray[np.int64] | None = None
    turns: NDArray[np.int64] | None = None
    truncated: NDArray[np.bool_] | None = None

    @classmethod
    def of(cls, group: Group) -> Self:
        """Return the scores of a finished group."""
        sizes, lengths = [sum(len(sample) for sample in rollout.samples) for rollout in group.rollouts], group.lengths
        return cls(
            rewards=group.rewards,
            lengths=lengths,
            inputs=np.array(sizes, np.int64) - lengths,
            turns=np.array([sum(_completions(s) for s in rollout.samples) for rollout in group.rollouts], np.int64),
            truncated=np.array([rollout.is_truncated for rollout in group.rollouts], np.bool_),
        )


Advantage = Callable[[Sequence[Scores]], list[NDArray[np.float64]]]
"""Takes the groups of a whole batch, since some algorithms normalise over it; returns an array [G] for each."""


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


def uncompared_share(groups: Sequence[Group]) -> float:
    """Return the share of the sampled tokens that are of parts which no other rollout of their group has.

    A group baseline makes their advantage 0: turns that only the longest rollout reaches, for example.
    """
    alone, total = 0, 0
    for group in groups:
        total += int(group.lengths.sum())
        if any(rollout.credits for rollout in group.rollouts):
            alone += sum(members[0].length for members in _members(group) if len(members) == 1)
    return alone / total if total else 0.0


@dataclass(frozen=True, slots=True)
class _Part:
    index: int
    credit: Credit
    length: int
    inputs: int
    turns: int
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
        inputs=np.array([part.inputs for part in parts], np.int64),
        turns=np.array([part.turns for part in parts], np.int64),
        truncated=np.array([part.is_truncated for part in parts], np.bool_),
    )
    return Comparison(scores, np.array([part.index for part in parts], np.int64))


def _parts(group: Group) -> Iterator[_Part]:
    index = 0
    for rollout in group.rollouts:
        credits = rollout.credits or (Credit("", rollout.reward),)
        for credit, (length, inputs, turns) in zip(credits, _amounts(rollout, len(credits)).tolist(), strict=True):
            is_truncated = rollout.is_truncated if credit.is_truncated is None else credit.is_truncated
            yield _Part(index, credit, length, inputs, turns, is_truncated)
            index += 1


def _amounts(rollout: Rollout, count: int) -> NDArray[np.int64]:
    """Return sampled tokens, input tokens and turns of each part, int64 [count, 3].

    Input tokens belong to the part that samples the next token, those at the end to the last one.
    """
    amounts = np.zeros((count, 3), np.int64)
    for sample in rollout.samples:
        mask = sample.loss_mask
        owners = np.zeros(len(sample), np.int32) if sample.credits is None else sample.credits
        sampled = np.flatnonzero(mask)
        if len(sampled):
            following = np.searchsorted(sampled, np.arange(len(sample)))
            owners = owners[sampled[np.minimum(following, len(sampled) - 1)]]
        starts = mask & ~(np.append(False, mask[:-1]) & (owners == np.append(-1, owners[:-1])))
        amounts += np.stack([np.bincount(owners[which], minlength=count) for which in (mask, ~mask, starts)], axis=1)
    return amounts


def _given(group: Group) -> NDArray[np.float64]:
    """Return the advantages that the environment gives; 0 for the other parts."""
    given = np.zeros(group.part_offsets[-1], np.float64)
    for start, rollout in zip(group.part_offsets, group.rollouts, strict=False):
        for index, credit in enumerate(rollout.credits):
            given[start + index] = credit.advantage or 0.0
    return given


def _completions(sample: Sample) -> int:
    """Count the runs of sampled tokens."""
    mask = sample.loss_mask
    return int(np.count_nonzero(mask[1:] & ~mask[:-1])) + int(mask[0])


def shape_rewards(config: RewardShapingConfig, scores: Scores, zero_truncated: bool = False) -> NDArray[np.float64]:
    """Return the rewards float64 [G] after truncation, the length bonus and the length penalty, in this order.

    With `zero_truncated`, rollouts with a completion that was cut by its token limit get reward 0.
    """
    scores = _bounded(scores)
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


def _bounded(scores: Scores) -> Scores:
    """Clip the rewards to a magnitude whose sums and squares are finite."""
    return replace(scores, rewards=np.clip(scores.rewards, -_LARGEST, _LARGEST))


def advantage_function(config: AdvantageConfig) -> Advantage:
    """Return the advantage that `config` describes; raise ConfigError if a custom function cannot be loaded.

    The returned function raises it if the custom function fails or does not return one finite array [G] for each group.
    """
    algorithm = _algorithm(config)
    low = 0.0 if config.clip_negative else -_LARGEST

    def advantages(batch: Sequence[Scores]) -> list[NDArray[np.float64]]:
        return [np.clip(values, low, _LARGEST) for values in algorithm([_bounded(scores) for scores in batch])]

    return advantages


def has_zero_advantages(config: AdvantageConfig, scores: Scores) -> bool:
    """Return whether every advantage of a group with these shaped scores is 0 in any batch.

    It never is if the baseline is the batch's mean. Raises ConfigError as `advantage_function` does.
    """
    if isinstance(config, configs.ReinforcePPAdvantageConfig):
        return False
    if isinstance(config, CustomAdvantageConfig) and config.batch_level:
        return False
    return not advantage_function(config)([scores])[0].any()


def _algorithm(config: AdvantageConfig) -> Advantage:
    match config:
        case configs.GRPOAdvantageConfig():
            return _by_group(partial(grpo, std=config.std, length_weighted_mean=config.length_weighted_mean))
        case configs.DrGRPOAdvantageConfig():
            return _by_group(grpo)
        case configs.RLOOAdvantageConfig():
            return _by_group(rloo)
        case configs.OPOAdvantageConfig():
            return _by_group(opo)
        case configs.MaxRLAdvantageConfig():
            return _by_group(max_rl)
        case configs.NoAdvantageConfig():
            return _by_group(lambda scores: scores.rewards)
        case configs.ReinforcePPAdvantageConfig():
            return reinforce_pp
        case configs.ReinforcePPBaselineAdvantageConfig():
            return reinforce_pp_baseline
        case CustomAdvantageConfig():
            return _custom(config)


def _by_group(function: Callable[[Scores], NDArray[np.float64]]) -> Advantage:
    return lambda batch: [function(scores) for scores in batch]


def grpo(scores: Scores, std: bool = False, length_weighted_mean: bool = False) -> NDArray[np.float64]:
    """Return A_i = R_i - mean(R), divided by the group's standard deviation if `std`; float64 [G].

    Group relative policy optimisation (Shao et al. 2024, arXiv 2402.03300, section 4.1.2); without the division it is
    Dr. GRPO's (Liu et al. 2025, arXiv 2503.20783, section 3.1).
    """
    centred = _centred(scores.rewards, scores.lengths if length_weighted_mean else None)
    return centred / (scores.rewards.std() + _STD_FLOOR) if std else centred


def rloo(scores: Scores) -> NDArray[np.float64]:
    """Return A_i = R_i - mean of R_j over j != i, which is (R_i - mean(R)) G / (G - 1); 0 for a single rollout.

    REINFORCE leave-one-out (Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free!"; Ahmadian et al.
    2024, arXiv 2402.14740).
    """
    count = len(scores.rewards)
    return _centred(scores.rewards) * (count / max(1, count - 1))


def opo(scores: Scores) -> NDArray[np.float64]:
    """Return A_i = R_i - sum_j(L_j R_j) / sum_j(L_j), L the lengths; float64 [G].

    The baseline of least variance if the squared gradient of a completion grows with its length (Hao et al. 2025,
    arXiv 2505.23585, optimal reward baseline). If all lengths are 0, the weights are equal.
    """
    return grpo(scores, length_weighted_mean=True)


def max_rl(scores: Scores) -> NDArray[np.float64]:
    """Return A_i = (R_i - mean(R)) / mean(R), and 0 if the mean is not positive; float64 [G].

    With rewards 0 and 1 an estimate of the gradient of the log-likelihood of success (Tajwar et al. 2026, maximum
    likelihood reinforcement learning, arXiv 2602.02710).
    """
    mean = scores.rewards.mean()
    return _centred(scores.rewards) / mean if mean > 0 else np.zeros_like(scores.rewards)


def reinforce_pp(batch: Sequence[Scores]) -> list[NDArray[np.float64]]:
    """Return A = (R - mean(R)) / std(R), mean and standard deviation over all rollouts of the batch.

    REINFORCE++ (Hu et al. 2025, arXiv 2501.03262, global advantage normalisation) without its KL term in the reward.
    """
    return _over_batch_std(batch, _centred(np.concatenate([scores.rewards for scores in batch])))


def reinforce_pp_baseline(batch: Sequence[Scores]) -> list[NDArray[np.float64]]:
    """Return A = C / std(C), C being R - mean(R) by group, and the standard deviation over the batch.

    REINFORCE++ with baseline (Hu et al. 2025, arXiv 2501.03262). The paper also subtracts the batch's mean of C, which
    is 0.
    """
    return _over_batch_std(batch, np.concatenate([_centred(scores.rewards) for scores in batch]))


def _centred(rewards: NDArray[np.float64], weights: NDArray[np.int64] | None = None) -> NDArray[np.float64]:
    """Subtract the mean; exact zeros if all rewards are equal, which rounding would not give."""
    if rewards.min() == rewards.max():
        return np.zeros_like(rewards)
    weighted = weights is not None and weights.sum() > 0
    return np.asarray(rewards - np.average(rewards, weights=weights if weighted else None))


def _over_batch_std(batch: Sequence[Scores], centred: NDArray[np.float64]) -> list[NDArray[np.float64]]:
    ends = np.cumsum([len(scores.rewards) for scores in batch])
    return np.split(centred / (centred.std() + _STD_FLOOR), ends[:-1])


def _custom(config: CustomAdvantageConfig) -> Advantage:
    key = "orchestrator.advantage.import_path"
    function, who = load_function(config.import_path, key), f"{key} = {config.import_path!r}"
    check_call(function, 1, config.kwargs, who)

    def advantages(batch: Sequence[Scores]) -> list[NDArray[np.float64]]:
        try:
            answer = function(batch, **config.kwargs)
        except Exception as error:  # user code
            raise ConfigError(f"{who} raised {summarize_exception(error, location=True)}") from error
        return _checked(batch, answer, who)

    return advantages


def _checked(batch: Sequence[Scores], answer: Any, who: str) -> list[NDArray[np.float64]]:
    """Raise ConfigError if `answer` is not one finite array [G] for each group."""
    if not isinstance(answer, Sequence | np.ndarray) or len(answer) != len(batch):
        found = f"{len(answer)} of them" if isinstance(answer, Sequence | np.ndarray) else type(answer).__name__
        raise ConfigError(f"{who} must return a list of one array for each of the {len(batch)} groups, not {found}")
    try:
        arrays = [np.asarray(values, np.float64) for values in answer]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{who} returned values that are not numbers: {summarize_exception(error)}") from error
    for index, (scores, values) in enumerate(zip(batch, arrays, strict=True)):
        if values.shape != scores.rewards.shape:
            raise ConfigError(f"{who} returned shape {values.shape} for group {index}, not {scores.rewards.shape}")
        if not np.isfinite(values).all():
            raise ConfigError(f"{who} returned advantages that are not finite for rewards {scores.rewards}: {values}")
    return arrays
