"""Advantages and shaped rewards: each formula against plain loops, and finite values (I10)."""

import math
import sys
import textwrap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.configs import advantage as configs
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.core.errors import ConfigError
from prime_rl.core.types import Group, Rollout, Sample
from prime_rl.orchestrator.algorithms.advantages import Scores, advantage_function, has_zero_advantages, shape_rewards


def scores(rewards, lengths=None, inputs=None, turns=None, truncated=None):
    def array(values, dtype=np.int64):
        return None if values is None else np.array(values, dtype)

    lengths = [5] * len(rewards) if lengths is None else lengths
    return Scores(array(rewards, float), array(lengths), array(inputs), array(turns), array(truncated, bool))


BATCH = [
    scores([1.0, 0.0, 0.5, 0.1], [10, 400, 30, 7]),
    scores([0.0, 0.0, 0.0, 1.0], [9, 9, 9, 90]),
    scores([-2.0, 3.5], [1, 2]),
    scores([0.75, 0.75, 0.75], [3, 4, 5]),
]


def mean(values):
    total = 0.0
    for value in values:
        total += value
    return total / len(values)


def std(values):
    return math.sqrt(mean([(value - mean(values)) ** 2 for value in values]))


def normalised(value, values):
    return (value - mean(values)) / (std(values) + 1e-6)


def opo(rewards, lengths, batch):
    baseline = sum(r * n for r, n in zip(rewards, lengths, strict=True)) / sum(lengths)
    return [r - baseline for r in rewards]


def rloo(rewards, lengths, batch):
    return [r - mean([other for j, other in enumerate(rewards) if j != i]) for i, r in enumerate(rewards)]


def grpo(rewards, lengths=None, batch=None):
    return [r - mean(rewards) for r in rewards]


GOLDEN = [
    (configs.GRPOAdvantageConfig(), grpo),
    (configs.GRPOAdvantageConfig(std=True), lambda rewards, *_: [normalised(r, rewards) for r in rewards]),
    (configs.GRPOAdvantageConfig(length_weighted_mean=True), opo),
    (configs.DrGRPOAdvantageConfig(), grpo),
    (configs.RLOOAdvantageConfig(), rloo),
    (configs.OPOAdvantageConfig(), opo),
    (configs.MaxRLAdvantageConfig(), lambda rewards, *_: [a / mean(rewards) for a in grpo(rewards)]),
    (
        configs.ReinforcePPAdvantageConfig(),
        lambda rewards, _, batch: [normalised(r, [r for g in batch for r in g]) for r in rewards],
    ),
    (
        configs.ReinforcePPBaselineAdvantageConfig(),
        lambda rewards, _, batch: [normalised(a, [a for g in batch for a in grpo(g)]) for a in grpo(rewards)],
    ),
    (configs.NoAdvantageConfig(), lambda rewards, *_: rewards),
]
"""Each algorithm, and the advantages of a group as plain loops over its rewards, its lengths and all rewards."""
CONFIGS = [config for config, _ in GOLDEN]
CLIPPED = [config.model_copy(update={"clip_negative": True}) for config in CONFIGS]


@pytest.mark.parametrize(("config", "golden"), GOLDEN)
@pytest.mark.parametrize("clipped", [False, True])
def test_advantages_any_scores_match_the_formula(config, golden, clipped):
    values = advantage_function(config.model_copy(update={"clip_negative": clipped}))(BATCH)
    every = [group.rewards.tolist() for group in BATCH]
    for found, group, rewards in zip(values, BATCH, every, strict=True):
        expected = golden(rewards, group.lengths.tolist(), every)
        want = [max(0.0, a) for a in expected] if clipped else expected
        np.testing.assert_allclose(found, want, rtol=1e-12, atol=1e-12)


def test_max_rl_without_success_is_zero():
    config = configs.MaxRLAdvantageConfig()
    assert not advantage_function(config)([scores([-2.0, 1.0])])[0].any()


extreme = st.one_of(st.sampled_from([0.0, 1.0, 0.1, 1e30, -1e30, 1e308, -1e308, 1e-308, 5e-324]), st.floats(-1e3, 1e3))
groups = st.lists(st.tuples(extreme, st.sampled_from([0, 1, 7, 10**9])), min_size=1, max_size=6).map(
    lambda pairs: scores([r for r, _ in pairs], [n for _, n in pairs])
)


