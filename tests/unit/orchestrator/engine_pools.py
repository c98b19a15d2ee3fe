"""Pools of fake engines, which follow the published versions of a run."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

from prime_rl.configs.concurrency import ConcurrencyConfig
from prime_rl.core.errors import first_exception
from prime_rl.orchestrator.inference.inference_pool import InferencePool
from prime_rl.orchestrator.inference.inference_server import ConcurrencyController, InferenceServer, accept_all
from prime_rl.rollouts.clients.inference_client import InferenceClient
from prime_rl.storage.paths import RunPaths
from tests.support.fake_engine import fake_engine, publish_version


class Changes:
    """Wakes waiters on each change of the pool."""

    def __init__(self):
        self.event = asyncio.Event()

    async def until(self, condition):
        async with asyncio.timeout(60):
            while not condition():
                self.event.clear()
                await self.event.wait()

    async def switch_to(self, policy, step):
        """Publish a version and wait until all servers sample from it."""
        publish_version(policy.weight_versions.paths, step)
        await self.until(lambda: policy.version == step)


def server_of(client, limit=None, find_problem=accept_all):
    controller = ConcurrencyController(ConcurrencyConfig(initial=limit), seq_len=64)
    return InferenceServer(client, controller, find_problem)


@asynccontextmanager
async def policy_of(paths, engines, limit=None, slot=None, probe_seconds=None, find_problem=accept_all, **options):
    """A running pool, and its changes. The block raises what ends the run."""
    changes, stop = Changes(), asyncio.Event()
    keys = {"timeout_seconds": 20, "probe_seconds": probe_seconds, "slot": slot}
    try:
        async with AsyncExitStack() as stack:
            clients = [InferenceClient(fake.url, "m", "test-run", **keys) for fake in engines]
            for client in clients:
                await stack.enter_async_context(client)
            servers = [server_of(client, limit, find_problem) for client in clients]
            policy = InferencePool(servers, paths, changes.event.set, **options)
            await policy.start(timeout_seconds=60)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(policy.follow_weights(stop))
                tasks.create_task(policy.maintain(stop))
                try:
                    yield policy, changes
                finally:
                    stop.set()
    except ExceptionGroup as group:
        raise first_exception(group) from None


@asynccontextmanager
async def pool_of(tmp_path, count=1, **options):
    """A pool of `count` fake engines; yields its paths, itself, its changes and the engines."""
    paths = RunPaths(tmp_path)
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(fake_engine()) for _ in range(count)]
        policy, changes = await stack.enter_async_context(policy_of(paths, engines, **options))
        yield paths, policy, changes, *engines
