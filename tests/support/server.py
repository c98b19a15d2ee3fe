"""A real inference server as a separate process, for integration tests."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom
from typing import Any

import httpx

from tests.support.nursery import Forked, start_forked

INFERENCE = "prime_rl.entrypoints.inference"
START_TIMEOUT_SECONDS = 400  # for a heavily loaded machine; 15 s on an idle one
REQUEST_TIMEOUT_SECONDS = 400  # of a long completion or a switch, on a loaded machine
STOP_TIMEOUT_SECONDS = 45  # 2 s on an idle machine; less than the 60 s after which a silent node counts as dead
_PORTS = 16384, 32768  # below the range from which Linux takes any free port


@dataclass
class Server:
    """A running server.

    Attributes:
        process: the API process; its engine is a child.
        url: URL of the server.
        log: output of the server and its engine.
        started_seconds: seconds from the start of the process to its first healthy response.
        client: HTTP client of the server.
    """

    process: "subprocess.Popen[bytes] | Forked"
    url: str
    model: str
    log: Path
    started_seconds: float
    client: httpx.Client

    def post(self, path: str, **body: Any) -> httpx.Response:
        """Post a JSON body."""
        return self.client.post(path, json=body)

    def policy(self) -> dict[str, Any]:
        """Return the loaded policy."""
        return self.client.get("/policy").raise_for_status().json()

    def update(self, weight_dir: Path, step: int, **body: Any) -> dict[str, Any]:
        """Switch to a published version; it must succeed."""
        return _json(self.post("/update_weights", weight_dir=str(weight_dir), step=step, **body))

    def reload(self, **body: Any) -> dict[str, Any]:
        """Reload the base model; it must succeed."""
        return _json(self.post("/reload_weights", **body))

    def generate(self, token_ids: Sequence[int], **sampling: Any) -> dict[str, Any]:
        """Sample one completion (greedy by default) and return its choice."""
        return _json(self.post("/inference/v1/generate", **self.request(token_ids, **sampling)))["choices"][0]

    def request(self, token_ids: Sequence[int], **sampling: Any) -> dict[str, Any]:
        """The body of a token-in, token-out request."""
        parameters = {"temperature": 0.0, "max_tokens": 8, "logprobs": 0, "ignore_eos": True, **sampling}
        return {"model": self.model, "token_ids": list(token_ids), "sampling_params": parameters}

    def engine_pids(self) -> list[int]:
        """The children of the API process."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in children.split()]


@contextmanager
def inference_server(
    model: Path,
    log: Path,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    port: int | None = None,
    module: str | None = None,
) -> Iterator[Server]:
    """Start `uv run inference` on a free port, wait until it is healthy, and stop it at the end.

    Args:
        model: the base model's directory.
        log: file for its output.
        arguments: further arguments of the command line, such as `--vllm.max_num_seqs 16`.
        environment: further environment variables; with them (or none, {}) the command is started as a user does,
            without them it is forked from a process that has imported vLLM (`nursery`).
        port: where to listen; None takes a free one.
        module: what is run instead, from the repository's root.

    Raises:
        AssertionError: it ended or was not healthy in time; carries the end of its log.
    """
    port = port or free_port()
    arguments = ["--model.name", str(model), "--server.port", str(port), *arguments]
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    env |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    start = time.monotonic()
    process: subprocess.Popen[bytes] | Forked
    if environment is None and module is None:
        process = start_forked(arguments, env, log)
    else:
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", module or INFERENCE, *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env | dict(environment or {}),
            )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_healthy(process, url, log)
        with httpx.Client(
            base_url=url, timeout=REQUEST_TIMEOUT_SECONDS, limits=httpx.Limits(max_connections=None)
        ) as client:
            yield Server(process, url, str(model), log, time.monotonic() - start, client)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            assert process.wait(STOP_TIMEOUT_SECONDS) == 0, (
                f"the server did not stop cleanly:\n{log.read_text()[-4000:]}"
            )
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def free_port() -> int:
    """Return a free port that the kernel gives to no connection, and to no process that asks for any port.

    It is used seconds later, when a server has done its imports, beside tests that open many ports.
    """
    random = SystemRandom()  # tests seed the other generator, and the workers of a run would get equal ports
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", random.randrange(*_PORTS)))
            return probe.getsockname()[1]


def _wait_healthy(process: subprocess.Popen[bytes] | Forked, url: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the server exited with {process.returncode}:\n{log.read_text()[-4000:]}"
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)  # there is no event for an open port
    raise AssertionError(f"the server was not healthy after {START_TIMEOUT_SECONDS} s:\n{log.read_text()[-4000:]}")


def _json(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, f"{response.status_code}: {response.text}"
    return response.json()
