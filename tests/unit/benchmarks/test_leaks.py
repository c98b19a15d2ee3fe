"""The leak benchmark separates growth from fluctuation."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks/leaks.py"
STEPS, WARMUP = 200, 50


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("leaks", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["leaks"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def run(benchmark, memory=lambda step: 500.0, files=lambda step: 20, until=STEPS, skipped=0):
    """Simulate a run with one process of the given memory and files, and one constant process."""
    looks = []
    for step in range(1, STEPS + 1, 1 + skipped):
        processes = {1: benchmark.Sample(900.0, 800.0, 10, 4)}
        if step <= until:
            processes[2] = benchmark.Sample(memory(step), memory(step) - 100, files(step), 4)
        looks.append(benchmark.Look(step, processes))
    names = {1: "inference", 2: "orchestrator"}
    rows = benchmark.summarise(looks, names, WARMUP)
    return rows, benchmark.missed_limits(rows, looks, names, WARMUP, STEPS)


def test_fluctuating_memory_is_no_leak(benchmark):
    rows, missed = run(benchmark, lambda step: 500 + 40 * (step % 2), lambda step: 20 + step % 7)
    assert [row.name for row in rows] == ["inference", "orchestrator"]
    assert missed == []


def test_growth_during_the_warm_up_is_no_leak(benchmark):
    rows, missed = run(benchmark, lambda step: 100 + 10 * min(step, WARMUP), lambda step: min(step, WARMUP))
    assert missed == []
    assert rows[1].grew == 0


def test_growth_above_five_percent_is_reported(benchmark):
    rows, missed = run(benchmark, lambda step: 500 + 0.25 * step)
    assert missed == ["orchestrator (pid 2): 514 -> 549 MB (+6.9%), 20 -> 20 files"]
    assert rows[1].private == pytest.approx(35.25)
    assert run(benchmark, lambda step: 500 + 0.15 * step)[1] == []


def test_growing_number_of_open_files_is_reported(benchmark):
    _, missed = run(benchmark, files=lambda step: 20 + step // 30)
    assert missed == ["orchestrator (pid 2): 500 -> 500 MB (+0.0%), 21 -> 26 files"]


def test_replaced_process_is_reported(benchmark):
    _, missed = run(benchmark, until=150)
    assert missed == ["orchestrator (pid 2) did not live to the end"]


def test_run_with_missed_steps_is_reported(benchmark):
    _, missed = run(benchmark, skipped=1)
    assert missed == ["only 100 of 200 steps were seen"]
