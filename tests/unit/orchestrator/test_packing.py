"""Packing keeps every token once, without padding, in few rows of similar cost."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.core.types import Group, Rollout, Sample
from prime_rl.orchestrator.batching.packing import best_fit_decreasing, even_rows, pack
from prime_rl.orchestrator.batching.row_flops import TOKENS, RowCost
from prime_rl.trainer.data.row_assignment import PADDING_ROW, assign_rows

QUADRATIC = RowCost(body=1.0, head=0.5, attention=0.25)  # sums are exact


def sample(prompt, completion, token):
    n = prompt + completion
    sampled = np.arange(n) >= prompt
    return Sample(
        tokens=np.full(n, token, np.int32),
        loss_mask=sampled,
        logprobs=np.where(sampled, -0.5 - token, 0).astype(np.float32),
        versions=np.where(sampled, token, -1).astype(np.int32),
    )


def group(group_id, rollouts, temperature=1.0, **truncation):
    """Rollouts as lists of samples (prompt, completion); every token encodes its rollout."""
    played = [
        Rollout(
            tuple(sample(p, c, token=100 * group_id + i) for p, c in shapes),
            reward=1.0,
            metrics={},
            is_truncated=i == 0,
            text=(),
        )
        for i, shapes in enumerate(rollouts)
    ]
    return Group(group_id, tuple(played), "toy", example=group_id, temperature=temperature, **truncation)


shape = st.tuples(st.integers(0, 9), st.integers(1, 9))
rollout = st.lists(shape, min_size=1, max_size=3)
batches = st.lists(st.lists(rollout, min_size=1, max_size=4), min_size=1, max_size=9).map(
    lambda groups: [group(i, rollouts, temperature=0.5 + i) for i, rollouts in enumerate(groups)]
)


def contents(tokens, mask, logprobs, versions, advantages, temperature):
    return [tuple(array.tolist()) for array in (tokens, mask, logprobs, versions, advantages, temperature)]


@settings(deadline=None)
@given(batches, st.integers(18, 40), st.sampled_from([TOKENS, QUADRATIC]))
def test_pack_every_token_is_in_the_batch_once(groups, seq_len, cost):
    advantages = [np.arange(len(g.rollouts)) + g.group_id + 0.5 for g in groups]
    batch = pack(groups, advantages, seq_len, cost)
    batch.validate()
    assert (np.diff(batch.row_offsets) <= seq_len).all()
    expected, found = [], []
    for g, values in zip(groups, advantages, strict=True):
        for i, r in enumerate(g.rollouts):
            for s in r.samples:
                mask = s.loss_mask & (np.arange(len(s)) > 0)
                per_token = np.where(mask, np.float32(values[i]), np.float32(0))
                temperature = np.full(len(s), np.float32(g.temperature))
                expected.append(
                    (g.group_id, i, *contents(s.tokens, mask, s.logprobs, s.versions, per_token, temperature))
                )
    start = 0
    for index, length in enumerate(batch.seq_lens):
        part = slice(start, start + int(length))
        arrays = (batch.tokens, batch.loss_mask != 0, batch.logprobs, batch.versions, batch.advantages)
        found.append(
            (
                int(batch.sample_group[index]),
                int(batch.sample_rollout[index]),
                *contents(*(array[part] for array in arrays), batch.temperature[part]),
            )
        )
        start = part.stop
    assert sorted(found) == sorted(expected)


@settings(deadline=None)
@given(batches, st.integers(18, 40), st.integers(1, 9))
def test_pack_ranks_train_every_token_once(groups, seq_len, world):
    batch = pack(groups, [np.ones(len(g.rollouts)) for g in groups], seq_len, QUADRATIC)
    dealt = assign_rows(batch.row_cost, world)
    assert len({len(rows) for rows in dealt}) == 1
    tokens = np.concatenate([batch.tokens[batch.row(r)] for rows in dealt for r in rows if r != PADDING_ROW])
    every = np.concatenate([s.tokens for g in groups for r in g.rollouts for s in r.samples])
    assert sorted(tokens.tolist()) == sorted(every.tolist())


@settings(deadline=None)
@given(batches, st.integers(18, 40))
def test_pack_segments_are_numbered_and_rows_sorted_by_cost(groups, seq_len):
    batch = pack(groups, [np.ones(len(g.rollouts)) for g in groups], seq_len, QUADRATIC)
    ends = np.cumsum(batch.seq_lens)
    costs = []
    for row in range(batch.rows):
        part = batch.row(row)
        lengths = np.bincount(batch.segment_ids[part])
        assert batch.segment_ids[part].tolist() == np.repeat(np.arange(len(lengths)), lengths).tolist()
        assert lengths.tolist() == batch.seq_lens[(ends > part.start) & (ends <= part.stop)].tolist()
        trained = batch.loss_mask[part].sum()
        costs.append(lengths.sum() + 0.5 * trained + 0.25 * (lengths.astype(float) ** 2).sum() / 2)
    np.testing.assert_allclose(batch.row_cost, costs, rtol=1e-6)
    assert costs == sorted(costs, reverse=True)


def test_pack_mask_truncated_masks_truncated_rollouts():
    groups = [group(1, [[(2, 5)], [(3, 4)]])]
    batch = pack(groups, [np.array([1.0, 2.0])], 20, mask_truncated=True)
    trained = batch.tokens[batch.loss_mask == 1]
    assert set(trained.tolist()) == {101} and len(trained) == 4
    assert (batch.advantages[batch.loss_mask == 0] == 0).all()
    assert pack(groups, [np.array([1.0, 2.0])], 20).loss_tokens == 9


def test_pack_sample_longer_than_a_row_raises():
    with pytest.raises(ValueError, match="21 tokens does not fit into a row of 20"):
        pack([group(0, [[(1, 20)]])], [np.ones(1)], 20)


# --- best fit ---------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), max_size=60), st.integers(50, 120))
def test_best_fit_decreasing_keeps_each_item_once(lengths, capacity):
    rows = best_fit_decreasing(lengths, capacity)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in row) <= capacity for row in rows)


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), max_size=60), st.integers(50, 120))
def test_best_fit_decreasing_matches_plain_loops(lengths, capacity):
    rows = []
    for length in sorted(lengths, reverse=True):
        fits = [row for row in rows if sum(row) + length <= capacity]
        if not fits:
            rows.append([])
            fits = rows[-1:]
        max(fits, key=sum).append(length)
    found = [[lengths[i] for i in row] for row in best_fit_decreasing(lengths, capacity)]
    assert sorted(map(sum, found)) == sorted(map(sum, rows))


@pytest.mark.parametrize("median", [0.03, 0.06, 0.12])
def test_best_fit_decreasing_realistic_lengths_fill_the_minimum_rows(median):
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(np.log(median * 8192), 0.8, 512), 2, 8192).astype(int).tolist()
    assert len(best_fit_decreasing(lengths, 8192)) == -(-sum(lengths) // 8192)


# --- even rows --------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), max_size=80), st.integers(50, 300))
def test_even_rows_keep_each_item_once_in_a_round_number_of_rows(lengths, capacity):
    costs = [length + length**2 / 64 for length in lengths]
    rows = even_rows(lengths, costs, capacity)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in row) <= capacity for row in rows)
    sums = [sum(costs[i] for i in row) for row in rows]
    assert sums == sorted(sums, reverse=True)
    assert len(rows) % 8 == 0 or len(rows) == len(lengths)


def draw(median, count, capacity=8192, seed=0):
    lengths = np.random.default_rng(seed).lognormal(np.log(median), 0.7, count)
    return np.clip(lengths, 2, capacity).astype(int).tolist()


@pytest.mark.parametrize(("median", "count"), [(60, 128), (300, 512), (1500, 128), (1500, 512), (1500, 2048)])
def test_even_rows_any_common_number_of_ranks_gets_equal_cost(median, count):
    """The busiest rank is within 2 % of the mean, also if ranks synchronise after every row."""
    lengths = draw(median, count)
    costs = [3.6e9 * n + 3.4e5 * n * n for n in lengths]
    rows = even_rows(lengths, costs, 8192)
    assert len(rows) <= max(16, 1.15 * len(best_fit_decreasing(lengths, 8192)))
    row_costs = [sum(costs[i] for i in row) for row in rows]
    for world in (2, 4, 8):
        shares = [
            [row_costs[row] if row != PADDING_ROW else 0 for row in part] for part in assign_rows(row_costs, world)
        ]
        mean = sum(row_costs) / world
        assert max(map(sum, shares)) <= 1.02 * mean
        assert sum(map(max, zip(*shares, strict=True))) <= 1.05 * mean


@pytest.mark.parametrize(("needed", "rows"), [(1, 16), (16, 16), (17, 24), (84, 88), (139, 144), (1011, 1024)])
def test_even_rows_number_of_rows(needed, rows):
    items = needed * 100
    assert len(even_rows([10] * items, [1.0] * items, 1000)) == rows


def test_even_rows_full_rows_are_not_split():
    """Sixteen full rows: equal cost is impossible, and another row would be waste."""
    lengths = [60, 40, 70, 30, 99, 1, 50, 50, 97, 3, 96, 2, 2, 80, 10, 10, 55, 45] * 2
    rows = even_rows(lengths, [n * n for n in lengths], 100)
    assert len(rows) == 16 and {sum(lengths[i] for i in row) for row in rows} == {100}


def test_pack_sampler_truncation_is_per_token():
    groups = [group(0, [[(2, 3)], [(1, 4)]]), group(1, [[(2, 5)]], top_k=50), group(2, [[(3, 3)]], top_p=0.9)]
    batch = pack(groups, [np.ones(len(g.rollouts)) for g in groups], 40)
    batch.validate()
    assert batch.min_p is None
    owner = np.repeat(batch.sample_group, batch.seq_lens)
    np.testing.assert_array_equal(batch.top_k, np.where(owner == 1, 50, 0))
    np.testing.assert_array_equal(batch.top_p, np.where(owner == 2, np.float32(0.9), 1))


def test_pack_without_sampler_truncation_omits_it():
    batch = pack([group(0, [[(2, 3)]])], [np.ones(1)], 40)
    assert not {"top_k", "top_p", "min_p"} & batch.arrays.keys()
