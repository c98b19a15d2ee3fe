"""A real inference server for benchmarks, and requests that keep it sampling."""

import asyncio
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import httpx

_START_SECONDS, _SWITCH_SECONDS, _STOP_SECONDS = 600, 600, 60
_GENERATED = "vllm:generation_tokens_total"


@contextmanager
def inference_server(model: Path, log: Path, arguments: Sequence[str] = ()) -> Iterator["Server"]:
    """Run `inference` on a free port while the context lasts.

    Raises:
        RuntimeError: the server exited or did not start in time.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "prime_rl.entrypoints.inference", "--model.name", str(model)]
    start = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--server.port", str(port), *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
    server = Server(f"http://127.0.0.1:{port}", str(model), process, log)
    try:
        server.wait_until_healthy()
        server.started_seconds = time.monotonic() - start
        yield server
    except BaseException:
        print(f"end of the server's log:\n{log.read_text()[-4000:]}", file=sys.stderr)
        raise
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Server:
    """A running server.

    Attributes:
        started_seconds: seconds until it was ready.
    """

    started_seconds = 0.0

    def __init__(self, url: str, model: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self.url, self.model = url, model
        self._process, self._log = process, log

    def post(self, route: str, **body: Any) -> dict[str, Any]:
        """Post JSON and return the response's JSON.

        Raises:
            RuntimeError: the server returned an error.
        """
        answer = httpx.post(f"{self.url}{route}", json=body, timeout=_SWITCH_SECONDS, trust_env=False)
        if answer.is_error:
            raise RuntimeError(f"{route}: {answer.status_code} {answer.text}")
        found: dict[str, Any] = answer.json()
        return found

    def generated_tokens(self) -> float:
        """Return the number of sampled tokens since its start."""
        text = httpx.get(f"{self.url}/metrics", timeout=60, trust_env=False).text
        return sum(float(value) for value in re.findall(rf"^{_GENERATED}(?:{{.*}})? (\S+)$", text, re.MULTILINE))

    def wait_until_healthy(self) -> None:
        """Wait until the server is ready.

        Raises:
            RuntimeError: it is not ready in time.
        """
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            with suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", timeout=5, trust_env=False).is_success:
                    return
            time.sleep(0.1)  # there is no event for an open port
        raise RuntimeError(f"the server did not start; see {self._log}")


class Sampling:
    """Keeps completions in flight while the context lasts, and cancels them at its end."""

    def __init__(self, server: Server, vocabulary: int, in_flight: int = 4, max_tokens: int = 400) -> None:
        self._server = server
        self._in_flight, self._max_tokens = in_flight, max_tokens
        self._vocabulary = vocabulary
        self._thread = threading.Thread(target=self._run, name="sampling")
        self._started = threading.Event()
        self._error: BaseException | None = None

    def __enter__(self) -> "Sampling":
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(self, *error: Any) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        if self._error is not None and error[0] is None:
            raise self._error

    def rate(self, seconds: float) -> float:
        """Return the sampled tokens per second over some seconds."""
        start, tokens = time.perf_counter(), self._server.generated_tokens()
        time.sleep(seconds)
        return (self._server.generated_tokens() - tokens) / (time.perf_counter() - start)

    def wait_for_tokens(self, count: int) -> None:
        """Wait until this many more tokens are sampled."""
        start, deadline = self._server.generated_tokens(), time.monotonic() + _START_SECONDS
        while self._server.generated_tokens() < start + count:
            if self._error is not None or time.monotonic() > deadline:
                raise RuntimeError("the server samples no tokens") from self._error
            time.sleep(0.1)

    def _run(self) -> None:
        try:
            asyncio.run(self._sample())
        except Exception as error:  # noqa: BLE001  raised again where the context ends
            self._error = error

    async def _sample(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._started.set()
        async with aiohttp.ClientSession(self._server.url, timeout=aiohttp.ClientTimeout(None)) as session:
            tasks = [asyncio.create_task(self._ask(session, seed)) for seed in range(self._in_flight)]
            stop = asyncio.create_task(self._stop.wait())
            done, _ = await asyncio.wait([*tasks, stop], return_when=asyncio.FIRST_COMPLETED)
            for task in (*tasks, stop):
                task.cancel()
            await asyncio.gather(*tasks, stop, return_exceptions=True)
            for task in done - {stop}:
                task.result()

    async def _ask(self, session: aiohttp.ClientSession, seed: int) -> None:
        numbers = random.Random(seed)
        while True:
            prompt = [numbers.randrange(1, self._vocabulary) for _ in range(32)]
            sampling = {"temperature": 1.0, "max_tokens": self._max_tokens, "logprobs": 0, "ignore_eos": True}
            body = {"model": self._server.model, "token_ids": prompt, "sampling_params": sampling}
            async with session.post("/inference/v1/generate", json=body) as answer:
                answer.raise_for_status()
                await answer.read()
