"""An agent of several turns with a client of little cost, for `environment_worker.py --agent`.

The worker calls `solve`, which asks this program, in a process of its own, to run the session, so that the worker's CPU
time contains no agent. All sessions of a round wait for each other after their first turn; then the size of the worker
is written to a file.

    python benchmarks/overhead/agent.py SOCKET
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import uvloop

SESSIONS, TURNS = int(os.environ.get("AGENT_SESSIONS", 1)), int(os.environ.get("AGENT_TURNS", 1))
_state: dict[str, Any] = {"open": 0, "event": None, "client": None}


async def solve(messages: list[dict[str, str]], model: str, base_url: str, api_key: str) -> float:
    """Run a session in the other process."""
    reader, writer = await asyncio.open_unix_connection(os.environ["AGENT_SOCKET"])
    for line in ((messages, model, base_url, api_key), os.getpid()):
        writer.write(json.dumps(line).encode() + b"\n")
    await reader.readline()
    writer.close()
    return 1.0


async def _run_session(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    messages, model, base_url, api_key = json.loads(await reader.readline())
    worker = json.loads(await reader.readline())
    if _state["client"] is None:
        # The server closes connections that are unused for 75 s.
        _state["client"] = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30))
        _state["event"] = asyncio.Event()
    for turn in range(TURNS):
        request = {"model": model, "messages": messages}
        headers = {"Authorization": f"Bearer {api_key}"}
        async with _state["client"].post(f"{base_url}/chat/completions", json=request, headers=headers) as response:
            reply = (await response.json())["choices"][0]["message"]
        messages = [*messages, reply, {"role": "user", "content": "Go on."}]
        if turn == 0:
            await _meet(worker)
    writer.write(b"\n")
    await writer.drain()
    writer.close()


async def _meet(worker: int) -> None:
    _state["open"] += 1
    event = _state["event"]
    if _state["open"] % SESSIONS:
        await event.wait()
        return
    Path(os.environ["AGENT_MEMORY"]).write_text(str(psutil.Process(worker).memory_full_info().uss))
    _state["event"] = asyncio.Event()
    event.set()


async def _serve(path: str) -> None:
    async with await asyncio.start_unix_server(_run_session, path, backlog=SESSIONS) as server:
        await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1]))
