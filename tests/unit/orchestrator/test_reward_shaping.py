"""Reward shaping against plain loops, and finite values (I10)."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.configs.rollouts.advantage import LengthBonusConfig, LengthPenaltyConfig, RewardShapingConfig
from prime_rl.orchestrator.algorithms.advantages import Scores
from prime_rl.orchestrator.algorithms.reward_shaping import shape_rewards

NOTHING = RewardShapingConfig()
PENALTY = RewardShapingConfig(length_penalty=LengthPenaltyConfig())
BONUS = RewardShapingConfig(length_bonus=LengthBonusConfig())
BOTH = RewardShapingConfig(length_penalty=LengthPenaltyConfig(), length_bonus=LengthBonusConfig(weight=0.5))


def scores(rewards, lengths, inputs=None, turns=None, truncated=None):
    def array(values, dtype):
        return None if values is None else np.array(values, dtype)

    return Scores(
        np.array(rewards, np.float64),
        np.array(lengths, np.int64),
        array(inputs, np.int64),
        array(turns, np.int64),
        array(truncated, np.bool_),
    )


GROUP = scores([1.0, 0.0, 1.0, 0.5], [30, 10, 90, 20], [5, 50, 10, 20], [1, 2, 4, 3], [False, True, False, True])


def loop_penalty(group, output_weight, input_weight, turns_weight):
    mean = sum(group.rewards) / len(group.rewards)
    return [
        reward
        - mean
        * (
            output_weight * group.lengths[i] / max(group.lengths)
            + input_weight * group.inputs[i] / max(group.inputs)
            + turns_weight * group.turns[i] / max(group.turns)
        )
        for i, reward in enumerate(group.rewards)
    ]


def loop_bonus(group, weight):
    best = max(group.rewards)
    lengths = [n for r, n in zip(group.rewards, group.lengths, strict=True) if r == best]
    average = sum(lengths) / len(lengths)
    return [
        r * (1 + weight * min(1, max(0, 1 - n / average))) if r == best else r
        for r, n in zip(group.rewards, group.lengths, strict=True)
    ]


def test_shape_rewards_default_changes_nothing():
    np.testing.assert_array_equal(shape_rewards(NOTHING, GROUP), GROUP.rewards)


def test_length_penalty_matches_the_formula():
    np.testing.assert_allclose(shape_rewards(PENALTY, GROUP), loop_penalty(GROUP, 0.25, 0.1, 0.1))
    weights = {"output_weight": 0.5, "input_weight": 0.0, "turns_weight": 1.0}
    config = RewardShapingConfig(length_penalty=LengthPenaltyConfig(**weights))
    np.testing.assert_allclose(shape_rewards(config, GROUP), loop_penalty(GROUP, *weights.values()))


def test_length_bonus_matches_the_formula():
    np.testing.assert_allclose(shape_rewards(BONUS, GROUP), loop_bonus(GROUP, 1.0))
    assert shape_rewards(BONUS, GROUP).tolist() == [1.5, 0.0, 1.0, 0.5]  # 30 and 90 tokens: half as long as the mean
    config = RewardShapingConfig(length_bonus=LengthBonusConfig(weight=0.5))
    np.testing.assert_allclose(shape_rewards(config, GROUP), loop_bonus(GROUP, 0.5))


def test_shape_rewards_groups_without_success_are_unchanged():
    for rewards in ([0.0, 0.0], [-1.0, -1.0], [-3.0, 0.0]):
        group = scores(rewards, [1, 9])
        assert shape_rewards(BOTH, group).tolist() == rewards


def test_shape_rewards_truncation_applies_first():
    assert shape_rewards(NOTHING, GROUP, zero_truncated=True).tolist() == [1.0, 0.0, 1.0, 0.0]
    zeroed = scores([1.0, 0.0, 1.0, 0.0], GROUP.lengths, GROUP.inputs, GROUP.turns)
    np.testing.assert_array_equal(shape_rewards(BOTH, GROUP, zero_truncated=True), shape_rewards(BOTH, zeroed))
    assert shape_rewards(NOTHING, scores([2.0], [1]), zero_truncated=True).tolist() == [2.0]


def test_length_penalty_unknown_amounts_cost_nothing():
    known = scores([1.0, 0.5], [10, 20], [0, 0], [0, 0])
    np.testing.assert_array_equal(shape_rewards(PENALTY, scores([1.0, 0.5], [10, 20])), shape_rewards(PENALTY, known))


extreme = st.one_of(st.sampled_from([0.0, 1.0, 1e30, -1e30, 1e308, -1e308, 5e-324]), st.floats(-1e3, 1e3))
amount = st.sampled_from([0, 1, 7, 10**9])


@settings(deadline=None)
@given(
    st.lists(st.tuples(extreme, amount, amount, amount, st.booleans()), min_size=1, max_size=6),
    st.sampled_from([NOTHING, PENALTY, BONUS, BOTH]),
    st.booleans(),
)
def test_shape_rewards_any_rewards_are_finite(rollouts, config, zero_truncated):
    rewards, lengths, inputs, turns, truncated = zip(*rollouts, strict=True)
    shaped = shape_rewards(config, scores(rewards, lengths, inputs, turns, truncated), zero_truncated)
    assert shaped.shape == (len(rollouts),)
    assert np.isfinite(shaped).all()
