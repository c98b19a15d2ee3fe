"""Servers whose settings do not fit those of the run, and the limit of the rollouts at one server."""

import asyncio
from functools import partial

import pytest

from prime_rl.configs.concurrency import ConcurrencyConfig
from prime_rl.core.errors import ConfigError
from prime_rl.liveness.heartbeat_limits import HeartbeatLimits
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.orchestrator.inference.inference_server import (
    ConcurrencyController,
    RequiredSettings,
    ServerLoad,
    UnfitServer,
    parse_load,
)
from prime_rl.storage.paths import RunPaths
from tests.support.fake_engine import FakeEngine, fake_engine, publish_version
from tests.unit.orchestrator.engine_pools import policy_of
from tests.unit.orchestrator.loop_runs import until

FIT = {"model.name": "m", "model.dtype": "float32", "model.max_model_len": 64, "max_lora_rank": None}


@pytest.fixture
def paths(tmp_path):
    return RunPaths(tmp_path)


@pytest.fixture
def required(paths):
    """The settings of an orchestrator of 64 tokens, with those of the trainer, if there is one."""
    return RequiredSettings("m", 64, paths, HeartbeatLimits())


@pytest.fixture
def run(paths, required):
    return partial(policy_of, paths, find_problem=required.find_problem)


def trainer_of(paths, **settings):
    return HeartbeatWriter(paths, "trainer_0", "trainer", settings=settings)


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
async def test_unfit_server_at_the_start_ends_the_run_and_is_not_leased(run, settings, message, engine):
    engine.settings = FIT | settings
    with pytest.raises(UnfitServer) as error:
        async with run([engine]):
            pass
    assert str(error.value).startswith(message.format(url=engine.url))
    assert engine.calls == [] and engine.holder is None, "another run may use it"


async def test_server_that_does_not_fit_the_running_trainer_ends_the_run(paths, required, run, engine):
    engine.settings = FIT | {"model.dtype": "bfloat16"}
    with trainer_of(paths, **{"weight_broadcast.dtype": "float32"}):
        required.read_trainer()
        message = r"float32 at trainer_0 \(pid \d+ on .* and model.dtype = bfloat16 at h"
        with pytest.raises(UnfitServer, match=message):
            async with run([engine]):
                pass


async def test_trainer_that_starts_later_and_does_not_fit_ends_the_run(paths, required, run, engine):
    engine.settings = FIT
    with pytest.raises(ConfigError, match=r"publish = adapter at trainer_0 .* needs a server with enable_lora"):
        async with run([engine]) as (policy, _):
            assert policy.servers[0].up
            with trainer_of(paths, **{"model.lora.rank": 8}):
                required.read_trainer()
            publish_version(paths, 1)
            await asyncio.Event().wait()
    assert engine.calls == ["reset"], "none of its versions is staged"


@pytest.mark.parametrize("settings", [{}, FIT])
async def test_server_without_settings_or_a_trainer_of_an_earlier_run_does_not_count(
    paths, required, run, settings, engine
):
    engine.settings = settings
    with trainer_of(paths, **{"model.lora.rank": 8}):
        pass
    required.read_trainer()
    async with run([engine]) as (policy, _):
        assert policy.servers[0].up


async def test_server_that_returns_with_other_settings_is_not_used_until_it_fits(run, said):
    """The run continues with the other server, and one warning says why."""
    async with fake_engine() as one, fake_engine() as two:
        one.settings = two.settings = FIT
        async with run([one, two]) as (policy, _):
            await restart(two, **{"model.max_model_len": 32})
            await until(lambda: any(f"inference at {two.url} is not used: seq_len" in line for line in said()))
            asked = two.num_policy_requests
            await until(lambda: two.num_policy_requests > asked + 2)
            assert [server.up for server in policy.servers] == [True, False]
            assert two.calls == ["reset"], "that of its first start"
            await restart(two)
            await until(lambda: policy.servers[1].up)
    (refusal,) = [line for line in said() if "is not used" in line]
    assert "model.max_model_len = 32 at" in refusal


async def test_run_without_a_fit_server_ends_with_the_difference(run, engine):
    engine.settings = FIT
    with pytest.raises(UnfitServer, match=r"model\.name = m here and other at http"):
        async with run([engine], reconnect_seconds=0.1):
            await restart(engine, **{"model.name": "other"})
            await asyncio.Event().wait()


async def test_run_with_min_servers_starts_without_an_unfit_one(run, said):
    async with fake_engine() as fit, fake_engine() as unfit:
        fit.settings, unfit.settings = FIT, FIT | {"model.name": "other"}
        async with run([unfit, fit], min_servers=1) as (policy, _):
            assert [server.up for server in policy.servers] == [False, True]
            assert any(f"inference at {unfit.url} is not used: model.name" in line for line in said())
        fit.settings = unfit.settings
        with pytest.raises(UnfitServer, match=r"model\.name = m here"):
            async with run([unfit, fit], min_servers=1):
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
DRAFTS = """
vllm:spec_decode_num_drafts_total{engine="0"} 4.0
vllm:spec_decode_num_drafts_total{engine="1"} 1.0
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 6.0
vllm:spec_decode_num_accepted_tokens_total{engine="1"} 3.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 99.0
"""


def quiet(**values):
    return ServerLoad(**({"running": 10, "waiting": 0, "kv_usage": 0.2, "preemptions": 0} | values))


def test_parse_load_reads_vllm_metrics():
    assert parse_load(PAGE) == ServerLoad(running=7, waiting=1, kv_usage=0.5, preemptions=2, kv_tokens=1600)
    assert parse_load(PAGE + DRAFTS).accepted_per_draft == 1.8
    for page in ("", "vllm:num_requests_running 1.0\n", "something_else 1.0\n"):
        assert parse_load(page) is None, "a metric is missing"


CACHE_FULL, QUEUE = {"kv_usage": 0.95}, {"waiting": 6, "kv_usage": 0.7}


def preempted(count):
    return {"preemptions": count, "kv_usage": 0.8}


@pytest.mark.parametrize(
    ("config", "observed"),
    [
        ({}, [({"kv_tokens": 6400}, 0, 100)]),  # the first limit is the capacity of the cache
        # It grows while it binds and the cache has room.
        ({"initial": 40}, [({}, 20, 40), ({"kv_usage": 0.7}, 40, 40), ({}, 40, 51)]),
        # Preemptions reduce it once; those before the first reading do not count.
        ({"initial": 100}, [(preempted(5), 100, 100), (preempted(6), 100, 80), (preempted(6), 80, 80)]),
        # A full cache reduces it, and a queue that lasts.
        ({"initial": 100}, [(CACHE_FULL, 100, 90), (QUEUE, 90, 90), (QUEUE, 90, 90), (QUEUE, 90, 81)]),
        ({"initial": 10, "min": 9, "max": 11}, [({}, 10, 11), ({"kv_usage": 1.0}, 8, 9)]),
    ],
)
def test_concurrency_limit_follows_the_load(config, observed):
    """Readings of a server, rollouts in flight, and the limit after it."""
    limit = ConcurrencyController(ConcurrencyConfig(**{"initial": None, **config}), seq_len=64)
    assert "initial" in config or limit.limit == float("inf")
    for values, in_flight, expected in observed:
        limit.observe(quiet(**values), in_flight)
        assert limit.limit == expected
