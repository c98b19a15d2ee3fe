"""Servers whose settings do not fit those of the run, and the limit of the rollouts at one server."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from prime_rl.configs.concurrency import ConcurrencyConfig
from prime_rl.core.errors import ConfigError, first_exception
from prime_rl.liveness.heartbeat_limits import HeartbeatLimits
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.orchestrator.inference.inference_pool import InferencePool
from prime_rl.orchestrator.inference.inference_server import (
    ConcurrencyController,
    InferenceServer,
    RequiredSettings,
    ServerLoad,
    UnfitServer,
    load_metrics,
    parse_load,
)
from prime_rl.orchestrator.inference.weight_versions import PublishedVersion
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
        self.clients = [InferenceClient(engine.url, "m", "test-run", timeout_seconds=20) for engine in engines]
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
                await self.pool.start(timeout_seconds=60)
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


async def test_server_that_does_not_fit_the_running_trainer_ends_the_run(tmp_path):
    async with fake_engine() as engine:
        engine.settings = FIT | {"model.dtype": "bfloat16"}
        run = Run(tmp_path, [engine])
        with run.trainer(**{"weight_broadcast.dtype": "float32"}):
            run.required.read_trainer()
            message = r"float32 at trainer_0 \(pid \d+ on .* and model.dtype = bfloat16 at h"
            with pytest.raises(UnfitServer, match=message):
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


@pytest.mark.parametrize("settings", [{}, FIT])
async def test_server_without_settings_or_a_trainer_of_an_earlier_run_does_not_count(tmp_path, settings):
    async with fake_engine() as engine:
        engine.settings = settings
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
        run = Run(tmp_path, [engine], reconnect_seconds=0.3)
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


# --- the concurrency limit ------------------------------------------------------------------------------------------


PAGE = """
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:num_preemptions_total{engine="0",model_name="m"} 2.0
vllm:num_preemptions_created{engine="0",model_name="m"} 1.7e+09
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0
"""


def controller(initial=None, **values):
    return ConcurrencyController(ConcurrencyConfig(initial=initial, **values), seq_len=64)


def quiet(**values):
    return ServerLoad(**({"running": 10, "waiting": 0, "kv_usage": 0.2, "preemptions": 0} | values))


def test_parse_load_reads_vllm_metrics():
    assert parse_load(PAGE) == ServerLoad(running=7, waiting=1, kv_usage=0.5, preemptions=2, kv_tokens=1600)


def test_load_metrics_sum_the_servers():
    loads = [quiet(running=3, waiting=1, kv_usage=0.2, preemptions=5), quiet(running=4, kv_usage=0.6)]
    assert load_metrics(loads) == pytest.approx(
        {
            "inference/kv_usage/mean": 0.4, "inference/kv_usage/max": 0.6, "inference/requests_running": 7,
            "inference/requests_waiting": 1, "inference/preemptions": 5,
        }
    )  # fmt: skip
    assert load_metrics([]) == {}


@pytest.mark.parametrize("page", ["", "vllm:num_requests_running 1.0\n", "something_else 1.0\n"])
def test_parse_load_missing_metric_is_none(page):
    assert parse_load(page) is None


def test_concurrency_first_limit_is_the_cache_capacity():
    one = controller()
    assert one.limit == float("inf")
    one.observe(quiet(kv_tokens=6400), in_flight=0)
    assert one.limit == 100


def test_concurrency_binding_limit_grows_with_free_cache():
    one = controller(initial=40)
    one.observe(quiet(), in_flight=20)
    assert one.limit == 40, "half of it is unused"
    one.observe(quiet(kv_usage=0.7), in_flight=40)
    assert one.limit == 40, "the cache has no room to spare"
    one.observe(quiet(), in_flight=40)
    assert one.limit == 51


def test_concurrency_preemptions_reduce_the_limit_once():
    one = controller(initial=100)
    one.observe(quiet(preemptions=5, kv_usage=0.8), in_flight=100)
    assert one.limit == 100, "what happened before is not ours"
    one.observe(quiet(preemptions=6, kv_usage=0.8), in_flight=100)
    assert one.limit == 80
    one.observe(quiet(preemptions=6, kv_usage=0.8), in_flight=80)
    assert one.limit == 80


def test_concurrency_full_cache_or_lasting_queue_reduces_the_limit():
    one = controller(initial=100)
    one.observe(quiet(kv_usage=0.95), in_flight=100)
    assert one.limit == 90
    for _ in range(2):
        one.observe(quiet(waiting=6, kv_usage=0.7), in_flight=90)
    assert one.limit == 90, "a burst queues for a moment"
    one.observe(quiet(waiting=6, kv_usage=0.7), in_flight=90)
    assert one.limit == 81


def test_concurrency_limit_stays_in_the_configured_range():
    one = controller(initial=10, min=9, max=11)
    one.observe(quiet(), in_flight=10)
    assert one.limit == 11
    one.observe(quiet(kv_usage=1.0), in_flight=8)
    assert one.limit == 9
