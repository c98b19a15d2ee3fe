"""Reading a batch once on each node, and splitting it into micro-batches, equal on every world size (I9)."""

import os
import signal
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.configs.trainer import FakeDataConfig, TrainerConfig
from prime_rl.core.errors import ConfigError, RunError
from prime_rl.liveness.heartbeat_monitor import read_heartbeat
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.storage.batch import ROWS_FILE, write_batch
from prime_rl.storage.paths import RunPaths
from prime_rl.trainer.micro_batch import PADDING_ROW, assign_rows
from prime_rl.trainer.parallel.process_group import NodeRanks, World
from prime_rl.trainer.process_setup import StopRequest
from prime_rl.trainer.rl import batch_source
from prime_rl.trainer.rl.batch_source import BatchSource, fake_batch, split_batch
from tests.unit.trainer.world import run_world

CPU = torch.device("cpu")


def make(step=0, **changes):
    config = FakeDataConfig(batch_size=22, seq_len=30, micro_batch_size=2, variable_length=True)
    return fake_batch(config.model_copy(update=changes), 100, row_length=60, seed=1, step=step)


def samples_of(minibatch):
    """Every sample that is trained on, as a list of tokens."""
    real = [row for row in minibatch.rows if len(row.scored)]
    return [part.tolist() for row in real for part in row.tokens.split(np.diff(row.boundaries.numpy()).tolist())]


@pytest.mark.parametrize(("minibatches", "size"), [(1, 2), (3, 4), (4, 1), (50, 2)])
def test_split_batch_trains_every_sample_once_in_the_same_minibatch(minibatches, size):
    batch = make()
    alone = split_batch(batch, 0, minibatches, World(0, 1, CPU), max_tokens=60)
    ranks = [split_batch(batch, 0, minibatches, World(rank, size, CPU), max_tokens=60) for rank in range(size)]
    assert len(alone) == min(minibatches, batch.rows)
    for i, minibatch in enumerate(alone):
        shares = [rank[i] for rank in ranks]
        assert len({len(share.rows) for share in shares}) == 1
        assert {share.counts for share in shares} == {minibatch.counts}
        assert sorted(row for share in shares for row in samples_of(share)) == sorted(samples_of(minibatch))
    assert sum(minibatch.counts.tokens for minibatch in alone) == batch.loss_tokens
    assert sum(len(samples_of(m)) for m in alone) == len(batch.seq_lens)
    sizes = [minibatch.counts.tokens for minibatch in alone]
    assert minibatches > 4 or max(sizes) < 1.35 * min(sizes)


def test_split_batch_marks_on_policy_by_sample():
    batch = make(step=5)
    versions = batch.versions.copy()
    first = int(np.flatnonzero(batch.loss_mask)[0])
    versions[first] = 4  # one older token makes its whole sample off-policy
    object.__setattr__(batch, "versions", versions)
    row = split_batch(batch, 5, batch.rows, World(0, 1, CPU), max_tokens=60)
    old = [m.rows[0] for m in row if not m.rows[0].on_policy.all()]
    assert len(old) == 1
    assert old[0].on_policy.tolist() == [s != 0 for s in old[0].segment_ids.tolist()]


def test_fake_batch_is_valid_and_depends_on_the_step():
    one, same, other = make(0), make(0), make(1)
    one.validate()
    assert (one.tokens == same.tokens).all() and not np.array_equal(one.tokens, other.tokens)
    assert set(np.unique(other.versions)) == {-1, 1}


def test_split_batch_concatenates_rows_up_to_max_tokens():
    batch = make()
    apart, together = (
        split_batch(batch, 0, 1, World(0, 1, CPU), max_tokens=max_tokens)[0].rows for max_tokens in (1, 150)
    )
    assert len(apart) == batch.rows > len(together)
    assert all(len(row.tokens) <= 150 for row in together)
    for field in ("tokens", "position_ids", "loss_mask", "advantages", "on_policy"):
        assert torch.equal(*(torch.cat([getattr(row, field) for row in rows]) for rows in (apart, together)))
    lengths = [np.diff(row.boundaries.numpy()) for row in together]
    assert np.concatenate(lengths).tolist() == batch.seq_lens.tolist()


