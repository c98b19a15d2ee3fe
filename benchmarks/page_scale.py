"""Measure the page with a large run: first view, update, memory: `uv run python benchmarks/page_scale.py`.

Writes a synthetic run of 10,000 steps, 50 metrics and 100,000 rollouts, or takes a directory of
benchmarks/synthetic_run.py. Needs Debian's chromium. Times are those of this machine; CPU seconds of the page's process
are given beside them.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from synthetic_run import GROUP_SIZE, metric_rows, write_run

from prime_rl.storage.paths import RunPaths

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.browser import open_browser, wait_until

STEPS, ROLLOUTS = 10_000, 100_000
NUM_UPDATES = 10
_RECEIVED = "step => document.querySelector('.chart .plot').chart.plot.data[0].at(-1) >= step"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, nargs="?")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = arguments.directory
        if root is None:
            root = write_run(Path(folder) / "run", STEPS, groups_per_step=-(-ROLLOUTS // STEPS // GROUP_SIZE)).root
        command = [sys.executable, "-m", "prime_rl.entrypoints.page", str(root), "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            address = process.stdout.readline().split()[1]
            print(json.dumps(measure(RunPaths(root), address, psutil.Process(process.pid)), indent=1))
            process.terminate()


def measure(paths: RunPaths, address: str, process: psutil.Process) -> dict[str, float]:
    """Seconds until the first chart is drawn, CPU seconds per update, and memory of the page's process."""
    result = {}
    with open_browser() as browser:
        tab = browser.new_page(viewport={"width": 1400, "height": 900})
        begin, used = time.monotonic(), _cpu_seconds(process)
        tab.goto(address)
        tab.locator(".chart canvas").first.wait_for()
        result["first_view_seconds"] = round(time.monotonic() - begin, 2)
        result["first_view_cpu_seconds"] = round(_cpu_seconds(process) - used, 2)
        tab.reload()
        begin = time.monotonic()
        tab.reload()
        tab.locator(".chart canvas").first.wait_for()
        result["second_view_seconds"] = round(time.monotonic() - begin, 2)
        last = json.loads(paths.metrics("trainer").read_bytes().splitlines()[-1])["step"]
        tab.goto(f"{address}/#view=rollouts")
        tab.locator("tbody tr").first.wait_for()
        tab.goto(address)
        tab.locator(".chart canvas").first.wait_for()
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
        result["update_seconds_with_interval"] = round(sorted(delays)[NUM_UPDATES // 2], 2)
    result["memory_mb"] = round(process.memory_info().rss / 1e6)
    return result


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


if __name__ == "__main__":
    main()