@settings(max_examples=40)
@given(st.lists(groups, min_size=1, max_size=4), st.sampled_from(CONFIGS + CLIPPED))
def test_advantages_any_rewards_are_finite_in_float32(batch, config):
    values = advantage_function(config)(batch)
    for one, group in zip(values, batch, strict=True):
        assert one.shape == group.rewards.shape
        assert np.isfinite(one).all() and np.isfinite(one.astype(np.float32)).all()


@settings(max_examples=40)
@given(extreme, st.integers(1, 9), st.lists(groups, max_size=3), st.sampled_from(CONFIGS))
def test_advantages_equal_rewards_are_exactly_zero(reward, count, others, config):
    """Rounding must not turn ten times 0.1 into a gradient."""
    if config.type in ("none", "reinforce_pp"):
        return
    group = scores([reward] * count)
    assert not advantage_function(config)([*others, group])[-1].any()
    assert has_zero_advantages(config, group)


@settings(max_examples=40)
@given(groups, st.lists(groups, max_size=3), st.sampled_from(CONFIGS + CLIPPED))
def test_has_zero_advantages_true_means_zero_in_any_batch(group, others, config):
    if has_zero_advantages(config, group):
        assert not advantage_function(config)([*others, group])[-1].any()
    elif config.type != "reinforce_pp":
        assert advantage_function(config)([group])[0].any()


def test_has_zero_advantages_depends_on_the_algorithm():
    equal, failed, mixed = scores([0.5, 0.5]), scores([0.0, 0.0]), scores([1.0, 0.0])
    for config in CONFIGS:
        assert has_zero_advantages(config, equal) == (config.type not in ("none", "reinforce_pp"))
        assert has_zero_advantages(config, failed) == (config.type != "reinforce_pp")
        assert not has_zero_advantages(config, mixed)
    assert has_zero_advantages(configs.MaxRLAdvantageConfig(), scores([-1.0, 0.5]))
    assert has_zero_advantages(configs.NoAdvantageConfig(clip_negative=True), scores([-1.0, -2.0]))


def test_scores_of_group_reads_lengths_and_turns():
    def sample(mask):
        n = len(mask)
        return Sample(np.zeros(n, np.int32), np.array(mask, bool), np.zeros(n, np.float32), np.zeros(n, np.int32))

    one = Rollout((sample([0, 0, 1, 1, 0, 1]),), 1.0, {}, False, ())
    two = Rollout((sample([0, 1, 1]), sample([0, 0, 0, 1, 1])), 0.5, {}, True, ())
    read = Scores.of(Group(3, (one, two), "toy", 0, 1.0))
    assert read.rewards.tolist() == [1.0, 0.5]
    assert read.lengths.tolist() == [3, 4]
    assert read.inputs.tolist() == [3, 4]
    assert read.turns.tolist() == [2, 2]
    assert read.truncated.tolist() == [False, True]


# --- reward shaping -------------------------------------------------------------------------------------------------

NOTHING = configs.RewardShapingConfig()
PENALTY = configs.RewardShapingConfig(length_penalty=configs.LengthPenaltyConfig())
BONUS = configs.RewardShapingConfig(length_bonus=configs.LengthBonusConfig())
BOTH = PENALTY.model_copy(update={"length_bonus": configs.LengthBonusConfig(weight=0.5)})
GROUP = scores([1.0, 0.0, 1.0, 0.5], [30, 10, 90, 20], [5, 50, 10, 20], [1, 2, 4, 3], [False, True, False, True])


def loop_penalty(group, output_weight=0.25, input_weight=0.1, turns_weight=0.1):
    amounts = (group.lengths, output_weight), (group.inputs, input_weight), (group.turns, turns_weight)
    return [
        reward - mean(group.rewards) * sum(weight * amount[i] / max(amount) for amount, weight in amounts)
        for i, reward in enumerate(group.rewards)
    ]


def test_length_penalty_matches_the_formula():
    np.testing.assert_array_equal(shape_rewards(NOTHING, GROUP), GROUP.rewards)
    np.testing.assert_allclose(shape_rewards(PENALTY, GROUP), loop_penalty(GROUP))
    weights = {"output_weight": 0.5, "input_weight": 0.0, "turns_weight": 1.0}
    config = configs.RewardShapingConfig(length_penalty=configs.LengthPenaltyConfig(**weights))
    np.testing.assert_allclose(shape_rewards(config, GROUP), loop_penalty(GROUP, **weights))


