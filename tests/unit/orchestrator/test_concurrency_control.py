"""The concurrency limit follows the load of the server."""

import pytest

from prime_rl.configs.rollouts.options import ConcurrencyConfig
from prime_rl.orchestrator.inference.concurrency_control import (
    ConcurrencyController,
    ServerLoad,
    load_metrics,
    parse_load,
)

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
