"""CPU time of one HTTP request with aiohttp and with httpx, as in rollouts of servers without a token stream.

    uv run python benchmarks/http_clients.py --json benchmarks/results/http_clients.json

The server has no model (overhead/engine.py) and no latency. Each client in turn keeps 16, then 1,024 generation
requests in flight, over one connection each. The figures are medians of several rounds, and their ratio. Two
minutes on two cores. Only this process's CPU time counts, so that other load changes it little, and the ratio less.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
import httpx
import uvloop
from rollouts_in_flight import COMPLETION_TOKENS, PROMPT_TOKENS, engine, prepare

IN_FLIGHT = (16, 1024)
BODY = {"model": "m", "token_ids": [7] * PROMPT_TOKENS, "sampling_params": {"max_tokens": COMPLETION_TOKENS}}
_LIMIT_SECONDS = 600
Post = Callable[[], Awaitable[bytes]]


@asynccontextmanager
async def with_aiohttp(url: str, data: bytes) -> AsyncIterator[Post]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def post() -> bytes:
            async with session.post(url, data=data) as response:
                return await response.read()

        yield post


@asynccontextmanager
async def with_httpx(url: str, data: bytes) -> AsyncIterator[Post]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=None, trust_env=False) as client:

        async def post() -> bytes:
            return (await client.post(url, content=data)).content

        yield post


CLIENTS = {"aiohttp": with_aiohttp, "httpx": with_httpx}


async def cpu_ms(name: str, url: str, in_flight: int, seconds: float) -> float:
    """Return the CPU milliseconds of this process for one request, after all connections are open."""
    data, answered = json.dumps(BODY).encode(), 0
    async with CLIENTS[name](f"{url}/inference/v1/generate", data) as post:

        async def keep_posting() -> None:
            nonlocal answered
            while True:
                with suppress(aiohttp.ClientError, httpx.HTTPError):  # the server may refuse connections of a burst
                    assert (await post()).startswith(b'{"request_id"')
                    answered += 1

        async with asyncio.timeout(_LIMIT_SECONDS), asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(keep_posting()) for _ in range(in_flight)]
            while answered < 2 * in_flight:
                await asyncio.sleep(0.1)
            before, first = time.process_time(), answered
            await asyncio.sleep(seconds)
            result = 1000 * (time.process_time() - before) / (answered - first)
            for task in running:
                task.cancel()
    return result


async def measure(url: str, rounds: int, seconds: float) -> dict[str, float]:
    figures: dict[str, float] = {}
    for in_flight in IN_FLIGHT:
        measured: dict[str, list[float]] = {name: [] for name in CLIENTS}
        for _ in range(rounds):
            for name, values in measured.items():
                values.append(await cpu_ms(name, url, in_flight, seconds))
        medians = {name: statistics.median(values) for name, values in measured.items()}
        figures |= {f"{name}_{in_flight}_cpu_ms": round(median, 3) for name, median in medians.items()}
        figures[f"ratio_{in_flight}"] = round(medians["httpx"] / medians["aiohttp"], 1)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each round and client")
    parser.add_argument("--machine", default=f"{os.cpu_count()} cores", help="description for the file")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name))
        with engine(Path(name), 0.0) as (url, _):
            figures = uvloop.run(measure(url, args.rounds, args.seconds))
    print(json.dumps(figures, indent=1))
    if args.json is not None:
        fields = {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "machine": args.machine}
        args.json.write_text(json.dumps(fields | figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
