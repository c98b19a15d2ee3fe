"""A server without the shared directory copies what it is asked to load."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from starlette.responses import Response, StreamingResponse

from prime_rl.core.errors import RunError
from prime_rl.core.types import PolicyVersion
from prime_rl.inference.policy.delta_cache import DeltaCache
from prime_rl.inference.policy.relayed_versions import RelayedVersions
from prime_rl.inference.policy.weight_checks import WeightsRefusedError, read_published
from prime_rl.storage.paths import RunPaths, steps_in
from prime_rl.storage.relay.relay_client import RelayClient
from prime_rl.storage.tensor_hashes import hash_tensors
from tests.support.deltas import publish_delta, publish_full
from tests.support.relays import publish_bytes, running_relay
from tests.support.virtual_clock import virtual_clock

ELSEWHERE = Path("/not/here/weights")


def tensors(step):
    base = np.arange(4096, dtype=np.float32)
    base[:step] += 1
    return {"a": base, "b": base[::-1].copy()}


def publish_chain(root, steps):
    """Publish version 1 in full and the others as deltas."""
    weights = RunPaths(root)
    for step in range(1, steps + 1):
        version = PolicyVersion(0, step)
        if step == 1:
            publish_full(weights.weights(1), tensors(1), version)
        else:
            publish_delta(weights.weights(step), tensors(step - 1), tensors(step), version)


@pytest.fixture
def copies(tmp_path):
    def make(client, timeout_seconds=120.0):
        return RelayedVersions(client, tmp_path / "copies", timeout_seconds)

    return make


def never():
    return None


async def test_chain_of_deltas_is_rebuilt_from_copies(tmp_path, copies):
    publish_chain(tmp_path / "run", 3)
    async with running_relay(tmp_path / "run") as relay, RelayClient([relay.url], None) as client:
        directory = await copies(client).copy(ELSEWHERE / "step_3", PolicyVersion(0, 3), never)
        policy, _, manifest = read_published(directory, PolicyVersion(0, 3))
        full = DeltaCache(tmp_path / "cache").complete(policy.path, lambda: None)
        assert hash_tensors(full) == manifest["tensors"]
        relay.requests.clear()
        publish_delta(RunPaths(tmp_path / "run").weights(4), tensors(3), tensors(4), PolicyVersion(0, 4))
        await copies(client).copy(ELSEWHERE / "step_4", PolicyVersion(0, 4), never)
        read = {path.split("/")[3] for path, _ in relay.requests if path.startswith("/files/")}
        assert read == {"step_4"}, "bases that are here are not copied again"


async def test_versions_outside_the_chain_are_deleted(tmp_path, copies):
    publish_chain(tmp_path / "run", 2)
    publish_full(RunPaths(tmp_path / "run").weights(3), tensors(3), PolicyVersion(0, 3))
    async with running_relay(tmp_path / "run") as relay, RelayClient([relay.url], None) as client:
        await copies(client).copy(ELSEWHERE / "step_2", PolicyVersion(0, 2), never)
        assert steps_in(tmp_path / "copies/weights") == [1, 2]
        await copies(client).copy(ELSEWHERE / "step_3", PolicyVersion(0, 3), never)
        assert steps_in(tmp_path / "copies/weights") == [3]


@virtual_clock
async def test_version_that_no_relay_has_yet_is_waited_for(tmp_path, copies):
    asked = 0

    def publish_later():
        nonlocal asked
        asked += 1
        if asked == 2:
            publish_bytes(tmp_path / "run", 1)

    async with running_relay(tmp_path / "run") as relay, RelayClient([relay.url], None) as client:
        directory = await copies(client).copy(ELSEWHERE / "step_1", PolicyVersion(0, 1), publish_later)
        assert (directory / "model.safetensors").read_bytes() == b"weights"


@virtual_clock
async def test_version_of_an_abandoned_branch_is_not_taken(tmp_path, copies):
    publish_bytes(tmp_path / "run", 1)
    async with running_relay(tmp_path / "run") as relay, RelayClient([relay.url], None) as client:
        with pytest.raises(RunError, match=r"weights/step_1 is not there; nothing new for 1 s"):
            await copies(client, timeout_seconds=1).copy(ELSEWHERE / "step_1", PolicyVersion(1, 1), never)


async def test_version_comes_from_the_relay_that_has_its_branch(tmp_path, copies):
    publish_bytes(tmp_path / "behind", 1, b"abandoned")
    publish_bytes(tmp_path / "run", 1, branch=1)
    async with (
        running_relay(tmp_path / "behind") as behind,
        running_relay(tmp_path / "run") as relay,
        RelayClient([behind.url, relay.url], None) as client,
    ):
        directory = await copies(client).copy(ELSEWHERE / "step_1", PolicyVersion(1, 1), never)
    assert (directory / "model.safetensors").read_bytes() == b"weights"


async def test_overtaken_version_and_directory_of_a_model_are_refused(tmp_path, copies):
    async with RelayClient(["http://127.0.0.1:1"], None) as client:
        with pytest.raises(WeightsRefusedError, match="overtaken by version 2"):
            await copies(client).copy(ELSEWHERE / "step_1", PolicyVersion(0, 1), lambda: "overtaken by version 2")
        with pytest.raises(WeightsRefusedError, match="not named step_N"):
            await copies(client).copy(Path("/models/base"), PolicyVersion(0, 1), never)


@pytest.mark.extended(after=1)
@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["wrong bytes", "no end", "no listing"])
@virtual_clock
async def test_copy_from_a_damaged_relay_ends_after_the_timeout(kind, tmp_path, copies):
    """Bytes that arrive again and again are no progress."""
    publish_bytes(tmp_path / "run", 1, bytes(3 << 20))

    async def drops():
        while True:
            yield b"x"
            await asyncio.sleep(0.01)

    def respond(path, given):
        if kind == "wrong bytes" and path.endswith("model.safetensors"):
            return Response(b"x" * (3 << 20))
        dripping = "model.safetensors" if kind == "no end" else "weights/step_1"
        return StreamingResponse(drops()) if kind != "wrong bytes" and path.endswith(dripping) else None

    async with running_relay(tmp_path / "run") as relay, RelayClient([relay.url], None) as client:
        relay.respond = respond
        with pytest.raises(RunError, match=r"nothing new for 2 s \(relay\.timeout_seconds\)"):
            await copies(client, timeout_seconds=2).copy(ELSEWHERE / "step_1", PolicyVersion(0, 1), never)
        relay.respond = lambda path, given: None
        directory = await copies(client).copy(ELSEWHERE / "step_1", PolicyVersion(0, 1), never)
    assert (directory / "model.safetensors").read_bytes() == bytes(3 << 20)
