"""The ledger keeps every position exactly once (I3) after truncation, process kills and lost files."""

import asyncio
import dataclasses
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.core.errors import ConfigError, RunError
from prime_rl.orchestrator.example_stream import ExampleStream, StreamEnvironment
from prime_rl.orchestrator.ledger import ledger as ledger_module
from prime_rl.orchestrator.ledger import ledger_records
from prime_rl.orchestrator.ledger.ledger import Ledger, read_ledger, replay
from prime_rl.orchestrator.ledger.ledger_records import (
    Done,
    Drawn,
    Dropped,
    Issued,
    Positions,
    Shipped,
    decode_group,
    encode_group,
)
from prime_rl.storage.paths import RunPaths
from tests.unit.orchestrator.ledger_player import LedgerPlayer, fates, make_group, make_stream, manifests, shipped

REPOSITORY = Path(__file__).parents[3]
PATH = Path("group_1.msgpack")


def same_group(one, two):
    """Compare the groups; NaN, which is a metric here, does not equal itself."""

    def plain(value):
        if isinstance(value, np.ndarray):
            return value.dtype, value.tolist()
        if dataclasses.is_dataclass(value):
            return [plain(getattr(value, field.name)) for field in dataclasses.fields(value)]
        return [plain(item) for item in value] if isinstance(value, tuple) else repr(value)

    return plain(one) == plain(two)


def check_partition(paths, state):
    """Check that every position below the cursor has one fate, and that ships equal the manifests."""
    known = fates(state)
    assert sorted(group_id for group_id, _ in known) == list(range(state.positions.cursor))
    assert shipped(state) == manifests(paths)
    for group_id, finished in state.finished.items():
        position = state.positions.open[group_id]
        assert finished.group_id == group_id
        assert position.deadline == position.version + 1


async def played(root, seed, ships):
    """The player of a run that shipped `ships` batches and ended."""
    player = LedgerPlayer(root, np.random.default_rng(seed))
    await player.play(ships)
    player.ledger.close()
    return player


@pytest.mark.parametrize("length", [0, 50])
def test_pending_group_encoded_decodes_to_the_same_group(length):
    """Numbers of numpy become those of Python, and lone surrogates are replaced."""
    group = make_group(5, (0.25, 1e30, -1.0), version=4, length=length, text="ünï")
    assert same_group(decode_group(encode_group(group), PATH), group)
    rollout = dataclasses.replace(group.rollouts[0], reward=np.float64(0.5), metrics={"exact": np.float32(0.5)})
    rollout = dataclasses.replace(rollout, text=(("user", "half \ud83d of a pair"),))
    [again] = decode_group(encode_group(dataclasses.replace(group, rollouts=(rollout,))), PATH).rollouts
    assert (again.reward, again.metrics) == (0.5, {"exact": 0.5})
    assert again.text[0] == ("user", "half ? of a pair")


def test_decode_group_invalid_bytes_raise():
    data = encode_group(make_group(1))
    for damaged in (data[:-1], b"", b"\x00" * 20, data.replace(b"prime_rl.spool/1", b"prime_rl.spool/2")):
        with pytest.raises(ValueError):
            decode_group(damaged, PATH)


# --- rules ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (Drawn(7, 0, 0), "position 7 is drawn, but the next is 3"),
        (Issued(9, 0, 1), "group 9 is issued, but was never drawn"),
        (Done(2, 0.5, "f"), "group 2 is done, but was never issued"),
        (Done(0, 0.5, "f"), "group 0 is done, but has ended before"),
        (Dropped(0, "overlong"), "group 0 is dropped, but has ended before"),
        (Shipped(0, [1]), "batch 0 is shipped, but the next is 1"),
        (Shipped(1, [1]), "group 1 is shipped, but is not done"),
        (Shipped(1, [0]), "group 0 is shipped, but has ended before"),
    ],
)
def test_positions_contradicting_record_raises(record, message):
    positions = Positions()
    history = [Drawn(0, 0, 0), Drawn(1, 0, 1), Drawn(2, 0, 2), Issued(0, 0, 1), Issued(1, 0, 1)]
    for earlier in [*history, Done(0, 0.5, "f"), Shipped(0, [0])]:
        positions.apply(earlier)
    with pytest.raises(ValueError, match=message):
        positions.apply(record)


