"""Measure the page with a large run: first view, update, memory: `uv run python benchmarks/page_scale.py`.

Writes a synthetic run of 10,000 steps, 50 metrics and 100,000 rollouts, or takes a directory of
benchmarks/synthetic_run.py. Needs Debian's chromium. Times are those of this machine; CPU seconds of the page's process
are given beside them. An update is the work of the process for one step, and drawing it; `with_interval` adds the pause
of the event stream. The process reads a run while it starts, so the first view is measured from the printed address on.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from synthetic_run import GROUP_SIZE, metric_rows, write_run

from prime_rl.storage.paths import RunPaths

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.browser import open_browser, wait_until

STEPS, ROLLOUTS = 10_000, 100_000
NUM_UPDATES = 10
_RECEIVED = "step => document.querySelector('.chart .plot').chart.plot.data[0].at(-1) >= step"
_REDRAW = """() => {
  const charts = [...document.querySelectorAll('.chart .plot')].map(node => node.chart).filter(chart => chart.plot);
  const begin = performance.now();
  charts.forEach(chart => chart.draw());
  return performance.now() - begin;
}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, nargs="?")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = arguments.directory
        if root is None:
            root = write_run(Path(folder) / "run", STEPS, groups_per_step=-(-ROLLOUTS // STEPS // GROUP_SIZE)).root
        with open_browser() as browser, page_process(root) as (process, address, seconds):
            tab = browser.new_page(viewport={"width": 1400, "height": 900})
            result = {"start_seconds": seconds, **measure(RunPaths(root), tab, address, process)}
        print(
            json.dumps(
                {
                    "date": time.strftime("%Y-%m-%d"),
                    "cpus": os.cpu_count(),
                    "load_average": round(os.getloadavg()[0], 1),
                    **result,
                },
                indent=1,
            )
        )


@contextmanager
def page_process(root: Path) -> Iterator[tuple[psutil.Process, str, float]]:
    """Start the page; yield its process, its address, and the seconds until it printed the address."""
    command = [sys.executable, "-m", "prime_rl_page", str(root), "--port", "0"]
    begin = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[1]
        yield psutil.Process(process.pid), address, round(time.monotonic() - begin, 2)
        process.terminate()


def measure(paths: RunPaths, tab: Any, address: str, process: psutil.Process) -> dict[str, float]:
    """Seconds until the first chart is drawn, CPU seconds per update, and memory of the page's process."""
    result = {}
    begin, used = time.monotonic(), _cpu_seconds(process)
    _open(tab, address)
    result["first_view_seconds"] = round(time.monotonic() - begin, 2)
    result["first_view_cpu_seconds"] = round(_cpu_seconds(process) - used, 2)
    begin = time.monotonic()
    _open(tab, address, reload=True)
    result["second_view_seconds"] = round(time.monotonic() - begin, 2)
    last = json.loads(paths.metrics("trainer").read_bytes().splitlines()[-1])["step"]
    tab.goto(f"{address}/#view=rollouts")
    tab.locator("tbody tr").first.wait_for()
    _open(tab, address)
    wait_until(tab, _RECEIVED, last)
    used, delays = _cpu_seconds(process), []
    for step in range(last + 1, last + 1 + NUM_UPDATES):
        for role, row in zip(("orchestrator", "trainer"), metric_rows(step, 0.9, random.Random(step)), strict=True):
            with paths.metrics(role).open("a") as file:
                file.write(json.dumps(row) + "\n")
        begin = time.monotonic()
        wait_until(tab, _RECEIVED, step)
        delays.append(time.monotonic() - begin)
    result["update_cpu_milliseconds"] = round(1000 * (_cpu_seconds(process) - used) / NUM_UPDATES)
    result["update_draw_milliseconds"] = round(tab.evaluate(_REDRAW))
    result["update_seconds_with_interval"] = round(sorted(delays)[NUM_UPDATES // 2], 2)
    result["memory_mb"] = round(process.memory_info().rss / 1e6)
    return result


def _open(tab: Any, address: str, reload: bool = False) -> None:
    """Open the overview and wait for its first chart."""
    if reload:
        tab.reload()
    else:
        tab.goto(address)
    tab.locator(".chart canvas").first.wait_for()


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


if __name__ == "__main__":
    main()
