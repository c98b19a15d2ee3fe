"""One server over two nodes (two commands on this machine): both switch, and the loss of a node ends the server."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.integration.inference.conftest import gap, logprobs_of, metric, versions_of, wait_for_metric
from tests.support.nursery import Forked, start_forked
from tests.support.server import STOP_TIMEOUT_SECONDS, Server, free_port, inference_server
from tests.support.tiny_model import publish_weights

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(900)]

NODES = ["--data-parallel-size", "2", "--data-parallel-size-local", "1", "--vllm.kv_cache_memory_bytes", "64M"]


@contextmanager
def headless_node(model: Path, log: Path, arguments: list[str]) -> Iterator[Forked]:
    """The second node, killed at the end."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    node = ["--model.name", str(model), *arguments, "--data-parallel-start-rank", "1", "--headless"]
    process = start_forked(node, env | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}, log)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


async def test_two_nodes_switch_together_and_end_after_the_loss_of_an_engine(models, reference, tmp_path):
    directory = publish_weights(tmp_path, models.published[1], 1, overrides=reference.canary(models.published[1]))
    arguments = [*NODES, "--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(free_port())]
    log = tmp_path / "node.log"
    with (
        headless_node(models.base, log, arguments) as node,
        inference_server(models.base, tmp_path / "server.log", arguments) as server,
    ):
        before = sample_of_each(server)
        answer = server.update(directory, 1)
        assert answer["canary_difference"] <= 1e-4, "the larger one of the two copies"
        after = sample_of_each(server)
        for (old, _, old_version), (new, scores, version) in zip(before, after, strict=True):
            assert (old_version, version) == ("0.0", "0.1")
            assert old != new
            assert gap(scores, reference.logprobs(models.published[1], [6, 7, 8], new)) <= 1e-4
        assert after[0][0] == after[1][0]

        [engine] = [p for p in psutil.Process(node.pid).children() if "resource_tracker" not in " ".join(p.cmdline())]
        await lose(server, engine)
        assert server.process.wait(STOP_TIMEOUT_SECONDS) == 1
        assert node.wait(STOP_TIMEOUT_SECONDS) == 1
    assert "error: node" in server.log.read_text()
    assert f"EngineCore_DP1 (pid {engine.pid}) died" in server.log.read_text()
    assert f"error: EngineCore_DP1 (pid {engine.pid}) died" in log.read_text()


def sample_of_each(server: Server) -> list[tuple[list[int], list[float], str]]:
    """Tokens, log-probabilities and version of each copy for one prompt."""
    choices = []
    for rank in ("0", "1"):
        answer = server.client.post(
            "/inference/v1/generate",
            json=server.request([6, 7, 8], max_tokens=8),
            headers={"X-data-parallel-rank": rank},
        )
        choices.append(answer.raise_for_status().json()["choices"][0])
    return [(choice["token_ids"], logprobs_of(choice), versions_of(choice)[0][0]) for choice in choices]


async def lose(server: Server, engine: psutil.Process) -> None:
    """Kill the engine while both copies sample; the server must end every request."""
    async with httpx.AsyncClient(base_url=server.url, timeout=STOP_TIMEOUT_SECONDS) as client:
        requests = [
            asyncio.create_task(
                client.post(
                    "/inference/v1/generate",
                    json=server.request([6 + i, 7], max_tokens=400),
                    headers={"X-data-parallel-rank": str(i % 2)},
                )
            )
            for i in range(8)
        ]
        before = metric(server, "vllm:generation_tokens_total")
        await asyncio.to_thread(wait_for_metric, server, "vllm:generation_tokens_total", above=before)
        engine.send_signal(signal.SIGKILL)
        ends = await asyncio.gather(*requests, return_exceptions=True)
        assert not [end for end in ends if isinstance(end, httpx.TimeoutException)]