def test_positions_ship_returns_ended_positions_in_order():
    positions = Positions()
    for group_id in range(4):
        positions.apply(Drawn(group_id, 0, group_id))
        positions.apply(Issued(group_id, 0, 1))
    for group_id, reward in ((3, 0.5), (1, 0.25), (0, 1.0)):
        positions.apply(Done(group_id, reward, "f"))
    positions.apply(Dropped(2, "error/a"))
    positions.apply(Dropped(0, "zero_advantage", 1.0))
    ended = positions.apply(Shipped(0, [1, 3]))
    assert [(end.draw.group_id, end.reward, end.reason) for end in ended] == [
        (0, 1.0, "zero_advantage"),
        (1, 0.25, None),
        (2, None, "error/a"),
        (3, 0.5, None),
    ]


def test_positions_reopened_group_keeps_no_reward():
    """The ledger still holds the first reward; a reader must apply the same rule as the writer."""
    lived, read = Positions(), Positions()
    first = [Drawn(0, 0, 0), Drawn(1, 0, 1), Issued(0, 0, 1), Issued(1, 0, 1), Done(0, 1.0, "f"), Done(1, 1.0, "f")]
    for record in first:
        lived.apply(record)
        read.apply(record)
    lived.reopen(0)
    for positions in (lived, read):
        positions.apply(Issued(0, 0, 1))
        assert [draw.group_id for draw in positions.unfinished] == [0]
        positions.apply(Dropped(0, "error/a"))
    ended = lived.apply(Shipped(0, [1]))
    assert read.apply(Shipped(0, [1])) == ended
    assert [end.reward for end in ended] == [None, 1.0]


# --- crashes ----------------------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(history=st.integers(0, 10**6), ships=st.integers(1, 5), data=st.data())
def test_ledger_truncated_anywhere_keeps_exactly_once(history, ships, data):
    """Truncated at any byte, with any pending groups missing or damaged, nothing is repeated or lost (I3)."""
    with tempfile.TemporaryDirectory() as root, patch("os.fsync"):  # the cuts are made by hand
        asyncio.run(play_cut_and_resume(Path(root), history, ships, data))


async def play_cut_and_resume(root, history, ships, data):
    player = LedgerPlayer(root, np.random.default_rng(history))
    await player.play(ships)
    for _ in range(data.draw(st.integers(0, 4))):
        player.move() if player.running else None
    player.ledger.close()
    paths, content = player.paths, player.paths.ledger(0).read_bytes()
    cut = data.draw(st.integers(0, len(content)))
    paths.ledger(0).write_bytes(content[:cut])
    for step, size in enumerate(player.flushed_sizes):
        if size > cut:  # the batch was not renamed before the ledger had reached this size
            shutil.rmtree(paths.rollouts(step))
    spooled = sorted(paths.spool_dir.iterdir())
    for path in data.draw(st.lists(st.sampled_from(spooled), unique=True)) if spooled else []:
        if data.draw(st.booleans()):
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:-5])
    state = read_ledger(paths, 0)
    if state is not None:
        check_partition(paths, state)
    resumed = LedgerPlayer(root, np.random.default_rng(history + 1))
    await resumed.play(3)
    resumed.ledger.close()
    final = read_ledger(paths, 0)
    check_partition(paths, final)
    assert sorted(shipped(final)) == list(range(len(shipped(final))))
    replay(make_stream(), final)


async def test_replay_restores_the_stream(tmp_path):
    player = LedgerPlayer(tmp_path, np.random.default_rng(1))
    snapshot, before = player.ledger.snapshot(), player.ledger.snapshot().state()
    await player.play(10)
    assert snapshot.state() == before != player.ledger.snapshot().state(), "later records do not change it"
    for _ in range(3):
        player.move()
    player.ledger.close()
    state, stream = read_ledger(player.paths, 0), make_stream()
    replay(stream, state)
    assert stream.state() == player.ledger.stream.state()
    assert state.positions.state() == player.ledger.positions.state()
    assert sorted(state.finished) == sorted(player.finished)
    assert [draw.group_id for draw in state.positions.unfinished] == sorted(player.running)
    assert [draw.group_id for draw in state.positions.waiting] == sorted(player.waiting)
    assert state.damaged == {}
    assert state.unrecorded == []


async def test_read_ledger_ship_only_in_the_manifest_counts(tmp_path):
    player = await played(tmp_path, 2, 3)
    lines = player.paths.ledger(0).read_bytes().splitlines(keepends=True)
    last = max(i for i, line in enumerate(lines) if b'"shipped"' in line)
    player.paths.ledger(0).write_bytes(b"".join(lines[:last]))
    state, stream = read_ledger(player.paths, 0), make_stream()
    assert [record.step for record in state.unrecorded] == [2]
    check_partition(player.paths, state)
    Ledger.resume(player.paths, stream, state).close()
    again = read_ledger(player.paths, 0)
    assert (again.unrecorded, shipped(again)) == ([], shipped(state))
    assert stream.state() == player.ledger.stream.state()


