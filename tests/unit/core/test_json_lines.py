"""Reading files that another process appends to."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.core.json_lines import FilePosition, JsonLinesFile, JsonTail, decode_object, read_between


def lines_of(rows):
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@given(rows=st.lists(st.integers(), max_size=20), cuts=st.lists(st.integers(0, 400), max_size=6))
@settings(max_examples=30, deadline=None)
def test_reader_sees_each_line_once_however_the_file_grows(rows, cuts, tmp_path_factory):
    path = tmp_path_factory.mktemp("tail") / "a.jsonl"
    data, file, seen, done = lines_of({"n": row} for row in rows), JsonLinesFile(path), [], 0
    for end in [*sorted(min(cut, len(data)) for cut in cuts), len(data)]:
        with path.open("ab") as target:
            target.write(data[done:end])
        done = max(done, end)
        seen += [row["n"] for row in file.read()]
    assert seen == rows and file.position.offset == len(data) and file.num_damaged == 0


def test_reader_reads_a_file_that_appears_or_is_replaced_from_its_beginning(tmp_path):
    file, other = JsonLinesFile(tmp_path / "a.jsonl"), tmp_path / "b.jsonl"
    assert file.read() == []
    file.path.write_bytes(lines_of([{"n": 1}, {"n": 2}]))
    assert file.read() == [{"n": 1}, {"n": 2}] and file.num_replaced == 0
    other.write_bytes(lines_of([{"n": 1}]))
    other.replace(file.path)
    assert file.read() == [{"n": 1}] and file.num_replaced == 1


@pytest.mark.parametrize(
    "line", [b"{", b"[1]", b"\xff\xfe", b'{"a": NaN}', b"[" * 100_000, b'"' + b"a" * 5_000_000 + b'"']
)
def test_reader_damaged_line_is_counted_and_skipped(tmp_path, line):
    file = JsonLinesFile(tmp_path / "a.jsonl")
    file.path.write_bytes(line + b'\n{"n": 1}\n')
    assert file.read() == [{"n": 1}] and file.num_damaged == 1 and decode_object(line) is None


def test_reader_large_file_is_returned_in_parts(tmp_path):
    file = JsonLinesFile(tmp_path / "a.jsonl")
    file.path.write_bytes(lines_of({"n": n} for n in range(100)))
    parts = []
    while part := file.read(max_bytes=50):
        parts.append(part)
    assert len(parts) > 5 and [row["n"] for part in parts for row in part] == list(range(100))


def test_read_between_returns_the_lines_of_two_positions(tmp_path):
    file = JsonLinesFile(tmp_path / "a.jsonl")
    file.path.write_bytes(lines_of([{"n": 1}]))
    file.read()
    begin = FilePosition.parse(str(file.position))
    with file.path.open("ab") as target:
        target.write(lines_of([{"n": 2}]) + b"{damaged\n" + lines_of([{"n": 3}]))
    file.read()
    assert read_between(file.path, begin, file.position, 1000) == [{"n": 2}, {"n": 3}]
    assert read_between(file.path, begin, file.position, 3) is None
    assert read_between(file.path, FilePosition(begin.inode + 1, 0), file.position, 1000) is None


@pytest.mark.parametrize("text", ["", "x", "1", "1-", "-5--5", "1-²", "9" * 30])
def test_position_malformed_text_is_the_beginning(text):
    assert FilePosition.parse(text) == FilePosition()


def test_json_tail_reads_an_incomplete_line_later_and_skips_damaged_ones(tmp_path):
    file = tmp_path / "trainer.jsonl"
    lines = JsonTail(file)
    assert lines.read() == []
    file.write_text('{"step": 0}\n{damaged\n[1]\n{"st')
    assert lines.read() == [{"step": 0}]
    with file.open("a") as more:
        more.write('ep": 1}\n')
    assert lines.read() == [{"step": 1}]


@pytest.mark.parametrize("filled_later", [False, True])
def test_json_tail_file_replaced_by_a_rollback_yields_only_new_lines(tmp_path, filled_later):
    file, cut = tmp_path / "trainer.jsonl", tmp_path / "cut"
    lines = JsonTail(file)
    file.write_text("".join(f'{{"step": {step}, "old": true}}\n' for step in range(4)))
    assert len(lines.read()) == 4
    kept = "".join(file.read_text().splitlines(keepends=True)[:2])
    if filled_later:
        cut.touch()
        cut.rename(file)
        assert lines.read() == []
        file.write_text(kept)
    else:
        cut.write_text(kept)
        cut.rename(file)
    for step in ('2, "new": "and rather long"', "3"):
        with file.open("a") as more:
            more.write(f'{{"step": {step}}}\n')
    assert lines.read() == [{"step": 2, "new": "and rather long"}, {"step": 3}]
