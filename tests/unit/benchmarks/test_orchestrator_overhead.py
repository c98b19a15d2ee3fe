"""The benchmark of the orchestrator's overhead runs and writes all its figures."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks/orchestrator_overhead.py"


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tiny_run_writes_all_figures(tmp_path):
    command = [sys.executable, str(SCRIPT), "--shape", "tiny", "--json", str(tmp_path / "figures.json")]
    subprocess.run(command, check=True, timeout=800)
    figures = json.loads((tmp_path / "figures.json").read_text())
    names = {"cpu_ms_main", "cpu_ms_total", "verifiers_cpu_ms", "loop_lag_p99_ms"}
    assert set(figures) == {f"tiny_{name}" for name in names}
    # The workers' part comes from a clock of 10 ms and can be 0 in so few batches.
    assert 0 < figures["tiny_cpu_ms_main"] <= figures["tiny_cpu_ms_total"]
    assert figures["tiny_verifiers_cpu_ms"] > 0
