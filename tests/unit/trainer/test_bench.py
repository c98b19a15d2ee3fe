"""`--bench` of trainer and sft: a table's figures in bench.json, again and again, beside an untouched run; profiles."""

import json

import pytest

from tests.support.tiny_model import make_tiny_model
from tests.unit.trainer.world import run_command


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("command", ["trainer", "sft"])
def test_figures_of_the_steps_after_the_first(command, model, tmp_path):
    (tmp_path / "weights").mkdir()  # of a run that goes on
    data = ["--data.fake.seq-len", "24"] if command == "trainer" else ["--data.type", "fake", "--data.batch-size", "3"]
    arguments = ["--model.name", model, "--output-dir", tmp_path, "--device", "cpu", "--bench", *data]
    for steps in (4, 3):
        code, error = run_command(command, [*arguments, "--bench-steps", steps])
        assert code == 0, error[-3000:]
        lines = [json.loads(line) for line in (tmp_path / "bench/metrics/trainer.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == list(range(steps))
        figures = json.loads((tmp_path / "bench/bench.json").read_text())["trainer"]
        speeds = [line["perf/tokens_per_second"] for line in lines[1:]]
        assert figures["perf/tokens_per_second"]["mean"] == pytest.approx(sum(speeds) / len(speeds))
        assert figures["perf/tokens_per_second"]["max"] == max(speeds)
        assert {"time/step", "time/train", "perf/mfu", "perf/mfu_upstream", "perf/peak_memory_gib"} <= figures.keys()
    assert {path.name for path in tmp_path.iterdir()} >= {"weights", "bench"}
    assert not list((tmp_path / "weights").iterdir())


def test_a_trace_shows_the_steps(model, tmp_path):
    arguments = ["--model.name", model, "--output-dir", tmp_path, "--device", "cpu", "--data.fake.seq-len", "16"]
    code, error = run_command("trainer", [*arguments, "--bench", "--trace-path", tmp_path / "trace"])
    assert code == 0, error[-3000:]
    events = json.loads((tmp_path / "trace/rank_0.json").read_text())["traceEvents"]
    names = {event.get("name", "") for event in events}
    assert {"aten::mm", "ProfilerStep#2", "ProfilerStep#3"} <= names


def test_a_memory_snapshot_needs_a_gpu(model, tmp_path):
    arguments = ["--model.name", model, "--output-dir", tmp_path, "--device", "cpu", "--bench"]
    code, error = run_command("trainer", [*arguments, "--memory-profiler-path", tmp_path / "memory"])
    assert code == 2
    [line] = [line for line in error.splitlines() if line.startswith("error: ")]
    assert "memory_profiler_path" in line and "CUDA" in line
