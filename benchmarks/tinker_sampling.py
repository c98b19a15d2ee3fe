"""Latency of sampling from a Tinker server while another client trains, over that without: `--json FILE`.

    uv run --extra cpu python benchmarks/tinker_sampling.py --json benchmarks/results/tinker_sampling.json

Phases with and without training alternate, so that other load on the machine reaches both. Goal: a ratio of the
medians of at most 1.5 on two cores.
"""

import argparse
import json
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tinker
from tinker import types

NAME = "Qwen/Qwen3-8B"
CONFIG = "configs/tinker/cpu.toml"
START_SECONDS = 600.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="phases of each kind")
    parser.add_argument("--requests", type=int, default=25, help="requests of a phase, one after another")
    parser.add_argument("--tokens", type=int, default=32, help="of a sample")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    arguments = parser.parse_args()
    with socket.socket() as one, socket.socket() as other, tempfile.TemporaryDirectory() as folder:
        for probe in (one, other):
            probe.bind(("127.0.0.1", 0))
        port, inner = (str(probe.getsockname()[1]) for probe in (one, other))
        one.close()
        other.close()
        command = [sys.executable, "-m", "prime_rl_tinker.tinker_server", "@", CONFIG, "--port", port]
        server = subprocess.Popen([*command, "--inference.server.port", inner, "--output-dir", folder])
        try:
            figures = measure(f"http://127.0.0.1:{port}", arguments)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait()
    figures |= {"date": time.strftime("%Y-%m-%d"), "command": " ".join(sys.argv)}
    print(json.dumps(figures, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


def connect(url: str) -> tinker.ServiceClient:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            socket.create_connection((url[7:].split(":")[0], int(url.rpartition(":")[2]))).close()
            return tinker.ServiceClient(base_url=url, api_key="tml-local")
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def measure(url: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the medians in milliseconds, with and without training, and their ratio."""
    service = connect(url)
    sampler = service.create_lora_training_client(NAME, rank=8).save_weights_and_get_sampling_client()
    training = connect(url).create_lora_training_client(NAME, rank=8)
    params = types.SamplingParams(max_tokens=arguments.tokens, stop=[])
    seconds: dict[bool, list[float]] = {False: [], True: []}
    num_steps, pool = 0, ThreadPoolExecutor()
    for number in range(2 * arguments.rounds + 1):
        trains, ended, taken = number % 2 == 0, threading.Event(), []
        if trains:
            trainer = pool.submit(train, training, ended)
        for _ in range(arguments.requests):
            start = time.perf_counter()
            sampler.sample(types.ModelInput.from_ints([5, 6, 7, 8] * 8), 1, params).result()
            taken.append(time.perf_counter() - start)
        ended.set()
        num_steps += trainer.result() if trains else 0
        if number:  # the first phase warms up
            seconds[trains] += taken
    alone, beside = (1000 * statistics.median(seconds[key]) for key in (False, True))
    return {"p50_ms": alone, "p50_ms_while_training": beside, "ratio": beside / alone, "num_steps": num_steps}


def train(client: tinker.TrainingClient, ended: threading.Event) -> int:
    """Take steps of 16 samples of 64 tokens until `ended`; return their number."""
    tokens, num_steps = [5, 6, 7, 8] * 16, 0
    datum = types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs={"target_tokens": tokens})
    while not ended.is_set():
        client.forward_backward([datum] * 16, "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=1e-4)).result()
        num_steps += 1
    return num_steps


if __name__ == "__main__":
    main()