@pytest.mark.parametrize(("size", "max_tokens"), [(2, 60), (4, 150)])
def test_split_batch_cuts_micro_batches_equally_on_every_rank(size, max_tokens):
    """The costliest rows of all ranks meet in one forward pass, and the cheapest in another: nobody waits for long."""
    batch = make(batch_size=44)
    ranks = [split_batch(batch, 0, 1, World(rank, size, CPU), max_tokens)[0].rows for rank in range(size)]
    assert len({len(rows) for rows in ranks}) == 1
    longest_yet = batch.seq_lens.max()
    for rows in zip(*ranks, strict=True):
        lengths = np.concatenate([np.diff(row.boundaries.numpy()) for row in rows if len(row.scored)])
        assert lengths.max() <= longest_yet
        assert all(len(row.tokens) <= max_tokens for row in rows)
        longest_yet = lengths.min()


# Row assignment: every row once, equal counts, bounded imbalance


cost = st.one_of(st.floats(0, 1e6), st.sampled_from([0.0, 1.0, 1e15]))


def real(rows):
    return [row for row in rows if row != PADDING_ROW]


def sums(dealt, costs):
    return [sum(costs[row] for row in real(rows)) for rows in dealt]


@settings(max_examples=50, deadline=None)
@given(st.lists(cost, max_size=40), st.integers(1, 9))
def test_assign_rows_gives_every_row_once_with_equal_counts_and_sums(costs, world):
    dealt = assign_rows(costs, world)
    assert [len(rows) for rows in dealt] == [-(-len(costs) // world)] * world
    assert sorted(row for rows in dealt for row in real(rows)) == list(range(len(costs)))
    assert all(rows == sorted(real(rows)) + [PADDING_ROW] * rows.count(PADDING_ROW) for rows in dealt)
    ordered = sorted(costs, reverse=True) + [0.0] * (-len(costs) % world)
    largest_spread = max([ordered[i] - ordered[i + world - 1] for i in range(0, len(ordered), world)], default=0)
    loads = sums(dealt, costs)
    assert max(loads) - min(loads) <= largest_spread + 1e-12 * max(loads)


@settings(max_examples=50, deadline=None)
@given(st.lists(cost, min_size=1, max_size=40), st.integers(1, 9))
def test_assign_rows_of_sorted_rows_keeps_rounds(costs, world):
    """So no rank waits longer in a forward pass than it must: the sum of the costliest of each place is the least."""
    dealt = assign_rows(np.array(sorted(costs, reverse=True)), world)
    for place in range(len(dealt[0])):
        rows = {rows[place] for rows in dealt} - {PADDING_ROW}
        assert rows == set(range(place * world, min((place + 1) * world, len(costs))))


@pytest.mark.parametrize(("costs", "world"), [([3.0, 3.0, 3.0], 2), ([9, 7, 5, 1], 3), ([2.0], 4)])
def test_assign_rows_gives_each_rank_the_largest_sum_in_turn(costs, world):
    dealt = [assign_rows(costs, world, turn) for turn in range(2 * world)]
    assert [int(np.argmax(sums(rows, costs))) for rows in dealt] == [*range(world)] * 2
    assert all(sorted(rows) == sorted(dealt[0]) for rows in dealt)


def test_uneven_rows_of_a_batch_make_no_rank_the_slow_one():
    batch = make(batch_size=3, micro_batch_size=1, variable_length=False)
    worlds = [World(rank, 2, CPU) for rank in (0, 1)]
    parts = [[split_batch(batch, step, 1, world, max_tokens=30)[0] for world in worlds] for step in (0, 1)]
    shares = [[sum(len(row.scored) for row in part.rows) for part in ranks] for ranks in parts]
    assert shares[0] == shares[1][::-1]
    assert shares[0][0] > shares[0][1]


def test_assign_rows_of_no_or_one_row():
    assert assign_rows([], 3) == [[], [], []]
    assert assign_rows([2.0], 3) == [[0], [PADDING_ROW], [PADDING_ROW]]
    assert assign_rows([8, 7, 6, 5, 4, 3], 2) == [[1, 2, 4], [0, 3, 5]]


# One rank of each node waits and reads


LATE, DAMAGED, DAMAGED_ON_ONE_NODE, OTHER_LEVEL, MISSING, UNPUBLISHED, STOPPED = range(1, 8)
"""Batches; batch 0 is good."""


def ship(paths, step):
    fields = {"branch": 0, "step": step, "async_level": 3 if step == OTHER_LEVEL else 2, "sources": {"env/a": [step]}}
    write_batch(paths.rollouts(step), make(step), fields)
    if step == DAMAGED:
        with (paths.rollouts(step) / ROWS_FILE).open("r+b") as rows:
            rows.seek(-1, os.SEEK_END)
            rows.write(b"?")


def sums_of(batch):
    return [float(array.astype(float).sum()) for array in batch.arrays.values()]


def read_together(world, root):
    """Return what this rank, one of two on its node, gets of each batch, how often it reads, and its heartbeats."""
    os.environ |= {"LOCAL_RANK": str(world.rank % 2), "LOCAL_WORLD_SIZE": "2"}
    paths, is_last, read_batch = RunPaths(Path(root)), world.rank == world.size - 1, batch_source.read_batch
    reads, answers = Counter(), {}

    def read(path, step):
        reads[step] += 1
        if step == DAMAGED_ON_ONE_NODE and world.rank:
            raise RunError("damaged here")
        return read_batch(path, step)

    def check():
        if is_last and step == UNPUBLISHED:
            raise RunError("not published")

    batch_source.read_batch = read
    node, name = NodeRanks(world), f"trainer_{world.rank}"
    with (
        StopRequest(paths.checkpoints_dir, 0, world) as stop,
        HeartbeatWriter(paths, name, "trainer", interval_seconds=0.1) as heartbeat,
    ):
        for step in range(STOPPED + 1):
            if is_last and step == STOPPED:
                threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
            elif world.is_main and step == LATE:
                threading.Timer(0.5, ship, (paths, step)).start()
            seconds = 1.5 if step in (MISSING, UNPUBLISHED) else 100
            config = TrainerConfig(output_dir=root, wait_timeout_seconds=seconds)
            source = BatchSource(config, paths, 0, check, heartbeat, stop=stop, world=world, node=node)
            try:
                batch = source.read(step)
                answers[step] = batch and [sums_of(batch), batch.sources]
            except (ConfigError, RunError) as error:
                answers[step] = f"{type(error).__name__}: {error}"
        return {"answers": answers, "reads": reads, "beats": read_heartbeat(paths.heartbeat(name)).beat}


@pytest.mark.parametrize("size", [2, 4])
def test_read_on_two_ranks_per_node_reads_once_per_node_and_ends_alike(tmp_path, size):
    paths = RunPaths(tmp_path / "run")
    for step in (there := (0, DAMAGED, DAMAGED_ON_ONE_NODE, OTHER_LEVEL)):
        ship(paths, step)
    ranks = run_world(size, read_together, str(paths.root), tmp_path)
    reads = {str(step): 1 for step in (*there, LATE)}
    assert [rank["reads"] for rank in ranks] == [reads, {}] * (size // 2)
    assert min(rank["beats"] for rank in ranks) > 10, "every rank has a heartbeat while it waits"
    answers = [rank["answers"] for rank in ranks]
    assert answers[::2] == answers[1::2], "the ranks of a node end alike"
    first, last = ({int(step): answer for step, answer in answers[rank].items()} for rank in (0, -1))
    assert [first[step] for step in (0, LATE)] == [[sums_of(make(step)), {"env/a": [step]}] for step in (0, LATE)]
    assert f"the hash of {paths.rollouts(DAMAGED) / ROWS_FILE} differs" in first[DAMAGED]
    assert first[OTHER_LEVEL].startswith("ConfigError: async_level = 2 here and 3 at the orchestrator")
    assert first[MISSING].startswith(f"DeadlineError: waited 2 s for {paths.rollouts(MISSING)}")
    assert last[UNPUBLISHED] == "RunError: not published"
    assert first[STOPPED] is None
    if size == 2:
        assert first == last
    else:  # the second node's rows are damaged, or a version is not published; torchrun ends the first one then
        different = {DAMAGED_ON_ONE_NODE, UNPUBLISHED}
        assert {step for step in first if first[step] != last[step]} == different
        failed = f"RunError: reading {paths.rollouts(DAMAGED_ON_ONE_NODE)} failed on another rank"
        assert first[DAMAGED_ON_ONE_NODE].startswith(failed) and last[DAMAGED_ON_ONE_NODE] == "RunError: damaged here"
