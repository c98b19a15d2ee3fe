"""Packing, the order by seed, and exact restore of the stream."""

import csv
import json
import threading
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset

from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.training.sft_data import SFTDataConfig, SFTFakeDataConfig
from prime_rl.core.errors import ConfigError
from prime_rl.storage.wait_for import DeadlineError
from prime_rl.trainer.data import sft_dataset
from prime_rl.trainer.data.chat_rendering import RenderedSequence
from prime_rl.trainer.data.packed_stream import (
    InMemorySource,
    InterleavedSource,
    PackedStream,
    RowStream,
    StreamedSource,
    pack_all,
)
from prime_rl.trainer.sft.train import to_micro_batch
from tests.support.tiny_model import make_tokenizer
from tests.unit.trainer.sft.test_chat import THINKING_STRIPPED
from tests.unit.trainer.world import run_world


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Three sets of words to be reversed, each in another format; the third has as many as the others together."""
    root = tmp_path_factory.mktemp("files")
    sets = {
        name: [f"{name}{i:02}" + "x" * (i * 7 % 11) for i in range(n)] for name, n in (("a", 20), ("b", 12), ("c", 32))
    }
    rows = {name: [{"prompt": word, "completion": word[::-1]} for word in words] for name, words in sets.items()}
    (root / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows["a"]))
    (root / "b.json").write_text(json.dumps(rows["b"]))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows["c"]), root / "c.parquet", row_group_size=5)
    with (root / "d.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["prompt", "completion"])
        writer.writeheader()
        writer.writerows(rows["a"])
    return root


def open_batches(tokenizer, max_steps=None, val=None, **options):
    options = {"seq_len": 64, "batch_size": 2, **options}
    config = SFTConfig(data=SFTDataConfig(**options), max_steps=max_steps, val=val, ckpt={})
    return sft_dataset.open_data(config, tokenizer)


def words(batches, tokenizer):
    """The prompts of all sequences, in order."""
    sequences = [sequence for rows in batches for row in rows for sequence in row]
    return [tokenizer.decode(s.tokens[: int(np.argmax(s.loss_mask))]) for s in sequences]


def make_sequence(length, value=7):
    return RenderedSequence(np.full(length, value, np.int64), np.arange(length) > 0)


def test_packer_keeps_every_sequence_once_fills_rows_and_does_not_sort():
    lengths = np.random.default_rng(0).integers(20, 60, 4000)
    rows = pack_all([make_sequence(int(n), i) for i, n in enumerate(lengths)], 512)
    assert all(sum(map(len, row)) <= 512 for row in rows)
    assert sorted(int(s.tokens[0]) for row in rows for s in row) == list(range(4000))
    assert len(rows) <= 1.03 * -(-lengths.sum() // 512)
    means = [np.mean([len(s) for s in row]) for row in rows[:-40]]
    early, late = np.mean(means[: len(means) // 2]), np.mean(means[len(means) // 2 :])
    assert abs(early - late) < 1.0  # sorted by length, they would differ by 20


def test_packer_uses_fullest_row_with_space():
    rows = pack_all([make_sequence(length) for length in (6, 7, 2, 4, 1)], 10)
    assert [[len(sequence) for sequence in row] for row in rows] == [[6, 4], [7, 2, 1]]


def test_packer_stack_gives_one_sequence_per_row(files, tokenizer):
    batches = open_batches(tokenizer, name=str(files / "a.jsonl"), pack_function="stack", shuffle=False).batches
    rows = [row for batch in batches for row in batch]
    assert [len(row) for row in rows] == [1] * 20
    assert words([rows], tokenizer) == [f"a{i:02}" + "x" * (i * 7 % 11) for i in range(20)]


def drawn(seed, count, size=20):
    source = InMemorySource([(f"row {i}", {"i": i}) for i in range(size)], seed)
    return [source.draw()[1]["i"] for _ in range(count)]


def test_order_depends_on_seed_and_pass():
    assert drawn([1], 40) == drawn([1], 40)
    assert drawn([1], 40) != drawn([2], 40)
    assert drawn([1], 40)[:20] != drawn([1], 40)[20:]
    assert sorted(drawn([1], 40)[:20]) == sorted(drawn([1], 40)[20:]) == list(range(20))
    assert drawn(None, 40) == [*range(20)] * 2


def names_in(files, *names):
    return [str(files / name) for name in names or ("a.jsonl", "b.json", "c.parquet")]


def test_one_pass_has_each_example_once(files, tokenizer):
    data = open_batches(tokenizer, name=names_in(files))
    steps = data.count_steps(0)
    seen = words(data.batches, tokenizer)
    assert len(seen) == len(set(seen)) == 64
    assert data.batches.num_yielded == data.batches.steps == steps
    early = [word[0] for word in seen[:32]]
    assert all(early.count(kind) >= 4 for kind in "abc"), "the sets are mixed"


def test_interleaved_shares_hold_at_any_time(files, tokenizer):
    options = {"name": names_in(files), "probabilities": [1, 2, 1], "pack_function": "stack"}
    kinds = [word[0] for word in words(open_batches(tokenizer, max_steps=40, **options).batches, tokenizer)]
    for end in range(4, 80, 4):
        assert [kinds[:end].count(kind) for kind in "abc"] == [end // 4, end // 2, end // 4]


@pytest.mark.parametrize(("strategy", "count"), [("all_exhausted", 128), ("first_exhausted", 24)])
def test_interleaved_pass_ends_by_strategy(files, tokenizer, strategy, count):
    """b (12 examples) is drawn from every second time, c (32) every fourth."""
    options = {"name": names_in(files), "probabilities": [0.25, 0.5, 0.25], "stopping_strategy": strategy}
    seen = words(open_batches(tokenizer, **options).batches, tokenizer)
    assert abs(len(seen) - count) <= 3


STREAMS = {
    "packed": {"name": "a.jsonl"},
    "shares": {"name": "a.jsonl,b.json,c.parquet", "probabilities": [1, 3, 2]},
    "streamed shares": {"name": "a.jsonl,b.json,c.parquet", "probabilities": [2, 1, 1], "streaming": True},
    "stacked in order": {"name": "d.csv", "shuffle": False, "pack_function": "stack", "batch_size": 3},
    "all": {"name": "a.jsonl,b.json,c.parquet"},
    "streamed lines": {"name": "a.jsonl", "streaming": True, "shuffle_buffer": 64},
    "streamed table": {"name": "d.csv", "streaming": True, "shuffle_buffer": 8},
    "streamed in order": {"name": "a.jsonl", "streaming": True, "shuffle": False, "shuffle_buffer": 3},
}


def assert_restores_exactly(fresh, lefts=None):
    """Leave the stream after `lefts` batches (None: after each number); return all batches, and the states as JSON."""
    whole = fresh()
    batches, states = [], [json.dumps(whole.state())]
    for batch in whole:
        batches.append(batch)
        states.append(json.dumps(whole.state()))
    for left in range(len(states)) if lefts is None else lefts:
        again = fresh()
        again.restore(json.loads(states[left]))
        assert again.num_yielded == left
        rest = list(again)
        assert len(rest) == len(batches) - left
        for one, other in zip(batches[left:], rest, strict=True):
            assert_same(one, other)
        assert json.dumps(again.state()) == states[-1]
    return batches, states


@pytest.mark.extended(after=4)
@pytest.mark.parametrize("options", STREAMS.values(), ids=STREAMS.keys())
def test_restored_stream_continues_exactly(files, tokenizer, options):
    """Left after each of the first batches, through several passes."""
    options = {**options, "name": names_in(files, *options["name"].split(","))}
    fresh = partial(open_batches, tokenizer, max_steps=24, **options)
    batches, _ = assert_restores_exactly(lambda: fresh().batches, (0, 1, 7, 23))
    assert len(batches) == 24


def assert_same(one, other):
    assert [len(row) for row in one] == [len(row) for row in other]
    for a, b in zip((s for row in one for s in row), (s for row in other for s in row), strict=True):
        assert (a.tokens == b.tokens).all() and (a.loss_mask == b.loss_mask).all()


@pytest.mark.parametrize("pack_function", ["cat", "stack"])
def test_restored_stream_continues_inside_an_example(tmp_path, pack_function):
    """The template rewrites history, so an example is three sequences, of which a batch takes some."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = THINKING_STRIPPED
    turns = [(role, f"{role[0]}{i}=x") for i in range(3) for role in ("user", "assistant")]
    chats = [[{"role": role, "content": f"{n}{text}"} for role, text in turns] for n in range(5)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    options = {"name": str(tmp_path / "x.jsonl"), "pack_function": pack_function, "batch_size": 1, "seq_len": 160}
    _, states = assert_restores_exactly(lambda: open_batches(tokenizer, max_steps=12, **options).batches)
    assert any(json.loads(state)["pending"] for state in states)


def test_restored_pass_ends_like_the_original(files, tokenizer):
    """Also among the rows that are closed when nothing more comes."""
    fresh = partial(open_batches, tokenizer, name=str(files / "a.jsonl"), batch_size=1)
    batches, _ = assert_restores_exactly(lambda: fresh().batches)
    assert len(batches) == fresh().count_steps(0) > 3


CHANGES = {
    "larger batches": ({}, {"batch_size": 3}),
    "smaller batches": ({}, {"batch_size": 1}),
    "longer rows": ({}, {"seq_len": 96}),
    "shorter rows": ({}, {"seq_len": 16}),  # sequences of the checkpoint are truncated
    "one example per row": ({}, {"pack_function": "stack"}),
    "several examples per row": ({"pack_function": "stack"}, {"pack_function": "cat"}),
    "other shares": ({"probabilities": [1, 3]}, {"probabilities": [3, 1]}),
}


@pytest.mark.parametrize(("before", "now"), CHANGES.values(), ids=CHANGES.keys())
def test_resumed_pass_with_changed_settings_trains_the_rest(files, tokenizer, before, now):
    """Each example once, and the steps are counted from the position."""
    name = names_in(files, "a.jsonl", "b.json")
    first = open_batches(tokenizer, name=name, **before)
    first.count_steps(0)
    begin = list(islice(first.batches, 2))
    second = open_batches(tokenizer, name=name, **{**before, **now})
    second.batches.restore(json.loads(json.dumps(first.batches.state())))
    steps = second.count_steps(2)
    rest = list(second.batches)
    assert 2 + len(rest) == steps == second.batches.num_yielded
    assert all(sum(map(len, row)) <= now.get("seq_len", 64) for rows in rest for row in rows)
    seen = words([*begin, *rest], tokenizer)
    assert {word[:3] for word in seen} == {f"a{i:02}" for i in range(20)} | {f"b{i:02}" for i in range(12)}
    if "probabilities" not in before:
        assert len(seen) == 32


def test_pass_in_progress_of_several_is_trained_to_its_end(files, tokenizer):
    """Without max_steps, which limited the first run of a pass and a half."""
    options = {"name": str(files / "a.jsonl"), "batch_size": 5, "pack_function": "stack"}
    first = open_batches(tokenizer, max_steps=6, **options)
    first.count_steps(0)
    assert len(list(first.batches)) == 6
    second = open_batches(tokenizer, **options)
    second.batches.restore(json.loads(json.dumps(first.batches.state())))
    assert second.count_steps(6) == 8
    assert len(words(list(second.batches), tokenizer)) == 10


def test_resumed_pass_at_its_end_has_no_further_step(files, tokenizer):
    whole = open_batches(tokenizer, name=str(files / "a.jsonl"))
    steps = whole.count_steps(0)
    list(whole.batches)
    again = open_batches(tokenizer, name=str(files / "a.jsonl"), batch_size=7)
    again.batches.restore(whole.batches.state())
    assert again.count_steps(steps) == steps
    assert list(again.batches) == []


def test_stream_from_the_start_continues_the_numbering(files, tokenizer):
    """As with ckpt.skip_dataloader."""
    data = open_batches(tokenizer, name=str(files / "a.jsonl"))
    whole = open_batches(tokenizer, name=str(files / "a.jsonl")).count_steps(0)
    assert data.count_steps(5) == 5 + whole
    assert words(data.batches, tokenizer) and data.batches.num_yielded == 5 + whole
    limited = open_batches(tokenizer, 7, name=str(files / "a.jsonl"))
    assert limited.count_steps(5) == 7
    assert len(list(limited.batches)) == 2
    assert limited.batches.state()["batches"] == 7


@pytest.mark.parametrize("change", [{"name": "c.parquet"}, {"seed": 1}])
def test_restore_with_changed_data_raises(files, tokenizer, change):
    batches, changed = (
        open_batches(tokenizer, max_steps=4, **{**options, "name": str(files / options["name"])}).batches
        for options in ({"name": "a.jsonl"}, {"name": "a.jsonl", **change})
    )
    next(batches)
    with pytest.raises(ConfigError, match=r"ckpt.resume_step: the (checkpoint was made with other data|contents)"):
        changed.restore(batches.state())


@pytest.mark.parametrize(
    "options",
    [{}, {"probabilities": [1, 1], "streaming": True}],
    ids=["all", "streamed"],
)
def test_restore_with_changed_contents_names_the_data_set(tmp_path, tokenizer, options):
    """File names and numbers of rows are the same."""
    names = [str(tmp_path / name) for name in ("one.jsonl", "two.jsonl")]
    text = "".join(json.dumps({"prompt": f"p{i}", "completion": "c"}) + "\n" for i in range(9))
    for name in names:
        Path(name).write_text(text)

    def fresh():
        return open_batches(tokenizer, 4, name=names, **options).batches

    batches = fresh()
    next(batches)
    state = json.loads(json.dumps(batches.state()))
    assert_same(next(batches), next(restored(fresh(), state)))
    Path(names[1]).write_text(text.replace("p4", "q4"))
    with pytest.raises(ConfigError, match=r"the contents of .*two\.jsonl \(data\.name\) have changed"):
        fresh().restore(state)
    for source in state["source"]["sources"]:
        del source["contents"]  # as in checkpoints of earlier releases
    next(restored(fresh(), state))


def restored(batches, state):
    batches.restore(state)
    return batches


def test_contents_of_streamed_files_are_their_size_and_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(sft_dataset, "_BLOCK_BYTES", 2)
    monkeypatch.setattr(sft_dataset, "_NUM_BLOCKS", 3)
    file, config = tmp_path / "x.jsonl", SFTDataConfig(name=[str(tmp_path / "x.jsonl")], streaming=True)

    def identity(text):
        file.write_text(text)
        return sft_dataset.identify(config, str(file), None, "train", [])

    texts = ("0123456789", "1123456789", "0123456788", "0123x56789", "01234456789", "012345", "01x345")
    assert len({identity(text) for text in texts}) == len(texts)
    assert identity("0123456789") == identity("01xx45xx89"), "nothing else is read"


def test_contents_of_a_stream_from_the_hub_are_its_commit(monkeypatch):
    config = SFTDataConfig(name=["owner/name"], streaming=True)
    stream = Dataset.from_list([{"prompt": "a"}]).to_iterable_dataset()
    builder = SimpleNamespace(hash="a1b2", as_streaming_dataset=lambda split: stream)
    monkeypatch.setattr("datasets.load_dataset_builder", lambda name, subset: builder)
    rows = sft_dataset.open_dataset(config, "owner/name", None, "train")
    assert sft_dataset.identify(config, "owner/name", None, "train", rows) == ("owner/name", "a1b2")


def test_contents_of_data_sets_of_the_library_are_their_fingerprints(tmp_path):
    one, two = (Dataset.from_list([{"prompt": text, "completion": "c"}]) for text in "ab")
    found = []
    for dataset in (one, two):
        dataset.save_to_disk(str(tmp_path / "saved"))
        config = SFTDataConfig(name=[str(tmp_path / "saved")])
        for _ in range(2):
            found.append(sft_dataset.identify(config, str(tmp_path / "saved"), None, "train", []))
    assert found[0] == found[1] != found[2] == found[3]
    rows = sft_dataset.MappedRows(two, lambda number, row: (f"row {number}", row))
    assert sft_dataset.identify(config, "owner/name", None, "train", rows) == ("owner/name", two._fingerprint)


def test_streamed_pass_reads_each_example_once(files, tokenizer):
    options = {"streaming": True, "shuffle_buffer": 7, "pack_function": "stack", "batch_size": 1}
    batches = open_batches(tokenizer, max_steps=64, name=str(files / "c.parquet"), **options).batches
    seen = words(batches, tokenizer)
    assert sorted(seen[:32]) == sorted(seen[32:]) == sorted(set(seen))
    assert seen[:32] != seen[32:], "shuffled anew"
    assert {int(word[1:3]) for word in seen[:7]} == set(range(7)), "only within the buffer"


def hub_stream(size, num_shards=1):
    rows = Dataset.from_list([{"i": i} for i in range(size)]).to_iterable_dataset(num_shards=num_shards)
    return StreamedSource(RowStream(rows, lambda number, row: (f"row {number}", row)), 7, [1])


def test_restored_hub_stream_continues_exactly():
    """Also in the middle of what it reads at once, in another shard, in another pass."""
    whole, seen, states = hub_stream(50, 4), [], []
    for _ in range(120):
        states.append(json.dumps(whole.state()))
        seen.append(whole.draw()[1]["i"])
    assert sorted(seen[:50]) == sorted(seen[50:100]) == list(range(50))
    for left in (0, 1, 7, 33, 50, 51, 119):
        again = hub_stream(50, 4)
        again.restore(json.loads(states[left]))
        assert [again.draw()[1]["i"] for _ in range(120 - left)] == seen[left:]


def test_stream_position_of_version_0_1_0_continues_exactly():
    """It is a file and a row instead of a position of `datasets`."""
    for left in (0, 7, 15, 33):
        whole, again = hub_stream(20), hub_stream(20)
        for _ in range(left):
            whole.draw()
        again.restore({**whole.state(), "start": [0, 0]})
        assert [again.draw() for _ in range(30)] == [whole.draw() for _ in range(30)]


def test_held_out_examples_are_not_trained(files, tokenizer):
    def open_with(**val):
        return open_batches(tokenizer, name=str(files / "c.parquet"), val={"fraction": 0.25, **val})

    both = open_with()
    held, trained = words([both.held_out], tokenizer), words(both.batches, tokenizer)
    assert len(held) == 8 and len(trained) == 24
    assert not set(held) & set(trained)
    assert words([open_with().held_out], tokenizer) == held
    few = words([open_with(examples=3).held_out], tokenizer)
    assert len(few) == 3 and set(few) <= set(held)


def test_validation_on_separate_data(files, tokenizer):
    for streaming in (False, True):
        own = {"name": str(files / "b.json"), "examples": 5}
        both = open_batches(tokenizer, 1, own, name=str(files / "a.jsonl"), streaming=streaming)
        held = words([both.held_out], tokenizer)
        assert len(held) == 5 and {word[0] for word in held} == {"b"}


def test_long_examples_are_truncated_and_empty_ones_skipped(tmp_path, tokenizer):
    rows = [{"prompt": "a", "completion": "b" * 50}, {"prompt": "a" * 50, "completion": "b"}]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    batches = open_batches(tokenizer, name=str(tmp_path / "x.jsonl"), seq_len=10).batches
    assert [len(s) for rows in batches for row in rows for s in row] == [10]
    (tmp_path / "x.jsonl").write_text(json.dumps(rows[1]))
    for max_steps in (None, 3):
        with pytest.raises(ConfigError, match=r"no example has a trained token .* data.seq_len=10"):
            list(open_batches(tokenizer, max_steps, name=str(tmp_path / "x.jsonl"), seq_len=10).batches)


def test_micro_batch_concatenates_rows():
    batch = to_micro_batch([[make_sequence(3), make_sequence(2)], [make_sequence(4)]])
    assert batch.boundaries.tolist() == [0, 3, 5, 9]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3]
    assert batch.scored.tolist() == [1, 2, 4, 6, 7, 8]
    assert batch.longest == 4


