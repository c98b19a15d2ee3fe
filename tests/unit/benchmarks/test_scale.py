"""The benchmark of the orchestrator's scale runs and writes all its figures."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks/scale.py"


@pytest.mark.extended
@pytest.mark.slow
def test_tiny_scale_run_writes_all_figures(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--tiny", "--json", str(tmp_path / "figures.json")]
    subprocess.run(command, check=True, timeout=300)
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["in_flight"] == 64, "the many of the tiny size"
    assert 0 < figures["cpu_ms_main_100"] < figures["cpu_ms_100"]
    assert 0 < figures["cpu_ms_main_10000"] < figures["cpu_ms_10000"]
    assert 0 <= figures["loop_lag_own_p99_ms"] <= figures["loop_lag_p99_ms"] <= figures["loop_lag_maximum_ms"]
    assert figures["restart_seconds"] > 0
