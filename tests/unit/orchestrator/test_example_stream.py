"""The stream is a function of seed and history (I3), and keeps the ratio of the environments and of the pools."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.configs.buffer import CurriculumBufferConfig, DifficultyPoolBufferConfig, SimpleBufferConfig
from prime_rl.core.errors import ConfigError
from prime_rl.core.import_utils import import_file
from prime_rl.orchestrator.example_stream import (
    EASY,
    HARD,
    NORMAL,
    POOLS,
    DifficultyPools,
    Ended,
    ExampleStream,
    Shuffled,
    StreamEnvironment,
    make_order,
)


def curriculum(name="uncertain_first", where="examples.extend.curriculum", **kwargs):
    return CurriculumBufferConfig(import_path=f"{where}:{name}", kwargs=kwargs)


BUFFERS = st.sampled_from(
    [SimpleBufferConfig(), DifficultyPoolBufferConfig(easy_fraction=0.3, hard_fraction=0.2), curriculum(floor=0.1)]
)


@st.composite
def mixtures(draw):
    count = draw(st.integers(1, 4))
    return [
        StreamEnvironment(
            f"env{i}", draw(st.integers(1, 25)), draw(st.sampled_from([0.5, 1.0, 3.0, 7.0])), draw(BUFFERS)
        )
        for i in range(count)
    ]


class Player:
    """Simulates random histories of a stream: draws, ends in any order, ships."""

    def __init__(self, stream, rng):
        self.stream, self.rng = stream, rng
        self.out, self.ended, self.draws = [], [], []

    def draw(self):
        self.out.append(self.stream.draw())
        self.draws.append(self.out[-1])

    def end(self, drop, env=None):
        of_env = [i for i, draw in enumerate(self.out) if draw.env == env] or range(len(self.out))
        draw = self.out.pop(self.rng.choice(of_env))
        reward = None if self.rng.random() < 0.2 else float(self.rng.choice([0.0, 0.5, 1.0]))
        self.ended.append(Ended(draw, reward, "zero_advantage" if drop else None))

    def ship(self):
        self.ended.sort(key=lambda end: end.draw.group_id)
        self.stream.shipped(self.ended)
        self.ended = []

    def play(self, steps):
        for _ in range(steps):
            for _ in range(self.rng.integers(5)):
                self.draw()
            while self.out and self.rng.random() < 0.6:
                self.end(drop=self.rng.random() < 0.4)
            self.ship()


@settings(max_examples=30)
@given(mixtures(), st.integers(0, 9))
def test_stream_restored_continues_identically(sources, history):
    player = Player(ExampleStream(sources, 3), np.random.default_rng(history))
    player.play(10)
    copy = ExampleStream(sources, 3)
    copy.restore(json.loads(json.dumps(player.stream.state())))
    assert copy.state() == player.stream.state()
    other = Player(copy, np.random.default_rng(history + 1))
    other.out = list(player.out)
    player.rng, player.draws = np.random.default_rng(history + 1), []
    player.play(10)
    other.play(10)
    assert other.draws == player.draws
    assert copy.metrics() == player.stream.metrics()


@settings(max_examples=40)
@given(
    weights=st.lists(st.floats(0.05, 5), min_size=1, max_size=5),
    moves=st.lists(st.tuples(st.sampled_from(["draw", "ship", "drop"]), st.integers(0, 30)), max_size=80),
    history=st.integers(0, 99),
)
def test_stream_any_drops_keeps_the_ratio_of_started_groups(weights, moves, history):
    """Drops hit the first environment if possible; it does not start more often."""
    player = Player(
        ExampleStream([StreamEnvironment(f"env{i}", 50, w) for i, w in enumerate(weights)], 1),
        np.random.default_rng(history),
    )
    for move, times in moves:
        for _ in range(times):
            if move == "draw":
                player.draw()
            elif player.out:
                player.end(drop=move == "drop", env=0 if move == "drop" else None)
        if move == "ship":
            player.ship()
        counts = Counter(draw.env for draw in player.draws)
        for env, weight in enumerate(weights):
            share = len(player.draws) * weight / sum(weights)
            assert abs(counts[env] - share) <= max(1, len(weights) - 1) + 1e-6


@settings(max_examples=30)
@given(weights=st.lists(st.floats(0.05, 5), min_size=2, max_size=5), pauses=st.lists(st.integers(0, 4), max_size=20))
def test_stream_paused_environments_pass_turns_without_catching_up(weights, pauses):
    """After any pauses the next draws have the ratio of the weights; drawing for the recorded environments is equal."""
    sources = [StreamEnvironment(f"env{i}", 50, w) for i, w in enumerate(weights)]
    stream, again = ExampleStream(sources, 1), ExampleStream(sources, 1)
    draws = []
    for paused in (pause % len(weights) for pause in pauses):
        draws += [stream.draw(lambda env, paused=paused: env != paused) for _ in range(7)]
        assert all(draw.env != paused for draw in draws[-7:])
    free = [stream.draw() for _ in range(200)]
    for env, weight in enumerate(weights):
        count = sum(draw.env == env for draw in free)
        assert abs(count - 200 * weight / sum(weights)) <= 2 * len(weights)
    assert [again.draw(lambda env, recorded=draw.env: env == recorded) for draw in draws + free] == draws + free
    assert again.state() == stream.state()


def test_stream_passed_turns_are_counted():
    def make_stream():
        return ExampleStream([StreamEnvironment("a", 5), StreamEnvironment("b", 5, 3.0)], 0)

    stream, copy = make_stream(), make_stream()
    with pytest.raises(ValueError, match="no environment can start a group"):
        stream.draw(lambda env: False)
    assert stream.position == 0
    assert {stream.draw(lambda env: env == 0).env for _ in range(10)} == {0}
    assert stream.metrics()["stream/a/passed_turns"] == 0
    assert 27 <= stream.metrics()["stream/b/passed_turns"] <= 31
    copy.restore(json.loads(json.dumps(stream.state())))
    assert copy.metrics() == stream.metrics()


def test_stream_order_of_an_environment_depends_on_its_name_and_the_seed():
    def order(seed, name="a", buffer=None, others=()):
        sources = [*others, StreamEnvironment(name, 30, 1.0, buffer or SimpleBufferConfig())]
        stream = ExampleStream(sources, seed)
        return tuple(draw.example for draw in (stream.draw() for _ in range(60)) if draw.env == len(others))[:30]

    assert len({order(1), order(2), order(1, "b"), order(-1)}) == 4
    assert order(1, buffer=SimpleBufferConfig(seed=9)) == order(2, buffer=SimpleBufferConfig(seed=9))
    assert order(1, others=[StreamEnvironment("b", 3)]) == order(1)


def test_stream_dropped_rewards_update_difficulty_and_errors_do_not():
    stream = ExampleStream([StreamEnvironment("a", 4, 1.0, DifficultyPoolBufferConfig())], 0)
    draws = [stream.draw() for _ in range(4)]
    rewards = [0.0, None, 1.0, 0.5]
    reasons = ["filter/difficulty", "error/a", None, None]
    stream.shipped([Ended(*item) for item in zip(draws, rewards, reasons, strict=True)])
    metrics = stream.metrics()
    assert (metrics["stream/a/hard"], metrics["stream/a/easy"], metrics["stream/a/normal"]) == (1, 1, 2)


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([], "orchestrator.env is empty"),
        ([StreamEnvironment("a", 0)], "'a' has no examples"),
        ([StreamEnvironment("a", 1), StreamEnvironment("a", 2)], "two environments are called 'a'"),
        ([StreamEnvironment("a", 1, 0.0)], "'a' has weight 0.0"),
    ],
)
def test_stream_invalid_mixture_raises(sources, message):
    with pytest.raises(ConfigError, match=message):
        ExampleStream(sources, 0)


@pytest.mark.parametrize(
    ("sources", "seed", "message"),
    [
        ([StreamEnvironment("a", 5)], 1, "seed of a was 0 when the run began and is 1 now"),
        ([StreamEnvironment("a", 6)], 0, "examples of a was 5 .* is 6 now"),
        ([StreamEnvironment("b", 5)], 0, "environments was 'a' .* is 'b' now"),
        ([StreamEnvironment("b", 5), StreamEnvironment("a", 5)], 0, "environments was 'a' .* is 'b, a' now"),
        (
            [StreamEnvironment("a", 5, 1.0, DifficultyPoolBufferConfig())],
            0,
            "type of a was None .* is 'difficulty-pool' now",
        ),
    ],
)
def test_stream_restore_other_configuration_raises(sources, seed, message):
    state = ExampleStream([StreamEnvironment("a", 5)], 0).state()
    with pytest.raises(ConfigError, match=message):
        ExampleStream(sources, seed).restore(json.loads(json.dumps(state)))


def test_stream_restored_with_other_examples_warns():
    state = ExampleStream([StreamEnvironment("a", 5, content_hash="1"), StreamEnvironment("b", 5)], 0).state()
    stream = ExampleStream([StreamEnvironment("a", 5, content_hash="2"), StreamEnvironment("b", 5)], 0)
    stream.restore(json.loads(json.dumps(state)))
    assert list(stream.warnings) == ["a"] and "environment a: its examples differ" in stream.warnings["a"]
    same = ExampleStream([StreamEnvironment("a", 5, content_hash="1"), StreamEnvironment("b", 5, content_hash="3")], 0)
    same.restore(state)
    assert same.warnings == {}, "an earlier release recorded no hash of b"


def test_stream_restored_with_another_mixture_continues_each_order_and_counts_shares_anew():
    before = ExampleStream([StreamEnvironment("a", 9), StreamEnvironment("b", 7)], 0)
    drawn = [before.draw() for _ in range(12)]
    state = json.loads(json.dumps(before.state()))
    mixture = [StreamEnvironment("a", 9, 1.0), StreamEnvironment("b", 7, 3.0), StreamEnvironment("c", 5, 2.0)]

    def restored():
        stream = ExampleStream(mixture, 0)
        stream.restore(state)
        return stream

    after = restored()
    draws = [after.draw() for _ in range(60)]
    assert [draw.group_id for draw in draws] == list(range(12, 72))
    assert [sum(draw.env == env for draw in draws) for env in range(3)] == [10, 30, 20]
    for env, count in ((0, 9), (1, 7)):
        epoch = [draw.example for draw in [*drawn, *draws] if draw.env == env][:count]
        assert sorted(epoch) == list(range(count)), "no example is repeated or left out"
    again = restored()
    assert [again.draw() for _ in range(60)] == draws
    final = ExampleStream(mixture, 0)
    final.restore(json.loads(json.dumps(after.state())))
    assert [final.draw() for _ in range(9)] == [after.draw() for _ in range(9)]


# --- the order of one environment -----------------------------------------------------------------------------------

REWARD_OF = {EASY: 0.9, NORMAL: 0.5, HARD: 0.1}


@settings(max_examples=30)
@given(examples=st.integers(1, 40), epochs=st.integers(1, 4), seed=st.integers(0, 99))
def test_shuffled_each_epoch_is_another_permutation(examples, epochs, seed):
    order = Shuffled(examples, (seed,))
    drawn = [[order.draw() for _ in range(examples)] for _ in range(epochs)]
    assert all(sorted(epoch) == list(range(examples)) for epoch in drawn)
    assert examples < 20 or len({tuple(epoch) for epoch in drawn}) == epochs


@settings(max_examples=30)
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


def test_difficulty_pools_joining_example_waits_for_the_next_pass():
    order = DifficultyPools(8, DifficultyPoolBufferConfig(easy_fraction=0, hard_fraction=1), (0,))
    for example in range(6):
        order.update(example, 0.0)
    first = [order.draw() for _ in range(2)]
    order.update(7, 0.0)
    assert sorted(first + [order.draw() for _ in range(4)]) == list(range(6))
    assert sorted(order.draw() for _ in range(7)) == [0, 1, 2, 3, 4, 5, 7]


# --- a curriculum of the user ---------------------------------------------------------------------------------------

FUNCTIONS = """
import random
import numpy as np

