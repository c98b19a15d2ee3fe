"""The pipeline benchmark runs the real orchestrator on a trace and fills its table."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks/pipeline.py"


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_quick_run_keeps_the_bound_and_fills_the_table(tmp_path):
    """Rows are made only of runs whose stream and token counts are those of the trace."""
    file = tmp_path / "new" / "rows.json"
    subprocess.run([sys.executable, str(SCRIPT), "--quick", "--json", str(file)], check=True, timeout=800)
    rows = json.loads(file.read_text())
    assert [(row["policy"], row["k"]) for row in rows] == [
        ("deadline", 1), ("deadline_length_aware", 2), ("discard_stale", 2),
    ]  # fmt: skip
    for row in rows:
        assert row["staleness_max"] <= row["k"]
        assert row["efficiency"] > 0 and row["simulated"] > 0 and 0 < row["length_ratio"] < 1.5
        assert {"date", "processors", "load_own", "load_others", "switch_ms", "ship_ms"} <= set(row)
    for ours in rows[:2]:
        assert ours["tokens_wasted"] == 0
        assert ours["length_ratio"] == pytest.approx(1)
