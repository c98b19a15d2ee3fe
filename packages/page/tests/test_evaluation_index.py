"""Rollouts of evaluations in the page: written by the real result file, found by folder, filtered and read."""

import pytest
from tests.support.synthetic_run import write_run

from prime_rl.evaluation.eval_results import ExampleRow, ResultFile, RolloutRow
from prime_rl.storage.paths import RunPaths
from prime_rl_page.run_data.run_view import RunView
from prime_rl_page.run_data.sample_index import OFFLINE_FILE, SampleFilter, find_evaluations


def rollout(reward, text):
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]
    return RolloutRow(reward, {"exact": reward}, False, 3, messages, min_version=4, max_version=5)


@pytest.fixture
def view(tmp_path):
    paths = write_run(tmp_path / "run", steps=3)
    for file in (paths.evals_dir / "math/step_5.jsonl", paths.evals_dir / f"code/1a2b/{OFFLINE_FILE}"):
        with ResultFile(file) as results:
            results.add(ExampleRow(7, [rollout(1.0, "seven"), rollout(0.0, "no")]))
            results.add(ExampleRow(8, [rollout(0.5, "eight")]))
            results.add(ExampleRow(9))
        with file.open("a") as lines:
            lines.write('{"example": "x"}\n{"example": 10, "rol')
    return RunView("run", paths.root)


def ids(answer):
    return [(row["step"], row["group"], row["rollout"]) for row in answer["rows"]]


@pytest.mark.parametrize(("name", "step"), [("math", 5), ("code/1a2b", 0)])
def test_rollouts_of_an_evaluation_are_filtered_and_read(view, name, step):
    everything = view.search(SampleFilter(), 0, 10, name)
    assert everything["evaluations"] == ["code/1a2b", "math"] and everything["num_damaged"] == 1
    assert set(ids(everything)) == {(step, 7, 0), (step, 7, 1), (step, 8, 0)}
    assert ids(view.search(SampleFilter(reward_from=0.9), 0, 10, name)) == [(step, 7, 0)]
    assert ids(view.search(SampleFilter(text="EIGHT"), 0, 10, name)) == [(step, 8, 0)]
    detail = view.rollout(step, 7, 1, name)
    assert detail["messages"][1]["content"] == "no" and detail["reward"] == 0 and detail["staleness"] is None
    assert [one["reward"] for one in detail["all_rollouts"]] == [1, 0] and "no tokens" in detail["token_note"]
    assert view.rollout(step, 9, 0, name) is None


def test_rollouts_of_training_are_separate_and_other_folders_unreachable(view, tmp_path):
    assert view.search(SampleFilter(), 0, 10)["num_matching"] == 3 * 16
    assert view.search(SampleFilter(), 0, 10, "../samples")["num_matching"] == 0
    assert view.rollout(0, 0, 0, "../samples") is None
    assert find_evaluations(RunPaths(tmp_path / "none")) == []
