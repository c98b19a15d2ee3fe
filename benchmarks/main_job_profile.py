"""CPU time per rollout of the main job by process, and by part of the work.

    uv pip install py-spy
    uv run --extra cpu python benchmarks/main_job_profile.py --json benchmarks/results/main_job_profile.json

Two jobs run one after the other, about five minutes on two cores:

recipe   `rl @ configs/reverse_text/cpu.toml` with fewer steps: short rollouts, all processes
long     the real orchestrator and worker with replayed rollouts of 1,000 prompt tokens and 2,000 sampled ones, against
         a server without a model (see orchestrator_overhead.py), which is not counted

The CPU time of each process is read from /proc at the end of two steps, and divided by the rollouts between them. In
the same time py-spy samples the Python stacks of the processes. A sample belongs to the part of its innermost frame
that the table `PARTS` lists. The time of a process is divided among the parts in proportion to their samples; threads
that wait are left out. CPU milliseconds per rollout; `--json FILE` writes them by job, process and part.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orchestrator_overhead
import psutil
from rich.console import Console
from rich.table import Table
from watchfiles import watch

from prime_rl.liveness.heartbeat_monitor import read_heartbeats
from prime_rl.storage.paths import RunPaths

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "configs/reverse_text/cpu.toml"
RECIPE_BATCH = 1024
FIRST_STEP = 2
"""The measurement starts when this batch is complete: the first ones include imports and warm-up."""
SAMPLES_PER_SECOND = 50

PARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("output handling", ("vllm/v1/engine/output_processor.py", "vllm/v1/engine/detokenizer.py")),
    ("output handling", ("vllm/v1/engine/logprobs.py", "vllm/logprobs.py", "vllm/outputs.py")),
    ("IPC", ("vllm/v1/engine/core_client.py", "vllm/v1/serial_utils.py", "zmq/", "prime_rl/rollouts/workers/")),
    ("IPC", ("multiprocessing/", "prime_rl/rollouts/clients/generation_messages.py")),
    ("engine loop", ("vllm/v1/engine/core.py", "vllm/v1/core/", "vllm/v1/request.py", "prime_rl/inference/vllm/sal")),
    ("model", ("vllm/v1/worker/", "vllm/v1/sample/", "vllm/v1/executor/", "vllm/model_executor/", "torch/")),
    ("model", ("vllm/v1/attention/", "prime_rl/inference/worker/", "prime_rl/trainer/", "transformers/")),
    ("engine client", ("vllm/v1/", "vllm/sampling_params.py", "vllm/renderers/", "vllm/inputs/", "vllm/lora/")),
    ("engine client", ("prime_rl/inference/vllm/",)),
    ("request parsing", ("uvicorn/", "httptools/", "h11/", "starlette/requests.py", "fastapi/dependencies/")),
    ("request parsing", ("vllm/entrypoints/", "pydantic/", "prime_rl/inference/generation_stream.py")),
    ("routing", ("starlette/", "fastapi/", "prometheus_fastapi_instrumentator/", "prime_rl/inference/")),
    ("HTTP client", ("aiohttp/", "httpx/", "httpcore/", "prime_rl/rollouts/clients/")),
    ("rubric", ("verifiers/legacy/rubrics/", "verifiers/legacy/parsers/", "prime_rl/rollouts/verifiers/rubrics.py")),
    ("rubric", ("reverse_text/",)),  # it has no code of its own in a rollout except its reward functions
    ("recording", ("prime_rl/rollouts/recorder.py", "prime_rl/rollouts/rendering/")),
    ("recording", ("prime_rl/rollouts/verifiers/classic_client.py",)),
    ("environment", ("verifiers/", "prime_rl/rollouts/", "datasets/", "overhead_environment.py")),
    ("orchestration", ("prime_rl/orchestrator/", "prime_rl/storage/", "prime_rl/monitors/")),
    ("event loop", ("asyncio/", "uvloop/")),
)
"""Part of the work by the beginning of a frame's path; the first match counts."""

WAITING = ("threading.py", "selectors.py", "concurrent/futures/thread.py", "queue.py", "subprocess.py", "socket.py")
"""Files in whose functions a thread that does not compute is found."""


def part_of(stack: str) -> str | None:
    """Return the part that a sampled stack belongs to: of its innermost listed frame; None for a waiting thread.

    Args:
        stack: frames `function (path:line)` from the outermost to the innermost one, separated by semicolons.
    """
    paths = [frame.rpartition("(")[2].rpartition(":")[0] for frame in reversed(stack.split(";"))]
    if paths[0] in WAITING:
        return None
    for path in paths:
        for part, prefixes in PARTS:
            if path.startswith(prefixes):
                return part
    return "other"


def shares(lines: Iterable[str]) -> dict[str, float]:
    """Return the share of each part in the samples of one process, in py-spy's raw format."""
    counts: Counter[str] = Counter()
    for line in lines:
        stack, _, count = line.rpartition(" ")
        if (part := part_of(stack)) is not None:
            counts[part] += int(count)
    return {part: count / counts.total() for part, count in counts.most_common()}


def process_names(root: psutil.Process, paths: RunPaths) -> dict[int, str]:
    """Return the names of the processes of a run that are measured, by process id."""
    beats = {beat.pid: beat.name for beat in read_heartbeats(paths).values()}
    names = {}
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            command, parent = " ".join(process.cmdline()), process.parent()
            forked = parent is not None and "fork_server" in " ".join(parent.cmdline())
            if "fork_server" in command:
                names[process.pid] = "worker" if forked else ""
            elif "EngineCore" in command:
                names[process.pid] = "engine core"
            elif "orchestrator_overhead" in command:
                names[process.pid] = "orchestrator"
            else:
                name = beats.get(process.pid, "")
                names[process.pid] = {"inference": "API server", "trainer_0": "trainer"}.get(name, name)
    return {pid: name for pid, name in names.items() if name in PROCESSES}


