"""Reading files that another process appends to."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_rl.core.json_lines import FilePosition, JsonLinesFile, JsonTail, decode_object, read_between


def lines_of(rows):
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@given(rows=st.lists(st.integers(), max_size=20), cuts=st.lists(st.integers(0, 400), max_size=6))
def test_reader_sees_each_line_once_however_the_file_grows(rows, cuts, tmp_path_factory):
    path = tmp_path_factory.mktemp("tail") / "a.jsonl"
    data, file, seen, done = lines_of({"n": row} for row in rows), JsonLinesFile(path), [], 0
    for end in [*sorted(min(cut, len(data)) for cut in cuts), len(data)]:
        with path.open("ab") as target:
            target.write(data[done:end])
        done = max(done, end)
        seen += [row["n"] for row in file.read()]
    assert seen == rows and file.position.offset == len(data) and file.num_damaged == 0


def test_reader_missing_file_returns_nothing_and_reads_it_later(tmp_path):
    file = JsonLinesFile(tmp_path / "a.jsonl")
    assert file.read() == []
    file.path.write_bytes(lines_of([{"n": 1}]))
    assert file.read() == [{"n": 1}] and file.num_replaced == 0


@pytest.mark.parametrize(
    "line", [b"{", b"[1]", b"\xff\xfe", b'{"a": NaN}', b"[" * 100_000, b'"' + b"a" * 5_000_000 + b'"']
)
def test_reader_damaged_line_is_counted_and_skipped(tmp_path, line):
    file = JsonLinesFile(tmp_path / "a.jsonl")
    file.path.write_bytes(line + b'\n{"n": 1}\n')
    assert file.read() == [{"n": 1}] and file.num_damaged == 1 and decode_object(line) is None


def test_reader_replaced_file_is_read_from_its_beginning(tmp_path):
    file = JsonLinesFile(tmp_path / "a.jsonl")
    file.path.write_bytes(lines_of([{"n": 1}, {"n": 2}]))
    file.read()
    other = tmp_path / "b.jsonl"
    other.write_bytes(lines_of([{"n": 1}]))
    other.replace(file.path)
    assert file.read() == [{"n": 1}] and file.num_replaced == 1


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


def test_json_tail_incomplete_line_is_read_later(tmp_path):
    file = tmp_path / "trainer.jsonl"
    lines = JsonTail(file)
    assert lines.read() == []
    file.write_text('{"step": 0}\n{"st')
    assert lines.read() == [{"step": 0}]
    with file.open("a") as more:
        more.write('ep": 1}\n')
    assert lines.read() == [{"step": 1}]


def test_json_tail_file_replaced_by_a_rollback_yields_only_new_lines(tmp_path):
    """It starts at the beginning of a line and does not repeat the lines that both files have."""
    file = tmp_path / "trainer.jsonl"
    lines = JsonTail(file)
    file.write_text("".join(f'{{"step": {step}, "old": true}}\n' for step in range(4)))
    assert len(lines.read()) == 4
    cut = tmp_path / "cut"
    cut.write_text("".join(file.read_text().splitlines(keepends=True)[:2]) + '{"step": 2, "new": "and rather long"}\n')
    cut.rename(file)
    assert lines.read() == [{"step": 2, "new": "and rather long"}]
    with file.open("a") as more:
        more.write('{"step": 3}\n')
    assert lines.read() == [{"step": 3}]


def test_json_tail_damaged_line_is_skipped(tmp_path):
    file = tmp_path / "trainer.jsonl"
    file.write_text('{"step": 0}\n{damaged\n[1]\n{"step": 1}\n')
    assert JsonTail(file).read() == [{"step": 0}, {"step": 1}]


def test_json_tail_replacement_that_is_filled_later_repeats_nothing(tmp_path):
    file, cut = tmp_path / "trainer.jsonl", tmp_path / "cut"
    lines = JsonTail(file)
    file.write_bytes(lines_of({"step": step} for step in range(3)))
    assert len(lines.read()) == 3
    cut.touch()
    cut.rename(file)
    assert lines.read() == []
    file.write_bytes(lines_of([{"step": 0}, {"step": 1, "new": True}]))
    assert lines.read() == [{"step": 1, "new": True}]
