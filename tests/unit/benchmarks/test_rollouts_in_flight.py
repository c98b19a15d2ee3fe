"""The benchmark of rollouts in flight runs and writes all its figures."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks/rollouts_in_flight.py"


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_short_run_writes_all_figures(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--steps", "5", "--seconds", "1", "--json", str(tmp_path / "figures.json")]
    subprocess.run(command, check=True, timeout=800)
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["lag"]["in_flight"] > 1900
    for name in ("server", "worker", "orchestrator"):
        process = figures["lag"][name]
        assert process["ticks"] > 50
        assert process["cpu_ms"] > 0
        assert 0 <= process["lag_own_p99_ms"] <= process["lag_p99_ms"] <= process["lag_maximum_ms"]
    assert figures["throughput"]["rollouts_per_cpu_s"] > 0
