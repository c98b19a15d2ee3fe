"""CPU time of a short rollout's model call, by HTTP and by token stream.

    uv run --extra cpu python benchmarks/generation_stream.py --json FILE

server    the API server's process, without the engine
client    this process, which has the worker's client only

Both ways alternate on one server, so that other load of the machine affects both. Milliseconds per rollout.
"""

import argparse
import asyncio
import json
import math
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from serving import inference_server

from prime_rl.rollouts.clients.inference_client import InferenceClient

MODEL = Path(__file__).resolve().parents[1] / "configs/reverse_text/model"
GROUP = 8
GROUPS_IN_FLIGHT = 32
WAYS = ("http", "stream")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--groups", type=int, default=250, help="groups of 8 rollouts per round")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "server.log"
        with inference_server(MODEL, log, ["--log.level", "warning"]) as server:
            pid = server._process.pid
            rounds = asyncio.run(measure(server.url, server.model, pid, arguments.rounds, arguments.groups))
    medians = {
        way: {part: round(statistics.median(one[way][part] for one in rounds), 3) for part in ("server", "client")}
        for way in WAYS
    }
    machine = f"{time.strftime('%Y-%m-%d')}, two shared cores, load {os.getloadavg()[0]:.0f} of {os.cpu_count()} cores"
    result = {"machine": machine, "milliseconds_per_rollout": medians, "rounds": rounds}
    print(json.dumps({key: result[key] for key in ("machine", "milliseconds_per_rollout")}, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


async def measure(url: str, model: str, pid: int, num_rounds: int, num_groups: int) -> list[dict[str, Any]]:
    """Return milliseconds of CPU time per rollout of each round, by way and process."""
    server = psutil.Process(pid)
    async with InferenceClient(url, model, "") as by_stream, InferenceClient(url, model, "") as by_http:
        by_http._stream.http_until = math.inf
        clients = {"http": by_http, "stream": by_stream}
        for client in clients.values():
            await sample(client, GROUPS_IN_FLIGHT, 0)
        assert by_stream._stream.is_offered
        rounds = []
        for number in range(num_rounds):
            found = {}
            for way, client in clients.items():
                before, own = cpu_seconds(server), time.process_time()
                await sample(client, num_groups, number + 1)
                parts = {"server": cpu_seconds(server) - before, "client": time.process_time() - own}
                found[way] = {part: round(1000 * s / num_groups / GROUP, 4) for part, s in parts.items()}
            rounds.append(found)
        return rounds


async def sample(client: InferenceClient, num_groups: int, seed: int) -> None:
    """Sample groups of rollouts of 2 to 6 tokens."""
    rng = np.random.default_rng(seed)
    slots = asyncio.Semaphore(GROUPS_IN_FLIGHT)

    async def group(number: int) -> None:
        prompt = rng.integers(6, 90, rng.integers(12, 40)).tolist()
        length = int(rng.integers(2, 7))
        sampling = {"temperature": 1.0, "max_tokens": length, "min_tokens": length}
        async with slots:
            await asyncio.gather(*(client.generate(prompt, sampling | {"seed": 8 * number + i}) for i in range(GROUP)))

    await asyncio.gather(*map(group, range(num_groups)))


def cpu_seconds(process: psutil.Process) -> float:
    """CPU seconds of one process, without its children."""
    times = process.cpu_times()
    return times.user + times.system


if __name__ == "__main__":
    main()
