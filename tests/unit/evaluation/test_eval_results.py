"""What is on disk survives a kill at any byte; two writers never mix."""

import json

import pytest

from prime_rl.core.errors import ConfigError, RunError
from prime_rl.evaluation.eval_results import ExampleFailure, ExampleRow, ResultFile, RolloutRow, digest, open_results

ROWS = [
    ExampleRow(2, [RolloutRow(0.5, {"a": 1.0}, False, 3, [{"role": "user", "content": "né \n \u2028"}])]),
    ExampleRow(0, failure=ExampleFailure("environment", "KeyError: 'x'")),
    ExampleRow(7, [RolloutRow(1.0, {}, True, 9, [], [{"type": "function"}], 3, 4)]),
]


def write(path):
    with ResultFile(path) as results:
        for row in ROWS:
            results.add(row)


def test_result_file_returns_its_rows(tmp_path):
    write(tmp_path / "r.jsonl")
    with ResultFile(tmp_path / "r.jsonl") as results:
        assert results.rows == {row.example: row for row in ROWS}
    lines = (tmp_path / "r.jsonl").read_bytes().split(b"\n")
    assert [json.loads(line)["example"] for line in lines[:-1]] == [2, 0, 7]


def test_result_file_cut_at_any_byte_loses_at_most_the_last_row(tmp_path):
    write(tmp_path / "whole.jsonl")
    whole = (tmp_path / "whole.jsonl").read_bytes()
    path = tmp_path / "cut.jsonl"
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        complete = whole[:length].count(b"\n")
        with ResultFile(path) as results:
            assert list(results.rows.values()) == ROWS[:complete]
            results.add(ExampleRow(9, failure=ExampleFailure("refused", "late")))
        with ResultFile(path) as results:
            assert [row.example for row in results.rows.values()] == [row.example for row in ROWS[:complete]] + [9]


def test_result_file_last_row_of_an_example_counts(tmp_path):
    with ResultFile(tmp_path / "r.jsonl") as results:
        results.add(ROWS[1])
        results.add(ExampleRow(0, ROWS[0].rollouts))
    with ResultFile(tmp_path / "r.jsonl") as results:
        assert results.rows[0].failure is None


def test_result_file_second_writer_raises(tmp_path):
    with ResultFile(tmp_path / "r.jsonl"), pytest.raises(RunError, match="written by another process"):
        ResultFile(tmp_path / "r.jsonl")


def test_open_results_other_settings_have_another_folder(tmp_path):
    one, other = {"sampling": {"temperature": 0.7}}, {"sampling": {"temperature": 0.8}}
    with open_results(tmp_path, one) as first, open_results(tmp_path, other) as second:
        assert first.path != second.path
        first.add(ROWS[0])
    with open_results(tmp_path, dict(one)) as again:
        assert list(again.rows) == [2]
    assert json.loads((tmp_path / digest(one) / "settings.json").read_text()) == one


def test_open_results_unwritable_folder_raises_config_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="set --output-dir"):
        open_results(tmp_path / "file", {})
