"""`--bench` of trainer and sft, and profiles."""

import json

import pytest

from tests.unit.trainer.world import run_command


@pytest.mark.extended
@pytest.mark.parametrize("command", ["trainer", "sft"])
def test_bench_reports_steps_after_the_first(command, tiny, tmp_path):
    (tmp_path / "weights").mkdir()  # of a run that goes on
    data = ["--data.fake.seq-len", "24"] if command == "trainer" else ["--data.type", "fake", "--data.batch-size", "3"]
    arguments = ["--model.name", tiny, "--output-dir", tmp_path, "--device", "cpu", "--bench", *data]
    for steps in (4, 3):
        code, error = run_command(command, [*arguments, "--bench-steps", steps])
        assert code == 0, error[-3000:]
        lines = [json.loads(line) for line in (tmp_path / "bench/metrics/trainer.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == list(range(steps))
        figures = json.loads((tmp_path / "bench/bench.json").read_text())["trainer"]
        speeds = [line["perf/tokens_per_second"] for line in lines[1:]]
        assert figures["perf/tokens_per_second"]["mean"] == pytest.approx(sum(speeds) / len(speeds))
        assert figures["perf/tokens_per_second"]["max"] == max(speeds)
        assert {"time/step", "time/train", "perf/mfu", "perf/mfu_simple", "perf/peak_memory_gib"} <= figures.keys()
    assert {path.name for path in tmp_path.iterdir()} >= {"weights", "bench"}
    assert not list((tmp_path / "weights").iterdir())


@pytest.mark.extended
@pytest.mark.parametrize("command", ["trainer", "sft"])
def test_bench_with_wandb_writes_distributions_and_figures(command, tiny, tmp_path):
    data = ["--data.fake.seq-len", "24"] if command == "trainer" else ["--data.type", "fake", "--data.batch-size", "3"]
    arguments = ["--model.name", tiny, "--output-dir", tmp_path, "--device", "cpu", "--bench", "--bench-steps", 3]
    wandb = ["--wandb.offline", "--wandb.log-extras.interval", 2]
    code, error = run_command(command, [*arguments, *data, *wandb])
    assert code == 0, error[-3000:]
    tables = [json.loads(path.read_text()) for path in tmp_path.rglob("distributions*.table.json")]
    names = ["logprob", "entropy"]
    names += ["importance_ratio", "mismatch_kl", "advantage"] if command == "trainer" else []
    assert sorted([(row[0], row[1]) for table in tables for row in table["data"]]) == sorted(
        (step, name) for step in (0, 2) for name in names
    )
    (written,) = tmp_path.rglob("*.wandb")
    assert b"bench/perf/tokens_per_second/mean" in written.read_bytes()


@pytest.mark.extended
def test_trace_contains_steps(tiny, tmp_path):
    arguments = ["--model.name", tiny, "--output-dir", tmp_path, "--device", "cpu", "--data.fake.seq-len", "16"]
    code, error = run_command("trainer", [*arguments, "--bench", "--trace-path", tmp_path / "trace"])
    assert code == 0, error[-3000:]
    events = json.loads((tmp_path / "trace/rank_0.json").read_text())["traceEvents"]
    names = {event.get("name", "") for event in events}
    assert {"aten::mm", "ProfilerStep#2", "ProfilerStep#3"} <= names


def test_memory_snapshot_without_gpu_exits(tiny, tmp_path):
    arguments = ["--model.name", tiny, "--output-dir", tmp_path, "--device", "cpu", "--bench"]
    code, error = run_command("trainer", [*arguments, "--memory-profiler-path", tmp_path / "memory"])
    assert code == 2
    [line] = [line for line in error.splitlines() if line.startswith("error: ")]
    assert "memory_profiler_path" in line and "CUDA" in line
