"""The server as a process: start, access, and end."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from prime_rl.liveness.heartbeat_monitor import read_heartbeats
from prime_rl.rollouts.clients.inference_client import InferenceClient, InferenceError, InferenceServerLost
from prime_rl.storage.paths import RunPaths
from tests.integration.inference.conftest import (
    METRIC_TIMEOUT_SECONDS,
    gap,
    logprobs_of,
    wait_for_metric,
)
from tests.support.server import START_TIMEOUT_SECONDS, STOP_TIMEOUT_SECONDS, Server, free_port, inference_server
from tests.support.tiny_model import make_tiny_model, publish_weights

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(600)]

SECRET = "k-51c0ffee"
KEY = {"Authorization": f"Bearer {SECRET}"}
STREAMED = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("untied")
    base = make_tiny_model(root / "base", tie_word_embeddings=False, seed=0)
    other = make_tiny_model(root / "other", tie_word_embeddings=False, seed=1)
    return base, publish_weights(root / "run", other, 1)


@pytest.fixture(scope="module")
def locked(models, tmp_path_factory):
    """A server of an untied model with an API key, on a machine without a C++ compiler."""
    root = tmp_path_factory.mktemp("locked")
    environment = {"INFERENCE_SERVER_API_KEY": SECRET, "CXX": "none", "TORCHINDUCTOR_CACHE_DIR": str(root / "cache")}
    directory = ["--output-dir", str(root / "run")]
    with inference_server(models[0], root / "server.log", directory, environment=environment) as server:
        yield server


def log_file(server: Server) -> Path:
    """The log of a server with `--output-dir run`."""
    [path] = (server.log.parent / "run" / "logs").iterdir()
    return path


def test_log_file_has_the_lines_of_engines(locked):
    path = log_file(locked)
    assert path.name == f"inference_{socket.gethostname()}_{httpx.URL(locked.url).port}.log"
    lines = path.read_text().splitlines()
    assert sum("Resolved architecture" in line for line in lines) == 1, "of the server"
    [ready] = [line for line in lines if "init engine" in line]
    assert re.match(r"\d\d:\d\d:\d\d INFO    \[EngineCore\] ", ready)
    assert locked.log.read_text().count("init engine") == 1


def test_engine_is_forked_from_the_server_on_a_cpu(locked):
    """Each process that imports torch and vLLM again takes another eleven seconds of CPU."""
    [engine] = locked.engine_pids()
    server = psutil.Process(locked.process.pid)
    assert server.children(recursive=True) == [psutil.Process(engine)], "the engine runs its worker itself"
    assert first_address(engine) == first_address(server.pid), "spawned: it has an address space of its own"
    ended = server.cpu_times()
    assert ended.children_user + ended.children_system < 4, "a process that has ended inspected the model's class"


def test_engine_reports_the_phases_of_its_start(locked):
    run = RunPaths(locked.log.parent / "run")
    [server] = read_heartbeats(run)

    def phases(process: str) -> list[str]:
        lane = run.timeline_dir / f"{process}.jsonl"
        lines = lane.read_text().splitlines(keepends=True) if lane.exists() else []
        return [json.loads(line)["name"] for line in lines if line.endswith("\n")]

    deadline = time.monotonic() + METRIC_TIMEOUT_SECONDS  # lanes are written in the background, once a second
    engine = f"engine_{server}_0"
    while len(phases(server)) < 2 or len(phases(engine)) < 3:
        assert time.monotonic() < deadline, f"the lanes have only {phases(server)} and {phases(engine)}"
        time.sleep(0.05)
    assert phases(engine) == ["import vLLM", "load the model", "compile and measure the KV cache"]
    assert phases(server)[:2] == ["import vLLM", "start engines"]


def first_address(pid: int) -> str:
    """Return where the first mapping of a process begins; random for each program, kept by a fork."""
    return Path(f"/proc/{pid}/maps").read_text().split("-", 1)[0]


async def test_routes_and_token_streams_require_the_key(locked):
    for path in ("/update_weights", "/inference/v1/generate", "/v1/completions", "/tokenize"):
        assert locked.post(path).status_code == 401
        assert locked.client.post(path, json={}, headers={"Authorization": "Bearer other"}).status_code == 401
    assert [locked.client.get(path).status_code for path in ("/policy", "/metrics", "/health")] == [401, 401, 200]
    assert locked.client.get("/policy", headers=KEY).json()["step"] == 0
    for key in (None, "other"):
        async with InferenceClient(locked.url, locked.model, "", key) as client:
            with pytest.raises(InferenceError, match="needs its API key as a bearer token") as caught:
                await client.generate([1, 2, 3], STREAMED)
            assert caught.value.status == 401
    async with InferenceClient(locked.url, locked.model, "", SECRET) as client:
        assert len((await client.generate([1, 2, 3], STREAMED)).token_ids) == 4
        assert client._stream.is_offered


def test_server_does_not_log_the_key(locked):
    assert SECRET not in locked.log.read_text()
    engine = locked.engine_pids()
    assert not any(SECRET in " ".join(psutil.Process(pid).cmdline()) for pid in (locked.process.pid, *engine))


def test_seeded_requests_with_long_prompts_are_reproducible(locked):
    """More prompt tokens than one step of the engine: its CPU generator does not support chunked prompts."""
    locked.client.headers.update(KEY)
    prompts = [[3 + (i * j) % 90 for j in range(400)] for i in range(24)]

    def ask(number: int) -> list[int]:
        return locked.generate(prompts[number], temperature=1.0, seed=number)["token_ids"]

    with ThreadPoolExecutor(len(prompts)) as threads:
        first = list(threads.map(ask, range(len(prompts))))
        assert list(threads.map(ask, range(len(prompts)))) == first


def test_switch_updates_an_untied_head(locked, models, reference):
    locked.client.headers.update(KEY)
    locked.update(models[1], 1)
    prompt = [1, 4, 6, *range(70, 90)]
    choice = locked.generate(prompt, temperature=1.0, seed=0, max_tokens=64)
    assert gap(logprobs_of(choice), reference.logprobs(models[1], prompt, choice["token_ids"])) <= 1e-4
    assert gap(logprobs_of(choice), reference.logprobs(models[0], prompt, choice["token_ids"])) > 0.5


async def test_death_of_the_engine_ends_the_server(locked):
    """Requests in flight fail and the process exits with an error within seconds (I7).

    Must be the last test with this server.
    """
    locked.client.headers.update(KEY)
    request = locked.request([1, 2, 3], max_tokens=1900)
    sent = asyncio.create_task(asyncio.to_thread(locked.client.post, "/inference/v1/generate", json=request))
    async with InferenceClient(locked.url, locked.model, "", SECRET) as client:
        streamed = asyncio.create_task(client.generate([1, 2, 3], STREAMED | {"max_tokens": 1900}))
        await asyncio.to_thread(wait_for_metric, locked, "vllm:num_requests_running", 1)
        [engine] = locked.engine_pids()
        os.kill(engine, signal.SIGKILL)
        assert await asyncio.to_thread(locked.process.wait, STOP_TIMEOUT_SECONDS) == 1
        assert "error: EngineCore (pid" in locked.log.read_text()
        assert "EngineDeadError" in log_file(locked).read_text()
        [result, error] = await asyncio.gather(sent, streamed, return_exceptions=True)
    assert isinstance(result, Exception) or result.status_code == 500
    assert isinstance(error, InferenceServerLost | InferenceError)


def _fails(*arguments: str, imports_vllm: bool) -> str:
    """Run the command, which must exit with code 2 and one line of error; returns the line."""
    command = [sys.executable, "-X", "importtime", "-m", "prime_rl.entrypoints.inference", *arguments]
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=env, timeout=START_TIMEOUT_SECONDS)
    imported = {
        line.rsplit("|", 1)[-1].strip() for line in result.stderr.splitlines() if line.startswith("import time:")
    }
    assert ("vllm" in imported) == imports_vllm, "its import takes eleven seconds of CPU"
    assert result.returncode == 2, result.stderr[-2000:]
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert errors
    assert "Traceback" not in result.stderr
    return errors[-1]


def test_port_in_use_is_an_error_at_once(models):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        arguments = ["--model.name", str(models[0]), "--server.port", str(port)]
        assert f"cannot listen on 127.0.0.1:{port}" in _fails(*arguments, imports_vllm=False)


@pytest.mark.parametrize(
    ("name", "problem"),
    [("/no/such/model", "does not exist"), ("nobody/no-such-model", "is not in the cache, and")],
)
def test_missing_model_is_an_error(name, problem):
    assert f"model.name = {name} {problem}" in _fails(
        "--model.name", name, "--server.port", str(free_port()), imports_vllm=False
    )


def test_invalid_vllm_argument_is_an_error(models):
    arguments = ["--model.name", str(models[0]), "--server.port", str(free_port()), "--vllm.max_num_seqs", "many"]
    assert "vllm: argument --max-num-seqs: invalid" in _fails(*arguments, imports_vllm=True)
