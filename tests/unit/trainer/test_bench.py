"""`--bench` of trainer and sft, and profiles."""

import json

import pytest
import torch

from prime_rl.core.errors import ConfigError
from prime_rl.trainer.parallel.process_group import World
from prime_rl.trainer.trainer_metrics import Profiler
from tests.unit.trainer.world import run_command


@pytest.mark.extended
@pytest.mark.parametrize("command", ["trainer", "sft"])
def test_bench_reports_steps_after_the_first(command, tiny, tmp_path):
    (tmp_path / "weights").mkdir()  # of a run that goes on
    data = ["--data.fake.seq-len", "24"] if command == "trainer" else ["--data.type", "fake", "--data.batch-size", "3"]
    arguments = ["--model.name", tiny, "--output-dir", tmp_path, "--device", "cpu", "--bench", *data]
    more = ["--trace-path", tmp_path / "trace", "--wandb.offline", "--wandb.log-extras.interval", 2]
    for steps, options in ((4, []), (3, more)):
        code, error = run_command(command, [*arguments, "--bench-steps", steps, *options])
        assert code == 0, error[-3000:]
        lines = [json.loads(line) for line in (tmp_path / "bench/metrics/trainer.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == list(range(steps))
        figures = json.loads((tmp_path / "bench/bench.json").read_text())["trainer"]
        speeds = [line["perf/tokens_per_second"] for line in lines[1:]]
        assert figures["perf/tokens_per_second"]["mean"] == pytest.approx(sum(speeds) / len(speeds))
        assert figures["perf/tokens_per_second"]["max"] == max(speeds)
        assert {"time/step", "time/train", "perf/mfu", "perf/mfu_simple", "perf/peak_memory_gib"} <= figures.keys()
    assert not list((tmp_path / "weights").iterdir())

    names = ["logprob", "entropy"]
    names += ["importance_ratio", "mismatch_kl", "advantage"] if command == "trainer" else []
    tables = [json.loads(path.read_text()) for path in tmp_path.rglob("distributions*.table.json")]
    distributions = [(row[0], row[1]) for table in tables for row in table["data"]]
    assert sorted(distributions) == sorted((step, name) for step in (0, 2) for name in names)
    (written,) = tmp_path.rglob("*.wandb")
    assert b"bench/perf/tokens_per_second/mean" in written.read_bytes()
    events = json.loads((tmp_path / "trace/rank_0.json").read_text())["traceEvents"]
    assert {"aten::mm", "ProfilerStep#2"} <= {event.get("name") for event in events}


def test_memory_snapshot_without_gpu_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^memory_profiler_path: .* CUDA") as caught:
        Profiler(None, tmp_path, World(0, 1, torch.device("cpu")))
    assert "\n" not in str(caught.value)