def fake(**options):
    return sft_dataset.FakeSequences(SFTFakeDataConfig(seq_len=16, **options), 50)


def test_fake_sequences_depend_on_seed_and_position():
    assert [len(fake().draw()[0]) for _ in range(3)] == [16] * 3
    variable = fake(length="variable")
    assert len({len(variable.draw()[0]) for _ in range(20)}) > 3
    first, again, resumed = (PackedStream(fake(length="variable"), 16, 4) for _ in range(3))
    next(first), next(again)
    resumed.restore(json.loads(json.dumps(again.state())))
    for one, other in islice(zip(first, resumed, strict=False), 5):
        assert_same(one, other)


def test_source_with_share_zero_is_not_read():
    one, other = (InMemorySource([(kind, {})], None) for kind in "ab")
    mixed = InterleavedSource([one, other], [0.0, 2.0], "all")
    assert mixed.draw()[0] == "b"
    assert mixed.draw() is None


def test_stalled_data_raise_at_the_deadline():
    class Stuck:
        """A stream whose other end has gone silent after the first sequences."""

        drawn, go_on = 0, threading.Event()

        def draw(self):
            self.drawn += 1
            if self.drawn > 4:
                self.go_on.wait()
            return fake(length="fixed").draw()

        def state(self):
            return {}

    batches = PackedStream(Stuck(), 16, 2, timeout_seconds=0.1)
    with pytest.raises(DeadlineError, match=r"waited 0 s for the data of batch \d \(wait_timeout_seconds\)"):
        for _ in range(4):
            next(batches)
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "data")
    Stuck.go_on.set()


