"""The orders in which examples are drawn: permutations, fractions of the pools, empty pools."""

import json
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from prime_rl.configs.rollouts.buffer import DifficultyPoolBufferConfig
from prime_rl.orchestrator.data.example_order import (
    EASY,
    HARD,
    NORMAL,
    POOLS,
    DeficitRoundRobin,
    DifficultyPools,
    Shuffled,
)

WEIGHTS = st.lists(st.floats(0.01, 10), min_size=1, max_size=6)
REWARD_OF = {EASY: 0.9, NORMAL: 0.5, HARD: 0.1}


@given(WEIGHTS, st.integers(1, 300))
def test_deficit_round_robin_counts_follow_the_weights(weights, choices):
    shares = DeficitRoundRobin(weights)
    for made in range(1, choices + 1):
        shares.next()
        for weight, count in zip(weights, shares.counts, strict=True):
            ahead = count - made * weight / sum(weights)
            assert ahead < 1 + 1e-9
            assert -ahead <= max(0, len(weights) - 1) + 1e-9


def test_deficit_round_robin_zero_weight_is_never_chosen():
    shares = DeficitRoundRobin([1.0, 0.0, 2.0])
    assert Counter(shares.next() for _ in range(9)) == {0: 3, 2: 6}


@given(examples=st.integers(1, 40), epochs=st.integers(1, 4), seed=st.integers(0, 99))
def test_shuffled_each_epoch_is_another_permutation(examples, epochs, seed):
    order = Shuffled(examples, (seed,))
    drawn = [[order.draw() for _ in range(examples)] for _ in range(epochs)]
    assert all(sorted(epoch) == list(range(examples)) for epoch in drawn)
    assert examples < 20 or len({tuple(epoch) for epoch in drawn}) == epochs


@given(examples=st.integers(1, 30), data=st.data())
def test_order_restored_continues(examples, data):
    config = DifficultyPoolBufferConfig(easy_fraction=0.2, hard_fraction=0.3)
    for order, other in (
        (Shuffled(examples, (3,)), Shuffled(examples, (3,))),
        (DifficultyPools(examples, config, (3,)), DifficultyPools(examples, config, (3,))),
    ):
        rewards = data.draw(st.lists(st.sampled_from(list(REWARD_OF.values())), max_size=60))
        for reward in rewards:
            order.update(order.draw(), reward)
        other.restore(json.loads(json.dumps(order.state())))
        for reward in rewards[:20] + [0.5] * 20:
            example = order.draw()
            assert other.draw() == example
            order.update(example, reward)
            other.update(example, reward)
        assert order.metrics() == other.metrics()


@given(
    fractions=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    pool_of=st.lists(st.sampled_from([EASY, NORMAL, HARD]), min_size=1, max_size=60),
)
def test_difficulty_pools_draws_follow_the_fractions(fractions, pool_of):
    """With fixed difficulties every draw comes from the due pool, or from its replacement if it is empty."""
    easy, hard = fractions[0] / 10, fractions[1] / 10
    order = DifficultyPools(len(pool_of), DifficultyPoolBufferConfig(easy_fraction=easy, hard_fraction=hard), (7,))
    for example, pool in enumerate(pool_of):
        order.update(example, REWARD_OF[pool])
    sizes = Counter(pool_of)
    assert order.metrics() == {name: sizes[pool] for pool, name in enumerate(POOLS)} | {"fallbacks": 0}
    expected = {EASY: easy, HARD: hard, NORMAL: 1 - easy - hard}
    stand_in = next(pool for pool in (NORMAL, HARD, EASY) if sizes[pool])
    for pool in (EASY, HARD, NORMAL):
        if not sizes[pool]:
            expected[stand_in] += expected.pop(pool)
    draws = [order.draw() for _ in range(200)]
    counts = Counter(pool_of[example] for example in draws)
    for pool, share in expected.items():
        assert abs(counts[pool] - 200 * share) <= 4
    for pool in expected:
        own = [example for example in draws if pool_of[example] == pool]
        for start in range(0, len(own) - sizes[pool] + 1, sizes[pool]):
            passed = own[start : start + sizes[pool]]
            assert len(set(passed)) == sizes[pool], "a pass through a pool repeats no example"
    dry = sum(share for pool, share in ((EASY, easy), (HARD, hard), (NORMAL, 1 - easy - hard)) if not sizes[pool])
    assert abs(order.metrics()["fallbacks"] - 200 * dry) <= 4


def test_difficulty_pools_latest_reward_decides_with_inclusive_thresholds():
    order = DifficultyPools(4, DifficultyPoolBufferConfig(), (0,))
    for example, reward in enumerate([0.8, 0.79, 0.2, 0.21]):
        order.update(example, reward)
    assert order.metrics() == {"easy": 1, "normal": 2, "hard": 1, "fallbacks": 0}
    order.update(0, 0.1)
    assert order.metrics() == {"easy": 0, "normal": 2, "hard": 2, "fallbacks": 0}


def test_difficulty_pools_all_easy_still_draws():
    order = DifficultyPools(5, DifficultyPoolBufferConfig(easy_fraction=0, hard_fraction=0), (0,))
    for example in range(5):
        order.update(example, 1.0)
    assert sorted(order.draw() for _ in range(5)) == list(range(5))
    assert order.metrics()["fallbacks"] == 5


def test_difficulty_pools_joining_example_waits_for_the_next_pass():
    order = DifficultyPools(8, DifficultyPoolBufferConfig(easy_fraction=0, hard_fraction=1), (0,))
    for example in range(6):
        order.update(example, 0.0)
    first = [order.draw() for _ in range(2)]
    order.update(7, 0.0)
    assert sorted(first + [order.draw() for _ in range(4)]) == list(range(6))
    assert sorted(order.draw() for _ in range(7)) == [0, 1, 2, 3, 4, 5, 7]
