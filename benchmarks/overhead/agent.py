"""An agent of several turns with a client of little cost, for `environment_worker.py --agent`.

All sessions of a round wait for each other after their first turn; then the size of this process is written to a file.
"""

import asyncio
import os
from pathlib import Path
from typing import Any

import aiohttp
import psutil

SESSIONS, TURNS = int(os.environ.get("AGENT_SESSIONS", 1)), int(os.environ.get("AGENT_TURNS", 1))
_state: dict[str, Any] = {"open": 0, "event": None, "client": None}


async def solve(messages: list[dict[str, str]], model: str, base_url: str, api_key: str) -> float:
    """Call the model TURNS times."""
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
            await _meet()
    return 1.0


async def _meet() -> None:
    _state["open"] += 1
    event = _state["event"]
    if _state["open"] % SESSIONS:
        await event.wait()
        return
    Path(os.environ["AGENT_MEMORY"]).write_text(str(psutil.Process().memory_full_info().uss))
    _state["event"] = asyncio.Event()
    event.set()