# Ranks that share the tokenizing make the batches of one rank


EXAMPLES = 40


def make_batches(world, argument):
    """Runs on every rank: the batches as lists, the position in the middle, and how many examples were encoded here."""
    encoded, original = [], sft_dataset.encode_row

    def count(row, *more):
        encoded.append(row[0])
        if row[1]["prompt"].startswith(argument.get("bad", "none")):
            raise ConfigError(f"data.name: {row[0]}: its template is broken")
        return original(row, *more)

    sft_dataset.encode_row = count
    try:
        data_config = SFTDataConfig(name=argument["file"], seq_len=48, batch_size=3)
        data = sft_dataset.open_data(SFTConfig(data=data_config), make_tokenizer(), world)
        batches, seen, states = data.batches, [], []
        if "state" in argument:
            batches.restore(argument["state"])
        data.count_steps(batches.num_yielded)
        for rows in batches:
            seen.append([[sequence.tokens.tolist() for sequence in row] for row in rows])
            states.append(batches.state())
        return {"batches": seen, "steps": batches.steps, "encoded": len(encoded), "state": states[len(states) // 2]}
    except ConfigError as error:
        return str(error)
    finally:
        sft_dataset.encode_row = original


def write(path):
    rows = [{"prompt": f"word{i}" + "x" * (i * 7 % 13), "completion": f"{i}"} for i in range(EXAMPLES)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_shared_encoding_gives_the_batches_of_one_rank(tmp_path):
    argument = {"file": write(tmp_path / "a.jsonl")}
    alone = make_batches(None, argument)
    two = run_world(2, make_batches, argument, tmp_path)
    for rank in two:
        assert (rank["batches"], rank["steps"]) == (alone["batches"], alone["steps"])
        assert rank["encoded"] == EXAMPLES, "half of them, to count the steps and to train"
    assert alone["encoded"] == 2 * EXAMPLES
    resumed = make_batches(None, {**argument, "state": two[0]["state"]})
    assert resumed["batches"] == alone["batches"][len(alone["batches"]) // 2 + 1 :]


def test_invalid_row_of_one_rank_raises_on_all_ranks(tmp_path):
    first, second = run_world(2, make_batches, {"file": write(tmp_path / "a.jsonl"), "bad": "word30"}, tmp_path)
    assert first == second and "its template is broken" in first
