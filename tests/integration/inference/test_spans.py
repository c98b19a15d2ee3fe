"""I1, I5 over the whole way: the versions that the engines report are those that the trainer reads in its batches.

The real orchestrator on two real servers, with a trainer that only publishes: version n + 1 as soon as batch n is
there, which is in the middle of most completions. What the engines answer is recorded on its way. `SPAN_REQUESTS=200`
plays that many completions instead of 48; each has 500 tokens or more.
"""

import asyncio
import itertools
import json
import os
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.monitor import Monitor
from prime_rl.orchestrator.orchestrator import Orchestrator
from prime_rl.orchestrator.setup import connect, model_access, start_environments
from prime_rl.orchestrator.workers.host import WorkerHost
from prime_rl.run.batch import read_batch
from prime_rl.run.paths import RunPaths
from prime_rl.run.wait import changes
from prime_rl.types import PolicyVersion
from tests.integration.inference.conftest import ARGUMENTS, Models, logprobs_of, versions_of
from tests.support.recording_proxy import RecordingProxy, recording_proxy
from tests.support.server import Server, inference_server
from tests.support.tiny_model import publish_weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

REQUESTS = int(os.environ.get("SPAN_REQUESTS", "48"))
STEPS = 4
GROUP = 4
ASYNC_LEVEL = 2
LEAST, MOST = 500, 540


@pytest.fixture(scope="module")
def second_server(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with inference_server(models.base, tmp_path_factory.mktemp("second") / "server.log", ARGUMENTS) as server:
        yield server


def make_config(models: Models, output_dir: Path, urls: list[str]) -> OrchestratorConfig:
    values: dict[str, Any] = {
        "model": {"name": str(models.base)},
        "env": [{"id": "reverse_text", "args": {"words": 200}}],
        "sampling": {"min_tokens": LEAST, "max_tokens": MOST},
        "batch_size": REQUESTS // STEPS // GROUP * GROUP,
        "rollouts_per_example": GROUP,
        "seq_len": 1024,
        "max_steps": STEPS,
        "async_level": ASYNC_LEVEL,
        "output_dir": output_dir,
        "client": {"base_url": urls},
        "wait_timeout_seconds": 600,
    }
    return OrchestratorConfig(**values)


async def publish_after_each_batch(paths: RunPaths, models: Models, stop: asyncio.Event) -> None:
    """Play the trainer."""
    done = 0
    async for _ in changes(paths.rollouts_dir, stop):
        while done < STEPS and paths.rollouts(done).exists():
            done += 1
            source = models.published[2 - done % 2]
            await asyncio.to_thread(publish_weights, paths.root, source, done)
        if done == STEPS:
            return


async def play(config: OrchestratorConfig, models: Models) -> None:
    """Run the orchestrator to its end."""
    stop = asyncio.Event()
    async with AsyncExitStack() as stack:
        host = await stack.enter_async_context(WorkerHost())
        environments = await start_environments(config, host, model_access(config), config.run_paths, stack)
        servers = [await connect(config, url, stack) for url in config.client.urls]
        monitor = Monitor(config.run_paths, "orchestrator", None)
        stack.callback(monitor.close)
        training = asyncio.create_task(publish_after_each_batch(config.run_paths, models, stop))
        stack.callback(training.cancel)
        await Orchestrator(config, environments, servers, monitor).run()


def assert_batch_is_what_was_reported(paths: RunPaths, step: int, reported: dict[tuple[int, ...], Any]) -> int:
    """Compare batch `step`, as the trainer reads it, with the engines' answers; returns how many it has used up."""
    batch, _ = read_batch(paths.rollouts(step), step)
    starts = np.concatenate([[0], np.cumsum(batch.seq_lens)])
    for start, end in itertools.pairwise(starts.tolist()):
        choice, prompt = reported.pop(tuple(batch.tokens[start:end].tolist()))
        versions = [-1] * prompt
        for version, first, last in versions_of(choice):
            versions += [PolicyVersion.parse(version).step] * (last - first)
        assert batch.versions[start:end].tolist() == versions
        assert batch.loss_mask[start:end].tolist() == [0] * prompt + [1] * (end - start - prompt)
        assert np.array_equal(batch.logprobs[start + prompt : end], np.array(logprobs_of(choice), np.float32))
        assert end - start - prompt >= LEAST
    sampled = batch.versions[batch.versions >= 0]
    assert step - sampled.min() <= ASYNC_LEVEL
    return len(batch.seq_lens)


async def test_reported_spans_are_what_the_trainer_reads(
    server: Server, second_server: Server, models: Models, tmp_path: Path
) -> None:
    async with recording_proxy(server.url) as one, recording_proxy(second_server.url) as two:
        config = make_config(models, tmp_path / "run", [one.url, two.url])
        await play(config, models)
    paths = config.run_paths
    reported = {}
    for prompt, choice in (*one.choices, *two.choices):
        spans = versions_of(choice)
        assert [start for _, start, _ in spans] == [0, *(end for _, _, end in spans[:-1])]
        assert spans[-1][2] == len(choice["token_ids"])
        reported[(*prompt, *choice["token_ids"])] = choice, len(prompt)
    straddling = [choice for choice, _ in reported.values() if len(versions_of(choice)) > 1]
    used = sum(assert_batch_is_what_was_reported(paths, step, reported) for step in range(STEPS))
    assert used == config.batch_size * STEPS
    assert not reported, "every completion is trained on"
    assert len(straddling) >= used // 4, "the switches came in the middle"
    assert min(len(one.choices), len(two.choices)) >= used // 4
    assert_switched_together(one, two)
    rows = [json.loads(line) for line in paths.metrics("orchestrator").read_text().splitlines()]
    assert rows[-1]["tokens/wasted"] == 0


def assert_switched_together(one: RecordingProxy, two: RecordingProxy) -> None:
    """No server was told to switch before each had staged the version."""
    staged, switched = (
        [[call for call in proxy.calls if call[0] == path] for proxy in (one, two)]
        for path in ("/stage_weights", "/update_weights")
    )
    assert len(switched[0]) == len(switched[1]) >= 2
    for first, second in zip(*switched, strict=True):
        ready = max(max(end for _, _, end in calls if end <= max(first[1], second[1])) for calls in staged)
        assert ready <= min(first[1], second[1])
