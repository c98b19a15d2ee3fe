"""A server whose versions are deltas loads exactly the published weights, also after a restart (I4, I5)."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from prime_rl.configs.training.broadcast import DeltaConfig, FileBroadcastConfig
from prime_rl.inference.policy.delta_cache import cache_root
from prime_rl.storage.artifact import WEIGHTS_FORMAT, read_manifest
from prime_rl.storage.delta.chain import chain_of, rebuild
from tests.integration.inference.conftest import (
    ARGUMENTS,
    LONG,
    PROMPT,
    SAMPLED,
    assert_greedy_outputs_equal,
    generate_all,
    metric,
    versions_of,
    wait_for_metric,
)
from tests.integration.inference.policy_publisher import PolicyPublisher, process_group
from tests.support.server import STOP_TIMEOUT_SECONDS, Server, free_port, inference_server

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def train(tmp_path, models):
    """Train a step and publish its version."""
    broadcast = FileBroadcastConfig(delta=DeltaConfig(full_interval=9))
    with process_group():
        trainer = PolicyPublisher(models.base, tmp_path / "weights", broadcast, shard_bytes=100_000)

        def train(step: int, last: bool = False) -> Path:
            trainer.train(step)
            return trainer.publish(step, last)

        yield train


def _full(weights: Path, target: Path) -> Path:
    *deltas, full = chain_of(weights)
    target.mkdir()
    rebuild(full, deltas[::-1], target)
    return target


async def _switch_while_sampling(server: Server, directories: dict[int, Path]) -> None:
    """Each switch occurs during a completion."""
    for step, directory in directories.items():
        before = server.policy()["step"]
        staged = server.post("/stage_weights", weight_dir=str(directory), step=step)
        assert staged.status_code == 200, staged.text

        start = metric(server, SAMPLED)

        def switch(step: int = step, directory: Path = directory, start: float = start) -> None:
            wait_for_metric(server, SAMPLED, above=start + 20)
            answer = server.update(directory, step)
            assert answer["hash"] == read_manifest(directory, WEIGHTS_FORMAT)["hash"]
            assert answer["canary_difference"] < 1e-4

        [choice] = await generate_all(server, [server.request(PROMPT, max_tokens=LONG)], switch)
        assert [version for version, _, _ in versions_of(choice)] == [f"0.{before}", f"0.{step}"]


async def test_restarted_server_rebuilds_a_chain_of_deltas(server, models, tmp_path, train):
    """The shared server loads the same versions as full weights."""
    port = free_port()
    arguments = [*ARGUMENTS, "--weights_cache", str(tmp_path / "cache")]
    here = cache_root(tmp_path / "cache", port)
    published = {step: train(step) for step in range(1, 7)}
    assert [len(chain_of(directory)) for directory in published.values()] == [1, 2, 3, 4, 5, 6]

    with inference_server(models.base, tmp_path / "first.log", arguments, port=port) as first:
        await _switch_while_sampling(first, {step: published[step] for step in (1, 2, 3)})
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait()

    with inference_server(models.base, tmp_path / "second.log", arguments, port=port) as second:
        hidden = published[1].rename(tmp_path / "step_1")
        await _switch_while_sampling(second, {6: published[6]})  # from version 3, which the first server has cached
        hidden.rename(published[1])
        server.update(_full(published[6], tmp_path / "whole"), 6)
        await assert_greedy_outputs_equal(second, server)

        second.reload()
        shutil.rmtree(here)
        second.update(published[6], 6)  # from version 1 and all later deltas
        await assert_greedy_outputs_equal(second, server)
        last = train(7, last=True)
        assert len(chain_of(last)) == 1
        for one in (second, server):
            one.update(last, 7)
        await assert_greedy_outputs_equal(second, server)
        assert [len(list(entry.glob("*.safetensors"))) for entry in here.iterdir() if entry.is_dir()] == [3]
        second.process.send_signal(signal.SIGTERM)
        second.process.wait(STOP_TIMEOUT_SECONDS)
        assert not here.exists()