PROCESSES = ("API server", "engine core", "worker", "orchestrator", "trainer")


def wait_for_batch(paths: RunPaths, step: int, run: "subprocess.Popen[str]") -> int:
    """Return the last complete batch as soon as that is `step` or a later one."""
    paths.rollouts_dir.mkdir(parents=True, exist_ok=True)
    for _ in watch(paths.rollouts_dir, yield_on_timeout=True, rust_timeout=250, debounce=20, step=10, recursive=False):
        if run.poll() is not None:
            raise RuntimeError(f"the run ended with {run.returncode} before batch {step}")
        names = (entry.name.removeprefix("step_") for entry in paths.rollouts_dir.iterdir())
        last = max((int(name) for name in names if name.isdigit()), default=-1)
        if last >= step:
            return last
    raise RuntimeError("interrupted")


def profile(paths: RunPaths, run: "subprocess.Popen[str]", batch: int, until: int) -> dict[str, Any]:
    """Return the CPU milliseconds per rollout of the processes of a run, between two batches."""
    begin = wait_for_batch(paths, FIRST_STEP, run)
    names = process_names(psutil.Process(run.pid), paths)
    processes = {pid: psutil.Process(pid) for pid in names}
    with tempfile.TemporaryDirectory() as directory:
        before = {pid: cpu_seconds(process) for pid, process in processes.items()}
        samplers = [sample(pid, Path(directory) / str(pid)) for pid in processes]
        end = wait_for_batch(paths, until, run)
        spent = {pid: cpu_seconds(process) - before[pid] for pid, process in processes.items()}
        for sampler in samplers:
            sampler.send_signal(signal.SIGINT)
        if any(sampler.wait() for sampler in samplers):
            raise RuntimeError("py-spy failed; it needs the right to trace the processes")
        lines = {pid: (Path(directory) / str(pid)).read_text().splitlines() for pid in processes}
    rollouts = (end - begin) * batch
    result: dict[str, Any] = {"rollouts": rollouts}
    for name in PROCESSES:
        if own := [pid for pid in names if names[pid] == name]:
            total = 1000 * sum(spent[pid] for pid in own) / rollouts
            parts = shares(line for pid in own for line in lines[pid])
            result[name] = {
                "cpu_ms": round(total, 4),
                "parts": {part: round(total * share, 4) for part, share in parts.items()},
            }
    return result


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def sample(pid: int, output: Path) -> "subprocess.Popen[bytes]":
    tool = shutil.which("py-spy", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if tool is None:
        raise SystemExit("py-spy is not installed; run `uv pip install py-spy`")
    command = [tool, "record", "--pid", str(pid), "--rate", str(SAMPLES_PER_SECOND), "--duration", "36000"]
    command += ["--format", "raw", "--output", str(output)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def profile_recipe(directory: Path, steps: int) -> dict[str, Any]:
    """Profile the CPU recipe."""
    paths = RunPaths(directory / "recipe")
    # Some batches more, so that every process still works when the last one is measured.
    command = [sys.executable, "-m", "prime_rl.entrypoints.rl", "@", str(RECIPE), "--max-steps", str(steps + 4)]
    command += ["--output-dir", str(paths.root), "--inference.server.port", str(free_port())]
    return run_profiled(command, paths, RECIPE_BATCH, steps, None)


def profile_long(directory: Path, _: int) -> dict[str, Any]:
    """Profile replayed long rollouts."""
    orchestrator_overhead.prepare(directory)
    shape = orchestrator_overhead.SHAPES["long"]
    with orchestrator_overhead.engine(directory, shape) as url:
        script = str(Path(__file__).with_name("orchestrator_overhead.py"))
        command = [sys.executable, script, "--player", "ours", "--shape", "long", "--url", url, "--dir", str(directory)]
        paths = RunPaths(directory / f"run_{shape.completion}")
        return run_profiled(command, paths, shape.batch, shape.steps - 2, {"PYTHONPATH": str(directory)})


def run_profiled(
    command: list[str], paths: RunPaths, batch: int, until: int, environment: Mapping[str, str] | None
) -> dict[str, Any]:
    log = paths.root.with_suffix(".log")
    with log.open("w") as output:
        run = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **(environment or {})}, stdout=output, stderr=output, text=True
        )
        try:
            return profile(paths, run, batch, until)
        except RuntimeError as error:
            raise SystemExit(f"{error}: {log.read_text()[-2000:]}") from error
        finally:
            run.terminate()
            run.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


JOBS = {"recipe": profile_recipe, "long": profile_long}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", choices=JOBS, action="append", help="only this job")
    parser.add_argument("--steps", type=int, default=12, help="last measured batch of the recipe")
    parser.add_argument("--machine", default=f"{os.cpu_count()} cores", help="description for the file")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    figures: dict[str, Any] = {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "machine": args.machine}
    for job in args.job or JOBS:
        with tempfile.TemporaryDirectory() as directory:
            figures[job] = JOBS[job](Path(directory), args.steps)
        table = Table("process", "CPU ms per rollout", "parts", title=f"{job}, {figures[job]['rollouts']} rollouts")
        for name in PROCESSES:
            if name in figures[job]:
                parts = figures[job][name]["parts"].items()
                text = ", ".join(f"{part} {value:.3f}" for part, value in parts)
                table.add_row(name, f"{figures[job][name]['cpu_ms']:.3f}", text)
        Console().print(table)
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
