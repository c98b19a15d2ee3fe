"""The trainer's benchmarks run and write all their figures."""

import json
from pathlib import Path

import pytest

from tests.unit.trainer.world import run_script

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"

pytestmark = pytest.mark.slow


def run(script, *arguments):
    run_script(BENCHMARKS / script, arguments)


@pytest.mark.extended
def test_tiny_run_writes_all_figures(tmp_path):
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("10 20 60")
    run("trainer.py", "--sequences", 6, "--repeats", 1, "--lengths", lengths, "--json", tmp_path / "figures.json")
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert set(figures) == {"fraction_of_roof_bf16", "fraction_of_roof_fp32", "speedup_vs_padded", "padding_ratio"}
    assert 1 < figures["padding_ratio"] < 6
    assert figures["speedup_vs_padded"] > 0
    assert all(0 < figures[f"fraction_of_roof_{dtype}"] < 1 for dtype in ("bf16", "fp32"))


@pytest.mark.extended
def test_memory_of_the_head_is_below_that_of_all_logits(tmp_path):
    shape = "--tokens", 2048, "--vocabulary", 40_000, "--hidden", 16, "--chunk", 64, "--dtypes", "float32"
    run("lm_head.py", *shape, "--json", tmp_path / "figures.json")
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["naive_float32"]["memory_gib"] > 2048 * 40_000 * 4 * 2 / 1024**3
    assert figures["ours_float32"]["memory_gib"] < figures["naive_float32"]["memory_gib"] / 4
    assert figures["ours_float32"]["logprob_error"] < 1e-3


@pytest.mark.extended
def test_heads_of_the_gpu_benchmark_run_on_a_cpu(tmp_path):
    shape = "--device", "cpu", "--tokens", 70, "--vocabulary", 300, "--hidden", 32, "--repeats", 1
    run("gpu/lm_head.py", *shape, "--json", tmp_path / "figures.json")
    heads = json.loads((tmp_path / "figures.json").read_text())["heads"]
    assert heads["ours"]["logprob_error"] < 1e-3
    assert heads["naive"]["logprob_error"] > heads["ours"]["logprob_error"]
