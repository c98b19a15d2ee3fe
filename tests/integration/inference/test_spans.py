"""End to end: the versions that the engines report equal those in the trainer's batches (I1, I5).

The real orchestrator on real servers, with a fake trainer that publishes version n + 1 as soon as batch n is complete,
during completions. A proxy records the responses of the engines. `SPAN_REQUESTS=200` samples that many completions
instead of 48; each has at least 500 tokens.
"""

import asyncio
import itertools
import json
import os
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.core.types import PolicyVersion
from prime_rl.monitors import Monitor
from prime_rl.orchestrator.orchestrator import OrchestratorLoop
from prime_rl.orchestrator.orchestrator_setup import connect, model_access, start_environments
from prime_rl.rollouts.workers.worker_launcher import WorkerLauncher
from prime_rl.storage.batch import read_batch
from prime_rl.storage.paths import RunPaths
from prime_rl.storage.wait_for import watch_directory
from tests.integration.inference.conftest import ARGUMENTS, Models, logprobs_of, versions_of
from tests.support.nursery import forked_worker_launchers
from tests.support.recording_proxy import RecordingProxy, recording_proxy
from tests.support.server import inference_server
from tests.support.tiny_model import publish_weights

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(900)]

REQUESTS = int(os.environ.get("SPAN_REQUESTS", "0"))  # 0: 16 for each server, and 16
STEPS = 4
GROUP = 4
ASYNC_LEVEL = 2
LEAST, MOST = 500, 900  # different lengths: a switch interrupts some completions


@pytest.fixture(scope="module")
def second_server(models, tmp_path_factory):
    with inference_server(models.base, tmp_path_factory.mktemp("second") / "server.log", ARGUMENTS) as server:
        yield server


def make_config(models: Models, output_dir: Path, urls: list[str]) -> OrchestratorConfig:
    values: dict[str, Any] = {
        "model": {"name": str(models.base)},
        "env": [{"id": "reverse_text", "args": {"words": 200}}],
        "sampling": {"max_tokens": MOST},
        "batch_size": (REQUESTS or 16 * (len(urls) + 1)) // STEPS // GROUP * GROUP,
        "rollouts_per_example": GROUP,
        "seq_len": 1024,
        "max_steps": STEPS,
        "async_level": ASYNC_LEVEL,
        "output_dir": output_dir,
        "client": {"base_url": urls},
        "wait_timeout_seconds": 600,
    }
    config = OrchestratorConfig(**values)  # training refuses min_tokens, which makes replies long here
    return config.model_copy(update={"sampling": config.sampling.model_copy(update={"min_tokens": LEAST})})


async def publish_after_each_batch(paths: RunPaths, models: Models, stop: asyncio.Event) -> None:
    """The fake trainer."""
    done = 0
    async for _ in watch_directory(paths.rollouts_dir, stop):
        while done < STEPS and paths.rollouts(done).exists():
            done += 1
            source = models.published[2 - done % 2]
            await asyncio.to_thread(publish_weights, paths.root, source, done)
        if done == STEPS:
            return


async def run_orchestrator(config: OrchestratorConfig, models: Models) -> None:
    """Run the orchestrator to its end."""
    stop = asyncio.Event()
    async with AsyncExitStack() as stack:
        stack.enter_context(forked_worker_launchers())
        host = await stack.enter_async_context(WorkerLauncher())
        environments = await start_environments(config, host, model_access(config), stack)
        servers = [await connect(config, url, stack) for url in config.client.urls]
        monitor = Monitor(config.run_paths, "orchestrator", None)
        stack.callback(monitor.close)
        training = asyncio.create_task(publish_after_each_batch(config.run_paths, models, stop))
        stack.callback(training.cancel)
        await OrchestratorLoop(config, environments, servers, monitor).run()


def assert_batch_equals_responses(paths: RunPaths, step: int, reported: dict[tuple[int, ...], Any]) -> int:
    """Compare batch `step`, as the trainer reads it, with the engines' responses; returns how many it contains."""
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


@pytest.mark.parametrize(("num_servers", "by_stream"), [(1, True), (1, False), (2, True)])
async def test_versions_of_the_batches_equal_the_reported_spans(
    request, server, models, tmp_path, num_servers, by_stream
):
    servers = [server, *([request.getfixturevalue("second_server")] if num_servers == 2 else [])]
    async with AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(recording_proxy(each.url, by_stream)) for each in servers]
        config = make_config(models, tmp_path / "run", [proxy.url for proxy in proxies])
        await run_orchestrator(config, models)
    assert all(bool(proxy.streams) == by_stream for proxy in proxies)
    paths = config.run_paths
    reported = {}
    for prompt, choice in itertools.chain.from_iterable(proxy.choices for proxy in proxies):
        spans = versions_of(choice)
        assert [start for _, start, _ in spans] == [0, *(end for _, _, end in spans[:-1])]
        assert spans[-1][2] == len(choice["token_ids"])
        reported[(*prompt, *choice["token_ids"])] = choice, len(prompt)
    straddling = [choice for choice, _ in reported.values() if len(versions_of(choice)) > 1]
    used = sum(assert_batch_equals_responses(paths, step, reported) for step in range(STEPS))
    assert used == config.batch_size * STEPS
    assert not reported, "every completion is in a batch"
    assert len(straddling) >= used // 4, "switches occurred during completions"
    if num_servers == 2:
        assert min(len(proxy.choices) for proxy in proxies) >= used // 4
        assert_switched_together(*proxies)
    rows = [json.loads(line) for line in paths.metrics("orchestrator").read_text().splitlines()]
    assert rows[-1]["tokens/unaccounted"] == 0


def assert_switched_together(one: RecordingProxy, two: RecordingProxy) -> None:
    """No server switched before all servers had staged the version."""
    staged, switched = (
        [[call for call in proxy.calls if call[0] == path] for proxy in (one, two)]
        for path in ("/stage_weights", "/update_weights")
    )
    assert len(switched[0]) == len(switched[1]) >= 2
    for first, second in zip(*switched, strict=True):
        ready = max(max(end for _, _, end in calls if end <= max(first[1], second[1])) for calls in staged)
        assert ready <= min(first[1], second[1])
