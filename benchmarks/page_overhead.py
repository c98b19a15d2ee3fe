"""Measure whether a run is slower while its page is open: `uv run --extra cpu python benchmarks/page_overhead.py`.

Runs the CPU recipe once with `--page`. A reader opens the page's event stream and its curves for WINDOW steps, closes
them for WINDOW steps, and so on. The result is the ratio of the median step times of both kinds of steps in this run.
The reader is no browser, which would draw on the cores of the trainer here.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from prime_rl.storage.paths import RunPaths

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.server import free_port

STEPS, WARM_UP, WINDOW = 64, 4, 6
RECIPE = "configs/reverse_text/cpu.toml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths, port = RunPaths(Path(folder) / "run"), free_port()
        options = ["--output-dir", str(paths.root), "--max-steps", str(STEPS), "--page.port", str(port)]
        command = [str(Path(sysconfig.get_path("scripts")) / "rl"), "@", RECIPE, *options]
        command += ["--inference.server.port", str(free_port())]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as run:
            opened = alternate(run, paths, f"http://127.0.0.1:{port}/api/runs/run")
        assert run.returncode == 0, f"rl exited with {run.returncode}"
        result = compare(metrics(paths), opened)
    machine = {"date": time.strftime("%Y-%m-%d"), "cpu": cpu_name(), "cpus": os.cpu_count()}
    text = json.dumps({**machine, **result}, indent=1)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")


def cpu_name() -> str:
    """The model of the processor, as Linux names it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def alternate(run: subprocess.Popen[bytes], paths: RunPaths, address: str) -> list[tuple[float, float]]:
    """Open and close the page in turn until the run ends; return the times between which it was open."""
    opened = []
    while run.poll() is None:
        done = len(metrics(paths))
        if done >= WARM_UP and (done - WARM_UP) // WINDOW % 2:
            begin = time.time()
            with suppress(httpx.TransportError), reader(address):  # the run may end in this moment
                while run.poll() is None and (len(metrics(paths)) - WARM_UP) // WINDOW % 2:
                    time.sleep(0.1)
            opened.append((begin, time.time()))
        time.sleep(0.1)
    return opened


@contextmanager
def reader(address: str) -> Iterator[None]:
    """Ask for what the browser asks for, and follow the event stream in a thread."""
    closed = threading.Event()

    def follow(client: httpx.Client, cursor: str) -> None:
        try:
            with client.stream("GET", f"{address}/stream", params={"cursor": cursor}) as stream:
                for _ in stream.iter_lines():
                    if closed.is_set():
                        return
        except httpx.TransportError:  # the run and its page have ended
            return

    with httpx.Client(timeout=60) as client:
        overview = client.get(f"{address}/overview").json()
        client.get(f"{address}/series", params={"metric": [one["name"] for one in overview["metrics"]]})
        thread = threading.Thread(target=follow, args=(client, overview["cursor"]))
        thread.start()
        try:
            yield
        finally:
            closed.set()
            thread.join()


def metrics(paths: RunPaths) -> list[dict[str, Any]]:
    """The finished steps of the trainer."""
    file = paths.metrics("trainer")
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def compare(rows: list[dict[str, Any]], opened: list[tuple[float, float]]) -> dict[str, Any]:
    """Step times while the page was open, and while it was closed; steps across a change count for neither."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for row in rows[WARM_UP:]:
        begin, end = row["time"] - row["time/step"], row["time"]
        if any(first <= begin and end <= last for first, last in opened):
            seconds[True].append(row["time/step"])
        elif all(end <= first or last <= begin for first, last in opened):
            seconds[False].append(row["time/step"])
    medians = {is_open: statistics.median(values) for is_open, values in seconds.items()}
    return {
        "ratio": round(medians[True] / medians[False], 3),
        "open_seconds": round(medians[True], 3), "closed_seconds": round(medians[False], 3),
        "open_steps": len(seconds[True]), "closed_steps": len(seconds[False]),
        "load_average": [round(value, 1) for value in os.getloadavg()],
    }  # fmt: skip


if __name__ == "__main__":
    main()