async def test_read_ledger_unaccounted_batches_raise(tmp_path):
    player = await played(tmp_path, 2, 3)
    content = player.paths.ledger(0).read_bytes()
    player.paths.ledger(0).write_bytes(content[: player.flushed_sizes[0] // 2])
    with pytest.raises(RunError, match=r"the batches' manifests and .*branch_0.jsonl disagree: group"):
        read_ledger(player.paths, 0)
    player.paths.ledger(0).write_bytes(b"")
    with pytest.raises(RunError, match=r"is missing or empty, but .* holds batches of branch 0"):
        read_ledger(player.paths, 0)
    player.paths.ledger(0).write_bytes(content.replace(b'"dropped"', b'"dripped"', 1))
    with pytest.raises(RunError, match=r"branch_0.jsonl, line \d+: "):
        read_ledger(player.paths, 0)


async def test_replay_other_configuration_or_seed_raises(tmp_path):
    player = await played(tmp_path, 2, 3)
    state = read_ledger(player.paths, 0)
    with pytest.raises(ConfigError, match="seed of a was 0 when the run began and is 1 now"):
        replay(make_stream(seed=1), state)
    state.records[5] = Drawn(5, 0, 6)
    with pytest.raises(RunError, match=r"position 5 of the stream was example 6 .* changed since the run began"):
        replay(make_stream(), dataclasses.replace(state, records=[Drawn(i, 0, 6) for i in range(6)][5:]))


def test_ledger_process_killed_at_any_time_keeps_exactly_once(tmp_path):
    """Killed and resumed, no position is shipped twice, dropped and shipped, or lost."""
    for life in range(2):
        command = [sys.executable, "-m", "tests.unit.orchestrator.ledger_player", str(tmp_path), str(life)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
        for _ in range(5):
            assert child.stdout.readline()
        child.kill()
        child.wait()
        child.stdout.close()
        state = read_ledger(RunPaths(tmp_path), 0)
        check_partition(RunPaths(tmp_path), state)
        assert state.damaged == {}, "a group is in the spool before the ledger says so"
        assert state.positions.next_step >= 5 * (life + 1)
        replay(make_stream(), state)


async def test_read_ledger_pending_group_of_another_process_is_damaged(tmp_path):
    player = LedgerPlayer(tmp_path, np.random.default_rng(5))
    while len(player.finished) < 2:
        player.move()
    player.ledger.close()
    first, second = player.finished[:2]
    player.paths.spool(first).write_bytes(encode_group(make_group(first, (0.0, 0.0), version=99)))
    state = read_ledger(player.paths, 0)
    assert f"group_{first}.msgpack has hash" in state.damaged[first]
    assert first in [draw.group_id for draw in state.positions.unfinished]
    assert second in state.finished


# --- a checkpoint -----------------------------------------------------------------------------------------------


async def test_start_branch_continues_after_the_checkpoint(tmp_path):
    player = LedgerPlayer(tmp_path / "run", np.random.default_rng(5))
    await player.play(6)
    while len(player.finished) < 3:
        player.move()
    chosen = sorted(player.finished[:3])
    base = json.loads(json.dumps(player.ledger.snapshot().state_after(6, chosen)))
    await player.ship()
    draws = [player.ledger.draw() for _ in range(20)]
    player.ledger.close()

    paths, stream = RunPaths(tmp_path / "rewound"), make_stream()
    ledger = Ledger.start(paths, 1, stream, base)
    assert (ledger.positions.next_step, ledger.positions.cursor) == (7, draws[0].group_id)
    assert not set(chosen) & set(ledger.positions.open)
    assert sorted(ledger.positions.open) == sorted(player.waiting + player.running + player.finished)
    for group_id in player.running + player.finished:
        ledger.issued(group_id, 7, 8)
    for group_id in player.finished:
        ledger.done(make_group(group_id, version=6))
    assert [ledger.draw() for _ in range(20)] == draws
    ledger.close()

    state, again = read_ledger(paths, 1), make_stream()
    assert sorted(state.finished) == sorted(player.finished)
    Ledger.resume(paths, again, state).close()
    assert again.state() == stream.state()
    with pytest.raises(RunError, match=r"branch_1\.jsonl exists already"):
        Ledger.start(paths, 1, make_stream(), base)


async def test_resume_ended_groups_deletes_their_files(tmp_path):
    player = LedgerPlayer(tmp_path, np.random.default_rng(0))
    await player.play(4)
    while len(player.finished) < 2:
        player.move()
    await player.ledger.flush()
    expected = {f"group_{i}.msgpack" for i in player.finished}
    assert {p.name for p in player.paths.spool_dir.iterdir()} == expected
    (player.paths.spool_dir / "group_0.msgpack").write_text("left over")
    (player.paths.spool_dir / ".tmp-group_1.msgpack").write_text("cut short")
    player.ledger.close()
    LedgerPlayer(tmp_path, np.random.default_rng(0)).ledger.close()
    assert {p.name for p in player.paths.spool_dir.iterdir()} == expected


# --- the writer -------------------------------------------------------------------------------------------------


def one_example(tmp_path):
    return RunPaths(tmp_path), ExampleStream([StreamEnvironment("a", 3)], 0)


async def test_append_log_hanging_disk_does_not_block_the_event_loop(tmp_path, monkeypatch):
    """Records are accepted and `flush` waits; later all are written in order. A cancelled flush changes nothing."""
    paths, stream = one_example(tmp_path)
    ledger = Ledger.start(paths, 0, stream)
    await ledger.flush()
    disk, fsync = threading.Event(), ledger_records.os.fsync

    def hang(file):
        disk.wait()
        fsync(file)

    monkeypatch.setattr(ledger_records.os, "fsync", hang)
    for group_id in range(50):
        ledger.draw()
        ledger.issued(group_id, 0, 1)
        ledger.done(make_group(group_id))
    flush = asyncio.create_task(ledger.flush())
    await asyncio.sleep(0)
    assert not flush.done()
    cancelled = asyncio.create_task(ledger.flush())
    await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    disk.set()
    await flush
    kinds = [json.loads(line) for line in paths.ledger(0).read_text().splitlines()[1:]]
    assert [(k["record"], k["group_id"]) for k in kinds] == [
        (kind, group_id) for group_id in range(50) for kind in ("drawn", "issued", "done")
    ]
    ledger.close()


async def test_append_log_full_disk_raises_at_flush_and_later_calls(tmp_path, monkeypatch):
    paths, stream = one_example(tmp_path)
    paths.ledger(0).mkdir(parents=True)
    with pytest.raises((RunError, IsADirectoryError), match=r"branch_0\.jsonl"):
        Ledger.start(paths, 0, stream)
    paths.ledger(0).rmdir()
    ledger = Ledger.start(paths, 0, stream)
    ledger.draw()
    ledger.issued(0, 0, 1)
    await ledger.flush()

    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    ledger.done(make_group(0))
    message = r"branch_0.jsonl or its pending groups cannot be written: .*No space left on device"
    with pytest.raises(RunError, match=message):
        await ledger.flush()
    for call in (ledger.draw, ledger.close):
        with pytest.raises(RunError, match=message):
            call()
    with pytest.raises(RunError, match=message):
        await ledger.flush()
    state = read_ledger(paths, 0)
    assert [draw.group_id for draw in state.positions.unfinished] == [0], "a record never precedes its spool file"


# --- the file stays small ---------------------------------------------------------------------------------------


async def run_in_parts(root, limit, monkeypatch, parts=(4, 3, 5)):
    monkeypatch.setattr(ledger_module, "_MOST_RECORDS", limit)
    sizes = []
    for number, ships in enumerate(parts):
        player = await played(root, number, ships)
        sizes.append(len(player.paths.ledger(0).read_bytes().splitlines()))
    return player.paths, read_ledger(player.paths, 0), sizes


async def test_compaction_restores_the_same_stream_and_positions(tmp_path, monkeypatch):
    whole, expected, grown = await run_in_parts(tmp_path / "whole", 10**9, monkeypatch)
    paths, state, sizes = await run_in_parts(tmp_path / "replaced", 25, monkeypatch)
    assert manifests(paths) == manifests(whole), "the same positions in the same batches"
    assert state.positions.state() == expected.positions.state()
    assert state.finished.keys() == expected.finished.keys() and not state.damaged
    assert [state.positions.unfinished, state.positions.waiting] == [
        expected.positions.unfinished,
        expected.positions.waiting,
    ]
    streams = make_stream(), make_stream()
    replay(streams[0], expected)
    replay(streams[1], state)
    assert streams[0].state() == streams[1].state()
    assert max(sizes) < 60 < grown[-1]
    first = json.loads(paths.ledger(0).read_bytes().splitlines()[0])
    assert first["base"]["positions"]["next_step"] > 7, "it was replaced in the last process, too"
    left = {f"group_{group_id}.msgpack" for group_id in state.finished}
    assert {file.name for file in paths.spool_dir.iterdir()} == left
    assert [file.name for file in paths.ledger_dir.iterdir()] == ["branch_0.jsonl"]
