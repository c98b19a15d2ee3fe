"""A server whose versions are deltas loads exactly the published weights, also after a restart (I4, I5)."""

import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from prime_rl.configs.training.broadcast import DeltaConfig, FileBroadcastConfig
from prime_rl.core.types import PolicyVersion
from prime_rl.inference.policy.delta_cache import cache_root
from prime_rl.storage.artifact import WEIGHTS_FORMAT, read_manifest
from prime_rl.storage.delta.chain import chain_of, rebuild
from tests.integration.inference.conftest import (
    ARGUMENTS,
    LONG,
    SAMPLED,
    assert_greedy_outputs_equal,
    gap,
    generate_all,
    logprobs_of,
    metric,
    versions_of,
    wait_for_metric,
)
from tests.support.server import STOP_TIMEOUT_SECONDS, Server, free_port, inference_server

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(900)]

PROMPT = [1, 4, 6, *range(70, 100), 2, 6, 1, 5, 6]


class Trainer:
    """Publishes versions of a tiny policy as deltas; each step changes a twentieth of the weights."""

    def __init__(self, model: Path, weights: Path) -> None:
        from prime_rl.configs.base_model import TokenizerConfig
        from prime_rl.configs.training.model import TrainerModelConfig
        from prime_rl.trainer.fsdp import shard_policy
        from prime_rl.trainer.model.policy_model import load_tokenizer
        from prime_rl.trainer.parallel.process_group import World
        from prime_rl.trainer.weight_sync.publisher import Publisher
        from prime_rl.trainer.weights.policy_loading import load_policy

        config = TrainerModelConfig(name=str(model))
        world = World(rank=0, size=1, device=torch.device("cpu"))
        self._policy = shard_policy(load_policy(config, seed=0), config, world)
        tokenizer = load_tokenizer(TokenizerConfig(), config)
        self._publisher = Publisher(
            self._policy,
            tokenizer,
            torch.float32,
            world,
            FileBroadcastConfig(delta=DeltaConfig(full_interval=9)),
            shard_bytes=100_000,
            canary=torch.float32,
        )
        self.model, self._weights = model, weights

    @torch.no_grad()
    def step(self, step: int, last: bool = False) -> Path:
        """Train a step and publish its version."""
        generator = torch.Generator().manual_seed(step)
        for parameter in self._policy.parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            changed = torch.rand(local.shape, generator=generator) < 0.05
            local += changed * 0.2 * local.abs().mean()
        target = self._weights / f"step_{step}"
        self._publisher.start(target, PolicyVersion(0, step), last)
        self._publisher.wait()
        return target


@pytest.fixture
def trainer(tmp_path, models):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Trainer(models.base, tmp_path / "weights")
    dist.destroy_process_group()


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


@pytest.mark.extended  # the unit tests of `DeltaChain` and of the worker show the parts
async def test_server_follows_a_chain_of_deltas(server, reference, tmp_path, trainer):
    """The shared server: two switches during completions, a damaged delta, and the outputs of the last version."""
    published = {step: trainer.step(step) for step in range(1, 5)}
    assert [len(chain_of(directory)) for directory in published.values()] == [1, 2, 3, 4]
    await _switch_while_sampling(server, {step: published[step] for step in (1, 3)})
    _refuses_damage(server, published[4])
    server.update(published[4], 4)
    choice = server.generate(PROMPT, temperature=1.0, seed=1, max_tokens=64)
    full = _full(published[4], tmp_path / "full")
    shutil.copy(trainer.model / "config.json", full)
    assert gap(logprobs_of(choice), reference.logprobs(full, PROMPT, choice["token_ids"])) <= 1e-4


@pytest.mark.extended
async def test_restarted_server_rebuilds_a_chain_of_deltas(server, models, tmp_path, trainer):
    """The shared server loads the same versions as full weights."""
    port = free_port()
    arguments = [*ARGUMENTS, "--weights_cache", str(tmp_path / "cache")]
    here = cache_root(tmp_path / "cache", port)
    published = {step: trainer.step(step) for step in range(1, 7)}
    assert [len(chain_of(directory)) for directory in published.values()] == [1, 2, 3, 4, 5, 6]

    with inference_server(models.base, tmp_path / "first.log", arguments, port=port) as first:
        await _switch_while_sampling(first, {step: published[step] for step in (1, 2, 3)})
        _refuses_damage(first, published[4])
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
        last = trainer.step(7, last=True)
        assert len(chain_of(last)) == 1
        for one in (second, server):
            one.update(last, 7)
        await assert_greedy_outputs_equal(second, server)
        assert [len(list(entry.glob("*.safetensors"))) for entry in here.iterdir() if entry.is_dir()] == [3]
        second.process.send_signal(signal.SIGTERM)
        second.process.wait(STOP_TIMEOUT_SECONDS)
        assert not here.exists()


def _refuses_damage(server: Server, directory: Path) -> None:
    """A damaged delta is refused with the name of its file; the repaired one is accepted."""
    loaded = server.policy()
    delta = sorted(directory.glob("*.delta"))[1]
    content = delta.read_bytes()
    for damaged, reason in [
        (content[:60] + bytes([content[60] ^ 4]) + content[61:], f"{delta} is damaged: the checksum does not match"),
        (content[:-7], rf"{delta} has \d+ bytes, its manifest says \d+"),
    ]:
        delta.write_bytes(damaged)
        answer = server.post("/update_weights", weight_dir=str(directory), step=4)
        assert answer.status_code == 400 and re.search(reason, answer.json()["error"])
        assert server.policy() == loaded
    delta.write_bytes(content)
