"""Several workers of one server, data-parallel or tensor-parallel: all switch, and all end with the server.

On a CPU data-parallel engines are forked and run their workers themselves. Tensor-parallel workers are spawned by a
spawned engine, as on several GPUs.
"""

import math
import os
import re
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from prime_rl.inference.policy.weight_checks import read_shapes
from tests.integration.inference.conftest import (
    LONG,
    gap,
    generate_all,
    logprobs_of,
    metric,
    versions_of,
    wait_for_metric,
)
from tests.support.command import alive, until
from tests.support.server import STOP_TIMEOUT_SECONDS, Server, inference_server
from tests.support.tiny_model import publish_weights

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(600)]


async def test_data_parallel_engines_switch_and_die_together(models, reference, tmp_path):
    directory = publish_weights(tmp_path, models.published[1], 1, overrides=reference.canary(models.published[1]))
    arguments = ["--parallel.dp", "2", "--vllm.kv_cache_memory_bytes", "64M"]
    with inference_server(models.base, tmp_path / "server.log", arguments) as server:
        answer, choices = await switch_between_tokens(server, directory)
        assert any(len(versions_of(choice)) == 2 for choice in choices)
        later = await generate_all(server, [server.request([6 + i, 8], max_tokens=8) for i in range(16)], lambda: None)
        assert {version for choice in later for version, _, _ in versions_of(choice)} == {"0.1"}, (
            "both copies have switched"
        )
        assert answer["canary_difference"] <= 1e-4, "the larger one of the two copies"
        assert answer["bytes"] == 2 * 4 * sum(math.prod(shape) for shape in read_shapes(directory).values())
        for engine in (0, 1):
            assert metric(server, f'vllm:generation_tokens_total{{engine="{engine}"') > 0
        kill_and_look_for_orphans(server)


async def test_tensor_parallel_workers_switch_and_die_together(models, reference, tmp_path):
    directory = publish_weights(tmp_path, models.published[1], 1, overrides=reference.canary(models.published[1]))
    arguments = ["--parallel.tp", "2", "--vllm.kv_cache_memory_bytes", "64M", "--output-dir", str(tmp_path / "run")]
    with inference_server(models.base, tmp_path / "server.log", arguments) as server:
        answer, choices = await switch_between_tokens(server, directory, 400)  # its steps are slow
        assert any(len(versions_of(choice)) == 2 for choice in choices)
        assert answer["canary_difference"] <= 1e-4
        after = server.generate([6, 7, 8], max_tokens=16)
        assert gap(logprobs_of(after), reference.logprobs(directory, [6, 7, 8], after["token_ids"])) <= 1e-4
        [log] = (tmp_path / "run" / "logs").iterdir()
        writers = set(re.findall(r"^\d\d:\d\d:\d\d \w+ +\[(\w+)\]", log.read_text(), re.MULTILINE))
        assert {"EngineCore", "Worker_TP0"} <= writers, "these processes are spawned"
        kill_and_look_for_orphans(server)


async def switch_between_tokens(
    server: Server, directory: Path, longest: int = LONG
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Switch while sixteen completions are sampled, two of them long; returns the answer, and their choices."""
    answers: list[dict[str, Any]] = []

    def switch() -> None:
        wait_for_metric(server, "vllm:generation_tokens_total", above=100)
        answers.append(server.update(directory, 1))

    requests = [server.request([6 + i, 7, 8], max_tokens=longest if i < 2 else 100) for i in range(16)]
    choices = await generate_all(server, requests, switch)
    return answers[0], choices


def kill_and_look_for_orphans(server: Server) -> None:
    offspring = psutil.Process(server.process.pid).children(recursive=True)
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait()
    until(lambda: not any(map(alive, offspring)), f"the end of {offspring}", STOP_TIMEOUT_SECONDS)
