"""Two engines behind one server: both switch, and none outlives it. The paths are those of several GPUs."""

import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from prime_rl.inference.weights import read_shapes
from tests.integration.inference.conftest import (
    Models,
    Reference,
    generate_all,
    metric,
    versions_of,
    wait_for_metric,
)
from tests.support.server import inference_server
from tests.support.tiny_model import publish_weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


async def test_all_engines_switch_and_die_together(models: Models, reference: Reference, tmp_path: Path) -> None:
    ids = [6 + (7 * i) % 94 for i in range(64)]
    logprobs = reference.logprobs(models.published[1], ids[:1], ids[1:])
    canary = {"token_ids": ids, "logprobs": logprobs, "dtype": "float32"}
    directory = publish_weights(tmp_path, models.published[1], 1, overrides={"canary": canary})
    answers: list[dict[str, Any]] = []
    # On a CPU they would be forked, with their workers inside.
    arguments = ["--parallel.dp", "2", "--vllm.kv_cache_memory_bytes", "64M"]
    arguments += ["--vllm.distributed_executor_backend", "mp"]
    with inference_server(models.base, tmp_path / "server.log", arguments) as server:

        def switch() -> None:
            wait_for_metric(server, "vllm:generation_tokens_total", above=100)
            answers.append(server.update(directory, 1))

        requests = [server.request([6 + i, 7, 8], max_tokens=400) for i in range(16)]
        choices = await generate_all(server, requests, switch)
        assert {versions_of(choice)[-1][0] for choice in choices} == {"0.1"}
        assert any(len(versions_of(choice)) == 2 for choice in choices)
        assert answers[0]["canary_difference"] <= 1e-4, "of the worse of the two"
        assert answers[0]["bytes"] == 2 * 4 * sum(math.prod(shape) for shape in read_shapes(directory).values())
        for engine in (0, 1):
            assert metric(server, f'vllm:generation_tokens_total{{engine="{engine}"') > 0

        offspring = psutil.Process(server.process.pid).children(recursive=True)
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
        deadline = time.monotonic() + 10
        while alive := [p for p in offspring if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]:
            assert time.monotonic() < deadline, alive
            time.sleep(0.05)
