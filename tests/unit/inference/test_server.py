"""The heartbeat of a server whose engines hang differs from that of one that works."""

import asyncio
import fcntl
import json
import math
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from prime_rl.configs.inference import InferenceConfig
from prime_rl.core.errors import RunError
from prime_rl.core.types import PolicyVersion
from prime_rl.inference import server
from prime_rl.inference.routes import make_router
from prime_rl.inference.server import abort_requests, run_self_test
from prime_rl.liveness.heartbeat_monitor import read_heartbeats
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.liveness.parent_process import ENGINE_DIRECTORY, ENGINE_SERVER, SUPERVISED
from prime_rl.storage.paths import RunPaths
from prime_rl.storage.weights.canary import PolicyCanary, canary_tokens
from prime_rl.trainer.weight_sync.publisher import canary_row


async def test_heartbeat_advances_with_the_answers_of_the_engines(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "_INTERVAL_SECONDS", 0)
    writer = HeartbeatWriter(RunPaths(tmp_path), "inference", "inference")
    answers, hangs = asyncio.Queue(), asyncio.Event()

    async def check():
        if answers.qsize() == 3:
            hangs.set()
            await asyncio.get_running_loop().create_future()
        answers.put_nowait(None)

    async with server.serving(writer, check, 60):
        before = writer._progress
        await hangs.wait()
        assert writer._progress == before + 3
        assert writer._phase[:2] == ("serve", 60)
        assert writer._loop is asyncio.get_running_loop()
    assert writer._loop is None


@pytest.mark.parametrize("supervised", [True, False])
def test_server_with_an_output_dir_writes_heartbeats(tmp_path, monkeypatch, supervised):
    monkeypatch.setenv(SUPERVISED, "1" if supervised else "0")
    for name in (ENGINE_DIRECTORY, ENGINE_SERVER):
        monkeypatch.setenv(name, "")  # restored afterwards
    config = InferenceConfig.load(["--output-dir", str(tmp_path)])
    with server.server_heartbeat(config):
        (beat,) = read_heartbeats(RunPaths(tmp_path)).values()
        assert (beat.role, beat.phase) == ("inference", "import vLLM")
        assert beat.name == "inference" if supervised else beat.name.endswith("_8000")


def test_phases_of_a_server_split_serving_and_have_a_timeline_for_updates(tmp_path):
    paths = RunPaths(tmp_path)
    with HeartbeatWriter(paths, "inference", "inference", interval_seconds=0.001) as writer:
        record = server.phase_recorder(writer)
        writer.enter("serve")
        start = writer._phase[3] + 0.01
        while time.time() < start + 0.01:
            time.sleep(0.001)
        for name in ("stage", "swap", "pause"):
            record(name, start, PolicyVersion(0, 3))
    lines = [json.loads(line) for line in paths.timeline("inference").read_text().splitlines()]
    assert [(line["name"], line["version"]) for line in lines if line["name"] != "start"][:2] == [
        ("serve", None), ("pause", 3),
    ]  # fmt: skip
    updates = [json.loads(line) for line in paths.timeline("inference_updates").read_text().splitlines()]
    assert [(line["name"], line["version"]) for line in updates] == [("stage", 3), ("swap", 3)]


# The end of the server, with an engine that may end at the same time


class Client:
    """The part of vLLM's client that aborts requests."""

    def __init__(self, error=None):
        self.error, self.asked = error, []

    async def pause_generation(self, **options):
        self.asked.append(options)
        if self.error is None:
            await asyncio.Event().wait()
        raise self.error


@pytest.mark.parametrize("error", [Exception("Server shutting down"), None], ids=["ends too", "hangs"])
async def test_abort_requests_engine_that_ends_or_hangs_does_not_fail_the_server(error, said):
    client = Client(error)
    async with asyncio.timeout(60):
        await abort_requests(client, 0.1)
    assert client.asked == [{"mode": "abort", "clear_cache": False}]
    assert (
        [line for line in said() if "Server shutting down" in line]
        == said()
        == (["could not abort the requests in flight: Server shutting down"] if error else [])
    )


# The self-test of the engines: an engine that fails it gives one error at the start


PLACES = ["data-parallel rank 0", "data-parallel rank 1"]


