"""Packing keeps every token once, without padding, in few rows of similar cost; the cost against manual counts."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.configs.base_model import NameConfig
from prime_rl.core.types import Group, Rollout, Routes, Sample
from prime_rl.orchestrator.ledger.ledger_records import decode_group, encode_group
from prime_rl.orchestrator.packing import (
    TOKENS,
    RowCost,
    best_fit_decreasing,
    even_rows,
    pack,
    read_model_config,
    row_cost,
    vocabulary_size,
)
from prime_rl.rollouts.workers.protocol import GroupFinished, decode_report, frame
from prime_rl.trainer.micro_batch import PADDING_ROW, assign_rows

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


@settings(max_examples=40)
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


@settings(max_examples=40)
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


@settings(max_examples=40)
@given(st.lists(st.integers(1, 50), max_size=60), st.integers(50, 120))
def test_best_fit_decreasing_matches_plain_loops(lengths, capacity):
    rows = []
    for length in sorted(lengths, reverse=True):
        fits = [row for row in rows if sum(row) + length <= capacity]
        if not fits:
            rows.append([])
            fits = rows[-1:]
        max(fits, key=sum).append(length)
    found = best_fit_decreasing(lengths, capacity)
    assert sorted(i for row in found for i in row) == list(range(len(lengths)))
    assert sorted(sum(lengths[i] for i in row) for row in found) == sorted(map(sum, rows))


# --- even rows --------------------------------------------------------------------------------------------------


@settings(max_examples=40)
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


@pytest.mark.parametrize(("median", "count"), [(60, 128), (300, 512), (1500, 512)])
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


@pytest.mark.parametrize(("needed", "rows"), [(1, 16), (16, 16), (17, 24), (139, 144)])
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
    plain = pack([group(0, [[(2, 3)]])], [np.ones(1)], 40)
    assert not {"top_k", "top_p", "min_p"} & plain.arrays.keys()


# --- the cost of a row ----------------------------------------------------------------------------------------------


QWEN = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 48, "vocab_size": 64,
}  # fmt: skip
PROJECTIONS = 32 * 64 * 2 + 32 * 32 * 2  # q and o; k and v
DENSE = 3 * 32 * 48  # gate, up and down


def body(config):
    return RowCost.of(config).body / 6


def test_row_cost_dense_model():
    cost = RowCost.of(QWEN)
    assert cost == RowCost(body=6 * 3 * (PROJECTIONS + DENSE), head=6 * 32 * 64, attention=12 * 3 * 64)
    block_5, block_8 = ((2 * n * (PROJECTIONS + DENSE) + 2 * (2 * 64 * n * n) / 2) for n in (5, 8))
    expected = [3 * (3 * block_5 + 2 * 4 * 32 * 64), 3 * (3 * block_8 + 2 * 7 * 32 * 64)]
    np.testing.assert_allclose(cost(np.array([5, 8]), np.array([4, 7])), expected)


def test_row_cost_counts_only_active_experts():
    short = {key: value for key, value in QWEN.items() if key not in ("head_dim", "num_key_value_heads")}
    assert body(short) == 3 * (4 * 32 * 32 + DENSE), "optional keys may be missing"
    experts = QWEN | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    met = 2 * 3 * 32 * 16 + 32 * 8  # two experts and the router
    assert body(experts) == 3 * (PROJECTIONS + met)
    assert body(experts | {"mlp_only_layers": [1]}) == 3 * PROJECTIONS + 2 * met + DENSE
    assert body(experts | {"decoder_sparse_step": 2}) == 3 * PROJECTIONS + met + 2 * DENSE
    assert body(experts | {"shared_expert_intermediate_size": 20}) == 3 * (PROJECTIONS + met + 3 * 32 * 20)
    deepseek = QWEN | {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    shared = deepseek | {"n_shared_experts": 1, "first_k_dense_replace": 1}
    assert body(shared) == 3 * PROJECTIONS + 2 * (met + 3 * 32 * 16) + DENSE
    mixtral = QWEN | {"num_local_experts": 8, "num_experts_per_tok": 2}
    assert body(mixtral) == 3 * (PROJECTIONS + 2 * DENSE + 32 * 8)


def test_row_cost_sliding_layers_are_limited_to_the_window():
    kinds = ["sliding_attention", "full_attention", "linear_attention"]
    cost = RowCost.of(QWEN | {"layer_types": kinds, "sliding_window": 4})
    assert (cost.attention, cost.windowed, cost.window) == (12 * 64, 12 * 64, 4)
    near = cost(np.array([4, 10]), np.zeros(2, np.int64)) - cost.body * np.array([4, 10])
    np.testing.assert_allclose(near, 12 * 64 * np.array([8 + 8, 50 + (8 + 6 * 4)]))
    assert RowCost.of(QWEN | {"sliding_window": 4}).windowed == 12 * 3 * 64
    assert RowCost.of(QWEN | {"sliding_window": 4, "use_sliding_window": False}).windowed == 0


@pytest.mark.parametrize(
    "text", [None, "no json", "[]", "{}", '{"hidden_size": 32}', '{"hidden_size": "a"}', '{"vocab_size": "many"}']
)
def test_unreadable_model_configuration_counts_tokens_and_has_no_vocabulary(tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    found = read_model_config(NameConfig(name=str(tmp_path)))
    assert row_cost(found) == TOKENS
    assert vocabulary_size(found) is None
    np.testing.assert_array_equal(TOKENS(np.array([3, 5]), np.array([1, 1])), [3, 5])
    assert row_cost(read_model_config(NameConfig(name="no/such/model"))) == TOKENS


def test_read_model_config_hub_model_uses_the_cache(tmp_path, monkeypatch):
    repository = tmp_path / "models--some--model"
    for folder in ("refs", "snapshots/abc"):
        (repository / folder).mkdir(parents=True)
    (repository / "refs/main").write_text("abc")
    (repository / "snapshots/abc/config.json").write_text(json.dumps(QWEN))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert row_cost(read_model_config(NameConfig(name="some/model"))) == RowCost.of(QWEN)


@pytest.mark.parametrize("config", [QWEN, {"model_type": "vision", "text_config": QWEN}])
def test_read_model_config_local_directory(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert row_cost(read_model_config(NameConfig(name=str(tmp_path)))) == RowCost.of(QWEN)
    assert vocabulary_size(read_model_config(NameConfig(name=str(tmp_path)))) == QWEN["vocab_size"]


@pytest.mark.extended(after=2)
@pytest.mark.parametrize("name", ["qwen3_moe", "gemma3_window", "qwen3", "qwen2_tied", "llama", "mistral_window"])
def test_row_cost_equals_the_trainers_count(name, tmp_path):
    pytest.importorskip("torch")
    from prime_rl.configs.training.model import TrainerModelConfig
    from prime_rl.trainer.trainer_metrics import ModelFlops
    from prime_rl.trainer.weights.policy_loading import load_policy
    from tests.unit.trainer.test_policy_model import ARCHITECTURES, save

    save(ARCHITECTURES[name](), tmp_path)
    built, cost = (
        ModelFlops.of(load_policy(TrainerModelConfig(name=str(tmp_path)), seed=0)),
        row_cost(read_model_config(NameConfig(name=str(tmp_path)))),
    )
    assert (cost.body, cost.head) == (built.body, built.head)
    counted = {size: flops for size, flops in ((0, cost.attention), (cost.window, cost.windowed)) if flops}
    assert counted == built.attention


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_pack_keeps_the_routes_of_each_token(dtype):
    """Also through the ledger and the connection to a worker; zeros for samples without routes."""

    def with_routes(one):
        shape = (len(one), 3, 2)
        return replace(one, routes=Routes.of(np.arange(np.prod(shape), dtype=dtype).reshape(shape)))

    groups = [group(0, [[(3, 4)], [(2, 2)]]), group(1, [[(1, 5), (4, 1)]])]
    rollouts = [replace(one, samples=tuple(map(with_routes, one.samples))) for one in groups[1].rollouts]
    report = decode_report(bytes(frame(GroupFinished(1, rollouts, []))[4:]))
    stored = decode_group(encode_group(replace(groups[1], rollouts=tuple(report.rollouts))), Path("group"))
    batch = pack([groups[0], stored], [np.ones(2), np.ones(1)], seq_len=7)
    starts = np.cumsum(batch.seq_lens) - batch.seq_lens
    for start, length, number in zip(starts, batch.seq_lens, batch.sample_group, strict=True):
        found = batch.routed_experts[start : start + length]
        assert found.dtype == dtype
        assert np.array_equal(found.ravel(), np.arange(found.size) if number else np.zeros(found.size))
    assert pack([groups[0]], [np.ones(2)], seq_len=7).routed_experts is None