@pytest.mark.parametrize(("weight", "shaped"), [(1.0, [1.5, 0.0, 1.0, 0.5]), (0.5, [1.25, 0.0, 1.0, 0.5])])
def test_length_bonus_rewards_the_shorter_of_the_best(weight, shaped):
    """30 and 90 tokens: the first is half as long as their mean."""
    config = configs.RewardShapingConfig(length_bonus=configs.LengthBonusConfig(weight=weight))
    assert shape_rewards(config, GROUP).tolist() == shaped


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


amount = st.sampled_from([0, 1, 7, 10**9])


@settings(max_examples=40)
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


# --- configuration ----------------------------------------------------------------------------------------------


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_advantage_config_default_is_grpo_and_accepts_old_opo_spelling(workdir):
    assert OrchestratorConfig.load([]).advantage == configs.GRPOAdvantageConfig()
    assert OrchestratorConfig.load(["--advantage.length-weighted-mean"]).advantage.length_weighted_mean


@pytest.fixture
def own(workdir):
    """Writes a user's module with a unique name, and returns the configuration of its function."""
    name = f"own_{workdir.name}"

    def make(source, **changes):
        (workdir / f"{name}.py").write_text(textwrap.dedent(source))
        return configs.CustomAdvantageConfig(**{"import_path": f"{name}:advantage", **changes})

    return make


def test_custom_advantage_receives_the_batch_and_its_arguments(own):
    config = own(
        """
        def advantage(batch, scale):
            return [scale * (scores.rewards - scores.lengths) for scores in batch]
        """,
        kwargs={"scale": 2},
    )
    values = advantage_function(config)(BATCH)
    for one, group in zip(values, BATCH, strict=True):
        np.testing.assert_array_equal(one, 2 * (group.rewards - group.lengths))


def test_custom_advantage_decides_has_zero_advantages(own):
    config = own("def advantage(batch):\n    return [s.rewards - s.rewards.mean() for s in batch]")
    assert has_zero_advantages(config, scores([1.0, 1.0])) and not has_zero_advantages(config, scores([1.0, 0.0]))
    assert not has_zero_advantages(config.model_copy(update={"batch_level": True}), scores([1.0, 1.0]))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("advantage = 3", "is int, not a function"),
        ("", "has no function 'advantage'"),
        ("def advantage(batch:\n    pass", "cannot import .* SyntaxError"),
        ("raise OSError('no disk')", "cannot import .* OSError: no disk .*py:1"),
        ("def advantage(batch):\n    raise KeyError('x')", "raised KeyError: 'x' .*py:2"),
        ("def advantage(batch):\n    return None", "not NoneType"),
        ("def advantage(batch):\n    return [0.0]", "each of the 4 groups, not 1 of them"),
        ("def advantage(batch):\n    return [0.0 for _ in batch]", r"shape \(\) for group 0, not \(4,\)"),
        ("def advantage(batch):\n    return [s.rewards[:3] for s in batch]", r"shape \(3,\) for group 0, not \(4,\)"),
        ("def advantage(batch):\n    return ['a' for s in batch]", "not numbers"),
        ("def advantage(batch):\n    return [s.rewards / 0 for s in batch]", "not finite"),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_custom_advantage_broken_function_raises_one_line(own, source, message):
    config = own(source)
    with pytest.raises(ConfigError, match=message) as caught:
        advantage_function(config)(BATCH)
    assert "\n" not in str(caught.value) and "orchestrator.advantage.import_path" in str(caught.value)


def test_custom_advantage_missing_module_raises(own):
    with pytest.raises(ConfigError, match="cannot import no_such_module: ModuleNotFoundError"):
        advantage_function(own("", import_path="no_such_module.advantage"))


@pytest.mark.parametrize("path", ["", "advantage", "a:b:c", "a b:c"])
def test_custom_advantage_invalid_import_path_raises(workdir, path):
    with pytest.raises(ConfigError, match=r"package\.module:function"):
        OrchestratorConfig.load(["--advantage.type", "custom", "--advantage.import-path", path])
