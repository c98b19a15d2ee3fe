"""Servers whose settings do not fit those of the run: at its start, later, and because of the trainer."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from prime_rl.configs.rollouts.options import ConcurrencyConfig
from prime_rl.core.errors import ConfigError
from prime_rl.evaluation.runner import first_exception
from prime_rl.liveness.heartbeat_limits import HeartbeatLimits
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.orchestrator.inference.concurrency_control import ConcurrencyController
from prime_rl.orchestrator.inference.inference_pool import InferencePool
from prime_rl.orchestrator.inference.inference_server import InferenceServer, PublishedVersion
from prime_rl.orchestrator.inference.server_settings import RequiredSettings, UnfitServer
from prime_rl.rollouts.clients.inference_client import InferenceClient
from prime_rl.storage.paths import RunPaths
from tests.support.fake_engine import FakeEngine, fake_engine, publish_version

FIT = {"model.name": "m", "model.dtype": "float32", "model.max_model_len": 64, "max_lora_rank": None}


class Run:
    """A pool of servers that are compared with an orchestrator of 64 tokens and with the trainer, if there is one."""

    def __init__(self, root, engines, **options):
        self.changed = asyncio.Event()
        self.paths = RunPaths(root)
        self.required = RequiredSettings("m", 64, self.paths, HeartbeatLimits())
        self.clients = [InferenceClient(engine.url, "m", "test-run", timeout_s=20) for engine in engines]
        controllers = [ConcurrencyController(ConcurrencyConfig(), seq_len=64) for _ in engines]
        pairs = zip(self.clients, controllers, strict=True)
        self.servers = [InferenceServer(*pair, self.required.find_problem) for pair in pairs]
        self.pool = InferencePool(self.servers, self.paths, self.changed.set, **options)

    def trainer(self, **settings):
        return HeartbeatWriter(self.paths, "trainer_0", "trainer", settings=settings)

    @asynccontextmanager
    async def maintained(self):
        """Start the pool and maintain it for the length of the block; raises what ends the run."""
        stop = asyncio.Event()
        try:
            async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
                for client in self.clients:
                    await client.__aenter__()
                await self.pool.start(timeout_s=60)
                tasks.create_task(self.pool.maintain(stop))
                yield
                stop.set()
        except ExceptionGroup as group:
            raise first_exception(group) from None
        finally:
            for client in self.clients:
                await client.__aexit__()

    async def until(self, condition):
        while not condition():
            await asyncio.sleep(0.01)


async def restart(engine: FakeEngine, **settings) -> None:
    """Start the server again, with changed settings."""
    await engine.die()
    engine.settings = FIT | settings
    await engine.start(int(engine.url.rsplit(":", 1)[1]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model.name": "other"}, "model.name = m here and other at {url}; give both the same"),
        ({"model.max_model_len": 63}, "seq_len = 64 here is above model.max_model_len = 63 at {url}; set "),
    ],
)
async def test_unfit_server_at_the_start_ends_the_run_and_is_not_leased(tmp_path, settings, message):
    async with fake_engine() as engine:
        engine.settings = FIT | settings
        with pytest.raises(UnfitServer) as error:
            async with Run(tmp_path, [engine]).maintained():
                pass
        assert str(error.value).startswith(message.format(url=engine.url))
        assert engine.calls == [] and engine.holder is None, "another run may use it"


async def test_server_without_settings_is_used(tmp_path):
    async with fake_engine() as engine:
        run = Run(tmp_path, [engine])
        async with run.maintained():
            assert run.servers[0].up


async def test_server_that_does_not_fit_the_running_trainer_ends_the_run(tmp_path):
    async with fake_engine() as engine:
        engine.settings = FIT | {"model.dtype": "bfloat16"}
        run = Run(tmp_path, [engine])
        with run.trainer(**{"weight_broadcast.dtype": "float32"}):
            run.required.read_trainer()
            with pytest.raises(
                UnfitServer, match=r"float32 at trainer_0 \(pid \d+ on .* and model.dtype = bfloat16 at h"
            ):
                async with run.maintained():
                    pass


async def test_trainer_that_starts_later_and_does_not_fit_ends_the_run(tmp_path):
    async with fake_engine() as engine:
        engine.settings = FIT
        run = Run(tmp_path, [engine])
        with pytest.raises(ConfigError, match=r"publish = adapter at trainer_0 .* needs a server with enable_lora"):
            async with run.maintained():
                assert run.servers[0].up
                with run.trainer(**{"model.lora.rank": 8}):
                    run.required.read_trainer()
                await asyncio.Event().wait()


async def test_no_version_of_a_trainer_that_does_not_fit_is_staged(tmp_path):
    async with fake_engine() as engine:
        engine.settings = FIT
        run = Run(tmp_path, [engine])
        async with run.maintained():
            with run.trainer(**{"model.lora.rank": 8}):
                run.required.read_trainer()
                publish_version(run.paths, 1)
                with pytest.raises(ConfigError, match="needs a server with enable_lora"):
                    await run.servers[0].stage(PublishedVersion.read(run.paths.weights(1)))
        assert engine.calls == ["reset"]


async def test_trainer_of_an_earlier_run_does_not_count(tmp_path):
    async with fake_engine() as engine:
        engine.settings = FIT
        run = Run(tmp_path, [engine])
        with run.trainer(**{"model.lora.rank": 8}):
            pass
        run.required.read_trainer()
        async with run.maintained():
            assert run.servers[0].up


async def test_server_that_returns_with_other_settings_is_not_used_until_it_fits(tmp_path, said):
    """The run continues with the other server, and one warning says why."""
    async with fake_engine() as one, fake_engine() as two:
        one.settings = two.settings = FIT
        run = Run(tmp_path, [one, two])
        async with run.maintained():
            await restart(two, **{"model.max_model_len": 32})
            await run.until(lambda: any(f"inference at {two.url} is not used: seq_len" in line for line in said()))
            asked = two.num_policy_requests
            await run.until(lambda: two.num_policy_requests > asked + 2)
            assert run.servers[0].up and not run.servers[1].up
            assert two.calls == ["reset"], "that of its first start"
            await restart(two)
            await run.until(lambda: run.servers[1].up)
        refusals = [line for line in said() if "is not used" in line]
        assert len(refusals) == 1 and "model.max_model_len = 32 at" in refusals[0], refusals


async def test_run_without_a_fit_server_ends_with_the_difference(tmp_path):
    async with fake_engine() as engine:
        engine.settings = FIT
        run = Run(tmp_path, [engine], reconnect_s=0.3)
        with pytest.raises(UnfitServer, match=r"model\.name = m here and other at http"):
            async with run.maintained():
                await restart(engine, **{"model.name": "other"})
                await asyncio.Event().wait()


async def test_run_with_min_servers_starts_without_an_unfit_one(tmp_path, said):
    async with fake_engine() as fit, fake_engine() as unfit:
        fit.settings, unfit.settings = FIT, FIT | {"model.name": "other"}
        run = Run(tmp_path, [unfit, fit], min_servers=1)
        async with run.maintained():
            assert [server.up for server in run.servers] == [False, True]
            assert any(f"inference at {unfit.url} is not used: model.name" in line for line in said())
        fit.settings = unfit.settings
        with pytest.raises(UnfitServer, match=r"model\.name = m here"):
            async with Run(tmp_path, [unfit, fit], min_servers=1).maintained():
                pass