calls = []
def first_half(results):
    calls.append(results)
    return np.arange(len(results.draws)) < len(results.draws) / 2
def unsolved(results):
    return results.last != 1.0
def raises(results):
    return results.reward
def writes(results):
    results.last[:] = 0
    return results.last
def short(results): return [1.0]
def text(results): return ["a"] * len(results.draws)
def nothing(results): return None
def zero(results): return np.zeros(len(results.draws))
def negative(results): return -np.ones(len(results.draws))
def infinite(results): return np.full(len(results.draws), np.inf)
def chance(results): return [random.random() for _ in results.draws]
def no_argument(): return [1.0]
"""


@pytest.fixture
def functions(tmp_path):
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    return path


def test_curriculum_draws_by_weight_from_the_results_so_far(functions):
    order = make_order(6, curriculum("unsolved", functions), (0,), "a")
    first = [order.draw() for _ in range(6)]
    assert sorted(first) == list(range(6)), "no example repeats while others are left"
    for example in first[:4]:
        order.update(example, 1.0)
    assert {order.draw() for _ in range(8)} == set(first[4:]), "weight 0 excludes, and the rest repeats"
    assert order.metrics() == {"epoch": 14 / 6, "seen": 4}

    half = make_order(7, curriculum("first_half", functions), (0,), "toy")
    half.update(half.draw(), 0.5)
    half.update(example := half.draw(), 0.25)
    half.draw()
    results = import_file(functions).calls[-1]
    assert (results.env, results.groups.sum(), results.draws.sum()) == ("toy", 2, 2)
    assert results.last[example] == 0.25 and np.isnan(results.mean[6])
    counts = Counter(make_order(3, curriculum(floor=0.0), (seed,), "a").draw() for seed in range(90))
    assert all(count > 15 for count in counts.values()), "equal weights, equal chances"


def test_curriculum_of_zeros_draws_all_examples(functions, said):
    order = make_order(4, curriculum("zero", functions), (0,), "toy")
    assert sorted(order.draw() for _ in range(4)) == sorted(order.draw() for _ in range(4)) == [0, 1, 2, 3]
    assert sum("returned only zeros for toy" in line for line in said()) == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", "raised AttributeError: .*functions.py"),
        ("writes", "raised ValueError: .*read-only"),
        ("short", r"returned shape \(1,\) for 4 examples"),
        ("text", "raised ValueError: could not convert"),
        ("nothing", r"returned shape \(\) for 4 examples"),
        ("negative", "negative or not finite, from -1.0 to -1.0"),
        ("infinite", "negative or not finite, from inf to inf"),
        ("chance", "returned other weights for the same results"),
        ("no_argument", r"is called with 1 argument, but is no_argument\(\)"),
        ("missing", "has no function 'missing'"),
    ],
)
def test_curriculum_invalid_function_is_refused(functions, name, message):
    with pytest.raises(ConfigError, match=message) as caught:
        make_order(4, curriculum(name, functions), (0,), "a").draw()
    assert "buffer.import_path" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("buffer", [SimpleBufferConfig(), DifficultyPoolBufferConfig()], ids=["simple", "pools"])
def test_skipped_examples_are_never_drawn_and_results_reach_the_right_ones(buffer):
    source = StreamEnvironment("a", 6, 1.0, buffer, skipped=(0, 3))
    stream = ExampleStream([source], 0)
    draws = [stream.draw() for _ in range(8)]
    assert sorted(draw.example for draw in draws) == sorted([1, 2, 4, 5] * 2)
    stream.shipped([Ended(draw, float(draw.example == 4), None) for draw in draws])
    if isinstance(buffer, DifficultyPoolBufferConfig):
        assert stream.metrics()["stream/a/easy"] == 1 and stream.metrics()["stream/a/hard"] == 3
    again = ExampleStream([source], 0)
    again.restore(stream.state())
    assert [again.draw() for _ in range(9)] == [stream.draw() for _ in range(9)]
    with pytest.raises(ConfigError, match=r"examples of a was 4 .* is 6 now"):
        ExampleStream([StreamEnvironment("a", 6, 1.0, buffer)], 0).check_identity(stream.identity())
    with pytest.raises(ConfigError, match="'a' has no examples"):
        ExampleStream([StreamEnvironment("a", 2, skipped=(0, 1))], 0)
