"""The index of rollouts: filters, growth of the run, damaged and hostile lines."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.storage.paths import RunPaths
from prime_rl_page.run_data.sample_index import SampleFilter, SampleIndex, preview


def row(group=0, rollout=0, env="math", reward=1.0, text="hello", **more):
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]
    known = {
        "group_id": group, "rollout": rollout, "env": env, "reward": reward, "advantage": 0.5, "messages": messages,
    }  # fmt: skip
    return {**known, "is_truncated": False, "min_version": 0, "max_version": 1, **more}


def write(paths, step, rows):
    paths.samples_dir.mkdir(exist_ok=True)
    paths.samples(step).write_text("".join(json.dumps(one) + "\n" for one in rows))


def search(index, position=0, count=100, **wanted):
    return index.search(SampleFilter(**wanted), position, count, 10.0)


def ids(page):
    return [(one["step"], one["group"], one["rollout"]) for one in page["rows"]]


@pytest.fixture
def paths(tmp_path):
    return RunPaths(tmp_path)


FILTERS = {
    "step": ({"step_from": 1, "step_to": 1}, [(1, 2, 0), (1, 2, 1)]),
    "env": ({"env": "code"}, [(1, 2, 0), (1, 2, 1)]),
    "unknown env": ({"env": "none"}, []),
    "reward": ({"reward_from": 0.5, "reward_to": 0.7}, [(1, 2, 1), (0, 0, 1)]),
    "staleness": ({"staleness_from": 1}, [(1, 2, 0), (1, 2, 1)]),
    "truncated": ({"truncated": True}, [(0, 0, 1)]),
    "group": ({"group": 0}, [(0, 0, 0), (0, 0, 1)]),
    "text": ({"text": "WORLD"}, [(1, 2, 1)]),
    "no text": ({"text": "absent"}, []),
    "order": ({"order": "reward", "ascending": True}, [(0, 0, 0), (0, 0, 1), (1, 2, 1), (1, 2, 0)]),
    "ties": ({"order": "advantage", "ascending": True}, [(1, 2, 0), (1, 2, 1), (0, 0, 0), (0, 0, 1)]),
    "ties, descending": ({"order": "advantage"}, [(1, 2, 0), (1, 2, 1), (0, 0, 0), (0, 0, 1)]),
    "steps": ({"ascending": True}, [(0, 0, 0), (0, 0, 1), (1, 2, 0), (1, 2, 1)]),
    "text and order": ({"order": "reward", "text": "hello"}, [(1, 2, 0), (0, 0, 1), (0, 0, 0)]),
}


@pytest.mark.parametrize(("wanted", "expected"), FILTERS.values(), ids=FILTERS)
def test_search_filter_selects_rollouts(paths, wanted, expected):
    write(paths, 0, [row(reward=0.0), row(rollout=1, reward=0.5, is_truncated=True)])
    write(paths, 1, [row(2, env="code"), row(2, 1, "code", 0.6, "hi world")])
    assert ids(search(SampleIndex(paths), **wanted)) == expected


@settings(max_examples=20)
@given(count=st.integers(1, 7), text=st.sampled_from([None, "a"]))
def test_search_pages_contain_each_rollout_once(count, text, tmp_path_factory):
    paths = RunPaths(tmp_path_factory.mktemp("run"))
    expected = []
    for step in range(3):
        write(paths, step, [row(step, i, text="ab"[i % 2]) for i in range(5)])
        expected += [(step, step, i) for i in range(5) if text is None or i % 2 == 0]
    index, position, found = SampleIndex(paths), 0, []
    while position is not None:
        page = search(index, position, count, text=text)
        found += ids(page)
        position = page["next_position"]
    assert sorted(found) == expected


def test_index_growing_file_appears_without_its_half_line(paths):
    index = SampleIndex(paths)
    write(paths, 0, [row()])
    line = json.dumps(row(0, 1))
    with paths.samples(0).open("a") as file:
        file.write(line[:40])
        file.flush()
        assert ids(search(index)) == [(0, 0, 0)]
        file.write(line[40:] + "\n")
    assert ids(search(index)) == [(0, 0, 0), (0, 0, 1)]
    paths.samples(0).unlink()
    write(paths, 1, [row(7)])
    assert ids(search(index)) == [(1, 7, 0)]


def test_index_missing_folder_is_empty_and_budget_limits_the_work(paths):
    index = SampleIndex(paths)
    assert search(index)["num_files"] == 0
    for step in range(30):
        write(paths, step, [row(step)])
    first = index.search(SampleFilter(), 0, 100, 0.0)
    assert first["num_files"] == 30 and first["num_indexed"] < 30
    for _ in range(30):
        index.search(SampleFilter(), 0, 1, 0.0)
    assert index.search(SampleFilter(), 0, 1, 0.0)["num_indexed"] == 30
    assert search(index)["num_matching"] == 30


DAMAGED = [
    b"{", b"[]", b'{"group_id": "x"}', b'{"group_id": 99999999999999999999}', b'{"reward": "high"}', b"\xff\xfe{}",
]  # fmt: skip


def test_index_damaged_lines_are_counted_and_skipped(paths):
    write(paths, 0, [row()])
    with paths.samples(0).open("ab") as file:
        file.writelines(line + b"\n" for line in DAMAGED)
    index = SampleIndex(paths)
    assert ids(search(index)) == [(0, 0, 0)] and index.num_damaged == len(DAMAGED)


def test_index_long_line_is_read_back_whole(paths):
    text = "<script>\x1b[31m\u202e" + "x" * 6_000_000
    write(paths, 0, [row(text=text)])
    index = SampleIndex(paths)
    assert ids(search(index, text="<SCRIPT>")) == [(0, 0, 0)]
    [entry] = index.find(0, 0)
    assert index.read(entry)["messages"][1]["content"] == text


def test_index_environments_beyond_the_limit_are_damaged_lines(paths):
    write(paths, 0, [row(i, env=f"env{i}") for i in range(1005)])
    index = SampleIndex(paths)
    assert search(index)["num_matching"] == 1000 and index.num_damaged == 5


@pytest.mark.parametrize("messages", [None, [], "text", [1], [{"content": None}], [{}], {"a": 1}])
def test_preview_of_any_messages_is_text(messages):
    assert preview({"messages": messages}) == ""
