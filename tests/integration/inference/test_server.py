"""The server as a process: how fast it starts, who may steer it, and that it leaves nothing behind."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.integration.inference.conftest import (
    Reference,
    assert_greedy_outputs_equal,
    gap,
    logprobs_of,
    switch_ten_times,
)
from tests.support.server import Server, free_port, inference_server
from tests.support.tiny_model import make_tiny_model, publish_weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SECRET = "k-51c0ffee"
KEY = {"Authorization": f"Bearer {SECRET}"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("untied")
    base = make_tiny_model(root / "base", tie_word_embeddings=False, seed=0)
    other = make_tiny_model(root / "other", tie_word_embeddings=False, seed=1)
    return base, publish_weights(root / "run", other, 1)


@pytest.fixture(scope="module")
def locked(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of an untied model that wants a key, on a machine without a C++ compiler."""
    root = tmp_path_factory.mktemp("locked")
    environment = {"INFERENCE_SERVER_API_KEY": SECRET, "CXX": "none", "TORCHINDUCTOR_CACHE_DIR": str(root / "cache")}
    with inference_server(models[0], root / "server.log", environment=environment) as server:
        yield server


def test_starts_quickly_on_a_cpu(locked: Server) -> None:
    """Processor seconds, which the neighbours of a shared machine do not change; stock vLLM needs over 30."""
    [engine] = locked.engine_pids()
    times = [psutil.Process(pid).cpu_times() for pid in (locked.process.pid, engine)]
    assert sum(t.user + t.system for t in times) < 22
    assert len(psutil.Process(locked.process.pid).children(recursive=True)) == 1, "the engine runs its worker itself"


def test_admin_routes_want_the_key(locked: Server) -> None:
    assert locked.client.get("/policy").status_code == 401
    assert locked.post("/inference/v1/generate").status_code == 401
    for path in (
        "/update_weights",
        "/reload_weights",
        "/release_policy",
        "/v1/completions",
        "/tokenize",
        "/invocations",
    ):
        assert locked.post(path).status_code == 401
        assert locked.client.post(path, json={}, headers={"Authorization": "Bearer other"}).status_code == 401
    assert [locked.client.get(path).status_code for path in ("/metrics", "/v1/models", "/docs", "/health")] == [
        401
    ] * 3 + [200]
    assert locked.client.get("/policy", headers=KEY).json()["step"] == 0
    prompt = {"model": locked.model, "prompt": "a"}
    assert locked.client.post("/tokenize", json=prompt, headers=KEY).status_code == 200


def test_the_key_is_not_logged(locked: Server) -> None:
    assert SECRET not in locked.log.read_text()
    engine = locked.engine_pids()
    assert not any(SECRET in " ".join(psutil.Process(pid).cmdline()) for pid in (locked.process.pid, *engine))


def test_seeded_requests_with_long_prompts_repeat(locked: Server) -> None:
    """More prompt tokens at once than one step of the engine takes: its CPU generator cannot go on within a prompt."""
    locked.client.headers.update(KEY)
    prompts = [[3 + (i * j) % 90 for j in range(400)] for i in range(24)]

    def ask(number: int) -> list[int]:
        return locked.generate(prompts[number], temperature=1.0, seed=number)["token_ids"]

    with ThreadPoolExecutor(len(prompts)) as threads:
        first = list(threads.map(ask, range(len(prompts))))
        assert list(threads.map(ask, range(len(prompts)))) == first


def test_untied_head_follows_the_switch(locked: Server, models: tuple[Path, Path], reference: Reference) -> None:
    locked.client.headers.update(KEY)
    locked.update(models[1], 1)
    prompt = [1, 4, 6, *range(70, 90)]
    choice = locked.generate(prompt, temperature=1.0, seed=0, max_tokens=64)
    assert gap(logprobs_of(choice), reference.logprobs(models[1], prompt, choice["token_ids"])) <= 1e-4
    assert gap(logprobs_of(choice), reference.logprobs(models[0], prompt, choice["token_ids"])) > 0.5


async def test_an_untied_model_equals_a_fresh_server_after_ten_switches(
    locked: Server, models: tuple[Path, Path], tmp_path: Path
) -> None:
    locked.client.headers.update(KEY)
    locked.reload()
    switch_ten_times(locked, models, tmp_path)
    with inference_server(models[1], tmp_path / "server.log", ["--vllm.kv_cache_memory_bytes", "64M"]) as fresh:
        await assert_greedy_outputs_equal(locked, fresh)


def test_engine_dies_with_the_server(locked: Server) -> None:
    """Uses the server up."""
    [engine] = [psutil.Process(pid) for pid in locked.engine_pids()]
    os.kill(locked.process.pid, signal.SIGKILL)
    locked.process.wait()
    deadline = time.monotonic() + 5
    while engine.is_running() and engine.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the engine outlives its server"
        time.sleep(0.05)


def _fails(*arguments: str) -> str:
    """Run the command; it must end with exit code 2 and one line, which is returned."""
    command = [sys.executable, "-m", "prime_rl.entrypoints.inference", *arguments]
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
    assert result.returncode == 2, result.stderr[-2000:]
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert errors
    assert "Traceback" not in result.stderr
    return errors[-1]


def test_port_in_use_is_told_at_once(models: tuple[Path, Path]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        start = time.monotonic()
        assert f"cannot listen on 127.0.0.1:{port}" in _fails(
            "--model.name", str(models[0]), "--server.port", str(port)
        )
        assert time.monotonic() - start < 15


@pytest.mark.parametrize("name", ["/no/such/model", "nobody/no-such-model"])
def test_model_that_does_not_exist(name: str) -> None:
    assert f"model.name: {name} is no directory here" in _fails("--model.name", name, "--server.port", str(free_port()))


def test_wrong_vllm_argument(models: tuple[Path, Path]) -> None:
    arguments = ["--model.name", str(models[0]), "--server.port", str(free_port()), "--vllm.max_num_seqs", "many"]
    assert "vllm: argument --max-num-seqs: invalid" in _fails(*arguments)
