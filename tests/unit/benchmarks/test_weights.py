"""Figures and goals of the benchmark of publication and switch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    """Import the script; the scripts import each other by file name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import weights

    return weights


@pytest.mark.parametrize("share", [0.01, 0.06])
def test_simulated_updates_change_the_requested_fraction_of_values(benchmark, share):
    from publication import SimulatedAdam

    weights = torch.nn.Parameter(torch.randn(1000, 1000, generator=torch.Generator().manual_seed(0)) * 0.02)
    updates = SimulatedAdam([weights])
    updates.rate = updates.rate_of(share)
    for _ in range(2):
        before = weights.detach().bfloat16()
        updates.step()
        assert (weights.bfloat16() != before).float().mean() == pytest.approx(share, rel=0.05)


def _round(**seconds):
    usual = dict.fromkeys(
        ("stall_s", "step_s", "step_alone_s", "load_s", "stage_s", "checks_s", "file_bytes", "staged_bytes"), 1.0
    )
    usual |= {"canary_difference": 0.0, "sampling_kept": 1.0}
    limits = {"memcpy_s": 0.1, "disk_s": 2.0, "copy_s": 0.2, "process_s": 0.8, "writing_s": 4.0}
    return usual | limits | {"pause_s": 0.5, "publish_to_switch_s": 6.2} | seconds


def test_figures_are_medians_without_the_first_switch(benchmark):
    served = [
        _round(pause_s=50.0, stall_s=9.0),
        _round(stall_s=0.1),
        _round(stall_s=0.3, pause_s=1.5),
        _round(stall_s=0.2),
    ]
    figures = benchmark.summary(2, [_round(stall_s=0.4)], [_round(stall_s=0.04)], served)
    assert figures["pause_over_copy"] == pytest.approx(0.5)
    assert figures["stall_fraction"] == pytest.approx(0.05)
    assert figures["stall"]["alone"] == pytest.approx(0.1)
    assert figures["stall"]["alone_no_canary"] == pytest.approx(0.01)
    assert figures["latency"]["over_limit"] == pytest.approx(2)
    assert figures["pause"]["longest_s"] == 50


def test_reached_compares_figures_with_the_goals(benchmark):
    good = {"over_entropy": 1.2, "xor_over_delta": 1.9}
    figures = {
        "pause_over_copy": 1.5,
        "stall_fraction": 0.06,
        "delta": {"0.01": good, "0.02": good | {"over_entropy": 1.4}},
    }
    assert benchmark.reached(figures) == {
        "pause_over_copy": True, "stall_fraction": False, "over_entropy": False, "xor_over_delta": True
    }  # fmt: skip


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_small_run_writes_all_figures(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "weights.py"), "--small", "--no-reverse-text", "--json"]
    subprocess.run([*command, str(tmp_path / "figures.json")], check=True, timeout=800, stdout=subprocess.DEVNULL)
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert {"pause_over_copy", "stall_fraction", "delta"} < set(figures)
    assert figures["pause_over_copy"] > 0 and figures["stall_fraction"] > 0
    assert figures["canary_difference"] < 0.5
    for share, one in figures["delta"].items():
        assert one["changed"] == pytest.approx(float(share), rel=0.1)
        assert one["exact"] is True and one["over_entropy"] < 1.3 and one["xor_over_delta"] > 1.8
