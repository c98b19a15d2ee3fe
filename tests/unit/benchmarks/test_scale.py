"""The benchmark of the orchestrator's scale runs and writes all its figures."""

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tiny_scale_run_writes_all_figures(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "scale.py"), "--tiny", "--json", str(tmp_path / "figures.json")]
    subprocess.run(command, check=True, timeout=800)
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert 16 < figures["in_flight"] <= 64, "the median; 16 are the few of the tiny size, and 64 the many"
    assert 0 < figures["cpu_ms_main_100"] < figures["cpu_ms_100"]
    assert 0 < figures["cpu_ms_main_10000"] < figures["cpu_ms_10000"]
    assert 0 <= figures["loop_lag_own_p99_ms"] <= figures["loop_lag_p99_ms"] <= figures["loop_lag_maximum_ms"]
    assert figures["restart_seconds"] > 0


async def test_lag_is_recorded_until_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the ticks since the last write: the measured time may be shorter than that between two writes."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from overhead.lag_log import read_lag, record_lag

    file, begin = tmp_path / "lag", time.monotonic()
    recording = asyncio.create_task(record_lag(file))
    await asyncio.sleep(0)
    await asyncio.sleep(0.1)  # after the first tick, whatever else happens
    recording.cancel()
    with pytest.raises(asyncio.CancelledError):
        await recording
    assert read_lag(file, begin, time.monotonic()).ticks > 0