async def _try(answer: Any, timeout_seconds: float = 60) -> PolicyCanary:
    async def ask(tokens: tuple[int, ...]) -> list[list[float]]:
        assert len(tokens) == 64
        if callable(answer):
            return await answer()
        return answer

    return await run_self_test(ask, 128, "float32", "a/model", timeout_seconds, PLACES)


async def test_self_test_returns_the_canary_of_version_zero():
    canary = await _try([[-1.0] * 63, [-1.0] * 62 + [-1.00005]])
    assert canary.logprobs == (-1.0,) * 63
    assert canary.dtype == "float32"
    assert list(canary.token_ids) == canary_row(128).tokens.flatten().tolist(), "the trainer's tokens"


async def _die() -> None:
    raise RuntimeError("EngineCore encountered an issue.\nSee the stack trace")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([[math.nan] * 63], "log-probabilities that are not finite in float32; try model.dtype"),
        ([[-1.0] * 63, [-math.inf] * 63], r"not finite in float32 \(data-parallel rank 1\)"),
        ([[-1.0] * 63, [-1.0] * 62 + [-1.5]], r"\(data-parallel rank 1\): the largest difference .* is 0.5"),
        (
            _die,
            r"64 tokens to a/model\) failed: vLLM .* cannot run.* EngineCore encountered an issue",
        ),
        (lambda: asyncio.Event().wait(), r"no answer within 0 s \(engine_timeout_seconds\)"),
    ],
    ids=["nan", "infinite", "copies differ", "dead", "hangs"],
)
async def test_self_test_of_a_broken_engine_raises_one_line(answer, message):
    with pytest.raises(RunError, match=message) as caught:
        await _try(answer, timeout_seconds=0.05)
    assert "\n" not in str(caught.value)


def test_base_canary_route_returns_the_canary():
    app = FastAPI()
    canary = PolicyCanary(tuple(canary_tokens(128).tolist()), (-1.0,) * 63, "float32")
    server: Any = None
    app.include_router(make_router(server, "model", base_canary=canary, canary_tolerance=0.2))
    answer = TestClient(app).get("/base_canary").json()
    message = {"token_ids": list(canary.token_ids), "logprobs": [-1.0] * 63, "dtype": "float32"}
    assert answer == message | {"tolerance": 0.2}


# The folder for the temporary files of a server: removed at its end, or by the next server if it was killed


@pytest.fixture
def place(monkeypatch):
    for name in ("TMPDIR", "VLLM_RPC_BASE_PATH", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # pytest's own are too long for sockets
        monkeypatch.setattr(tempfile, "tempdir", short)
        yield Path(short)


def test_private_directory_is_removed_and_the_compilers_cache_is_outside(place):
    with server._private_directory():
        [folder] = place.iterdir()
        assert os.environ["TMPDIR"] == os.environ["VLLM_RPC_BASE_PATH"] == tempfile.gettempdir() == str(folder)
        assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).parent == place
        (folder / "socket").touch()
    assert not list(place.iterdir())


def test_private_directory_of_a_killed_server_is_removed_by_the_next(place):
    killed, running = (place / f"prime_rl_server_{name}" for name in ("killed", "running"))
    for folder in (killed, running):
        folder.mkdir()
        (folder / "file").touch()
    lock = os.open(running, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with server._private_directory():
        assert not killed.exists() and running.exists()
    os.close(lock)


def test_private_directory_that_another_server_removes_is_made_again(place, monkeypatch):
    removed = []

    def lock(descriptor: int, operation: int) -> None:
        if not removed:  # before it is locked
            [folder] = place.iterdir()
            folder.rmdir()
            removed.append(folder)

    monkeypatch.setattr(server.fcntl, "flock", lock)
    with server._private_directory():
        [folder] = place.iterdir()
        assert folder not in removed and os.environ["TMPDIR"] == str(folder)


def test_private_directory_leaves_room_for_the_names_of_sockets(place, monkeypatch):
    long = place / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with server._private_directory():
        folder = os.environ["VLLM_RPC_BASE_PATH"]
        assert Path(folder).parent == Path("/tmp") and len(folder) + 1 + 36 <= 107
