"""Awaited, lost, restarted and outdated servers: the recorded version of each server is correct (I1, I5)."""

import asyncio
import random
import threading
import time
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace

import pytest

from prime_rl.configs.concurrency import ConcurrencyConfig
from prime_rl.core.errors import RunError
from prime_rl.core.types import PolicyVersion
from prime_rl.orchestrator.inference.inference_pool import InferencePool
from prime_rl.orchestrator.inference.inference_server import ConcurrencyController, InferenceServer
from prime_rl.orchestrator.inference.weight_versions import InvalidWeights
from prime_rl.rollouts.clients.inference_client import (
    InferenceClient,
    InferenceError,
    InferenceServerLost,
    LoadedVersion,
)
from prime_rl.storage.paths import RunPaths, steps_in
from tests.support.fake_engine import fake_engine, publish_version
from tests.support.virtual_clock import virtual_clock
from tests.unit.orchestrator.test_inference_server import PAGE


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


def server_of(client, limit=None):
    return InferenceServer(client, ConcurrencyController(ConcurrencyConfig(initial=limit), seq_len=64))


@asynccontextmanager
async def policy_of(paths, engines, limit=None, probe_seconds=None, slot=None, **options):
    changes = Changes()
    clients = [
        InferenceClient(fake.url, "m", "test-run", timeout_seconds=20, probe_seconds=probe_seconds, slot=slot)
        for fake in engines
    ]
    servers = [server_of(client, limit) for client in clients]
    policy = InferencePool(servers, paths, changes.event.set, **options)
    stop = asyncio.Event()
    for client in clients:
        await client.__aenter__()
    try:
        await policy.start(timeout_seconds=60)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(policy.follow_weights(stop))
            tasks.create_task(policy.maintain(stop))
            try:
                yield policy, changes
            finally:
                stop.set()
    finally:
        for client in clients:
            await client.__aexit__()


@asynccontextmanager
async def pool_of(tmp_path, count=1, **options):
    """A pool of `count` fake engines; yields its paths, itself, its changes and the engines."""
    paths = RunPaths(tmp_path)
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(fake_engine()) for _ in range(count)]
        policy, changes = await stack.enter_async_context(policy_of(paths, engines, **options))
        yield paths, policy, changes, *engines


async def test_lost_server_is_taken_out_and_rejoins_with_the_current_version(tmp_path):
    async with pool_of(tmp_path, 2) as (_paths, policy, changes, one, two):
        await changes.switch_to(policy, 1)
        port = int(two.url.rsplit(":", 1)[1])
        await two.die()
        policy.take_out(policy.servers[1])
        await changes.switch_to(policy, 2)
        assert [server.client.url for server in policy.available_servers(1)] == [one.url]
        assert two.step == 1
        await two.start(port)
        await changes.until(lambda: policy.servers[1].up)
        assert (two.step, two.hash, two.holder) == (2, "h2", "test-run")
        assert policy.servers[1].version == PolicyVersion(0, 2)


async def test_lost_slot_of_a_full_server_is_waited_for(tmp_path):
    async with pool_of(tmp_path, slot="alpha") as (paths, policy, changes, engine):
        await changes.switch_to(policy, 1)
        left = iter([9.0, 30.0, 0.0])
        engine.holder, engine.lease_left = "another run", lambda: next(left)
        publish_version(paths, 2)
        await changes.until(lambda: policy.servers[0].up and policy.version == 2)
        assert engine.calls[-2:] == ["reset", "update 2"]
        assert engine.holder == "test-run"


async def test_wait_for_a_slot_delays_neither_other_servers_nor_the_end(tmp_path):
    async with asyncio.timeout(20), pool_of(tmp_path, 2, slot="alpha") as (_paths, policy, changes, _, full):
        await changes.switch_to(policy, 1)
        waiting = asyncio.Event()
        full.holder, full.lease_left = "another run", lambda: waiting.set() or 30.0
        await changes.switch_to(policy, 2)
        await waiting.wait()
        await changes.switch_to(policy, 3)
        assert [server.up for server in policy.servers] == [True, False]


async def test_restarted_server_is_detected_and_updated(tmp_path):
    async with pool_of(tmp_path) as (_paths, policy, changes, engine):
        await changes.switch_to(policy, 3)
        engine.step, engine.hash, engine.holder = 0, "base", None
        await changes.until(lambda: engine.step == 3 and policy.servers[0].up)
        assert engine.holder == "test-run"


@pytest.mark.parametrize("reborn", [False, True])
async def test_lost_server_cancels_its_rollouts(tmp_path, reborn):
    """Also requests on a connection that was not closed."""

    async def play(server, started):
        async with server.cancel_scope():
            started.set()
            await asyncio.Event().wait()

    async with pool_of(tmp_path, 2) as (_paths, policy, _, _one, two):
        started = asyncio.Event()
        lost = asyncio.create_task(play(policy.servers[1], started))
        await started.wait()
        if reborn:
            two.step, two.hash, two.holder = 5, "other", None
        else:
            await two.die()
        with pytest.raises(InferenceServerLost, match="died"):
            async with asyncio.timeout(60):
                await lost
        async with policy.servers[0].cancel_scope():
            pass  # the other one lives


async def test_false_alarm_does_not_reload_the_server(tmp_path):
    async with pool_of(tmp_path) as (_paths, policy, changes, engine):
        resets = []
        original = engine.reload
        engine.reload = lambda request: resets.append(1) or original(request)
        policy.take_out(policy.servers[0])
        assert policy.available_servers(1) == []
        await changes.until(lambda: policy.servers[0].up)
        assert resets == []


async def test_wait_for_server_lost_version_during_back_off_is_not_chosen(tmp_path):
    """It fails and restarts behind a proxy during its back-off, so it samples from the base model."""
    async with pool_of(tmp_path) as (_paths, policy, changes, engine):
        await changes.switch_to(policy, 2)
        server, loaded = policy.servers[0], asyncio.Event()

        async def wait(step):
            await loaded.wait()

        server.backoff_until = time.monotonic() + 3600
        waiting = asyncio.create_task(policy.wait_for_server(2))
        engine.switching = wait
        engine.step, engine.hash, engine.holder = 0, "base", None
        await ask_until(policy, lambda: server.version.step != 2)
        server.backoff_until = 0.0
        await policy._notify()
        await server.client.peek_policy()  # time for a choice that should not be
        assert not waiting.done(), "no server samples from version 2"
        assert policy.version == 2, "no server is up: what it was, and not that of the base model"
        loaded.set()
        async with asyncio.timeout(60):
            assert (await waiting).version.step == 2


async def test_wait_for_server_waits_for_the_version(tmp_path):
    async with pool_of(tmp_path) as (paths, policy, _, _one):
        waiting = asyncio.create_task(policy.wait_for_server(1))
        async with asyncio.timeout(60):
            assert await policy.wait_for_server(0) is policy.servers[0]
            assert not waiting.done()
            publish_version(paths, 1)
            assert (await waiting).version.step == 1


async def test_wait_for_server_available_server_beats_one_in_back_off(tmp_path):
    async with pool_of(tmp_path, 2) as (_paths, policy, _, _one, _two):
        policy.take_out(policy.servers[1])
        policy.servers[0].backoff_until = time.monotonic() + 3600
        async with asyncio.timeout(60):
            assert await policy.wait_for_server(0) is policy.servers[1], "it came back meanwhile"


def first_of(error):
    """The first error in nested groups."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


async def test_all_servers_lost_ends_the_run(tmp_path):
    with pytest.raises(ExceptionGroup) as caught:
        async with fake_engine() as engine, policy_of(RunPaths(tmp_path), [engine], reconnect_seconds=0.3):
            await engine.die()
            await asyncio.Event().wait()
    assert isinstance(error := first_of(caught.value), InferenceServerLost)
    assert engine.url in str(error)


async def test_server_loading_another_version_ends_the_run(tmp_path):
    paths = RunPaths(tmp_path)
    with pytest.raises(ExceptionGroup) as caught:
        async with fake_engine() as engine, policy_of(paths, [engine]):
            engine.loaded = lambda: {"run_id": "test-run", "branch": 0, "step": engine.step, "hash": "another"}
            publish_version(paths, 1)
            await asyncio.Event().wait()
    (error,) = caught.value.exceptions
    assert isinstance(error, RunError)
    assert "another" in str(error)


async def test_invalid_weights_end_the_run_with_the_servers_error(tmp_path):
    """Changed files or a wrong canary: one error, and the version stays."""
    paths = RunPaths(tmp_path)
    said = f"{paths.weights(1)}/model.safetensors is not what was published: tensor a has another hash"
    async with fake_engine() as engine:
        engine.refusal = said
        with pytest.raises(ExceptionGroup) as caught:
            async with policy_of(paths, [engine]) as (policy, _):
                publish_version(paths, 1)
                await asyncio.Event().wait()
    (error,) = caught.value.exceptions
    assert isinstance(error, RunError)
    assert str(error) == f"{engine.url}/stage_weights returned 400: {said}"
    assert (policy.version, engine.step) == (0, 0)


async def test_switch_metrics_report_the_slowest_server(tmp_path):
    async with pool_of(tmp_path, 2) as (_paths, policy, changes, one, two):
        assert "canary/max_logprob_difference" not in policy.metrics()
        one.switch = {"stage_s": 2.0, "pause_s": 0.1, "canary_difference": 1e-6}
        two.switch = {"stage_s": 1.0, "pause_s": 0.3, "canary_difference": 3e-6}
        await changes.switch_to(policy, 1)
        metrics = policy.metrics()
        assert (metrics["time/weight_update_stage"], metrics["time/weight_update_pause"]) == (2.0, 0.3)
        assert metrics["canary/max_logprob_difference"] == 3e-6


@pytest.mark.parametrize(("adapts", "limit"), [(False, None), (True, 50)])
async def test_observed_load_is_reported_and_adapts_the_limit_on_request(tmp_path, monkeypatch, adapts, limit):
    paths, stop = RunPaths(tmp_path), asyncio.Event()
    async with fake_engine() as one, fake_engine() as two, policy_of(paths, [one, two]) as (pool, _):
        assert "inference/kv_usage/max" not in pool.metrics()
        one.metrics, two.metrics = PAGE, PAGE.replace("0.5", "0.75")
        answers = []

        async def metrics(client, ask=InferenceClient.metrics):
            answers.append(await ask(client))
            if len(answers) == 2:
                stop.set()
            return answers[-1]

        monkeypatch.setattr(InferenceClient, "metrics", metrics)
        pool.servers[0].in_flight, pool.servers[1].in_flight = 4, 3
        assert pool.available_servers(1) == pool.servers[::-1], "the least loaded first"
        await pool.observe_load(stop, 0.001, adapts)
        values = pool.metrics()
        assert (values["inference/kv_usage/mean"], values["inference/kv_usage/max"]) == (0.625, 0.75)
        assert (values["inference/in_flight"], values["inference/requests_running"]) == (7, 14)
        assert pool.concurrency_limit == limit
        pool.take_out(pool.servers[1])
        assert pool.metrics()["inference/kv_usage/max"] == 0.5


async def test_has_capacity_follows_the_controller(tmp_path):
    async with fake_engine() as engine, policy_of(RunPaths(tmp_path), [engine], limit=10) as (policy, _):
        server = policy.servers[0]
        server.in_flight = 4
        assert policy.available_servers(6) == [server]
        assert policy.available_servers(7) == []
        server.in_flight = 0
        assert policy.available_servers(99) == [server], "a group larger than the limit is played alone"


class Gate:
    """Blocks a fake engine's `staging` or `switching` of each step until the test releases it."""

    def __init__(self, *closed):
        self.open = {step: asyncio.Event() for step in closed}
        self.reached = {step: asyncio.Event() for step in closed}

    async def wait(self, step):
        async with asyncio.timeout(60):
            await self.reached[step].wait()

    async def __call__(self, step):
        if step in self.open:
            self.reached[step].set()
            await self.open[step].wait()


async def ask_until(policy, condition):
    """Let other tasks run until `condition`; not every change is signalled."""
    async with asyncio.timeout(60):
        while not condition():
            await policy.servers[0].client.peek_policy()


async def test_run_starts_with_min_servers_and_the_others_join_and_leave(tmp_path):
    paths = RunPaths(tmp_path)
    async with fake_engine() as one, fake_engine() as two:
        port = int(two.url.rsplit(":", 1)[1])
        await two.die()
        async with policy_of(paths, [one, two], min_servers=1) as (policy, changes):
            assert policy.available_servers(1) == policy.servers[:1]
            await changes.switch_to(policy, 1)
            await two.start(port)
            await changes.until(lambda: policy.servers[1].up)
            assert (two.step, two.holder) == (1, "test-run")
            await two.die()
            await ask_until(policy, lambda: not policy.servers[1].up)
            await changes.switch_to(policy, 2)
            await two.start(port)


async def test_switch_waits_until_all_servers_staged(tmp_path):
    async with pool_of(tmp_path, 2) as (paths, policy, changes, one, two):
        two.staging = Gate(1)
        publish_version(paths, 1)
        await ask_until(policy, lambda: len(one.calls) == len(two.calls) == 2)
        for _ in range(20):
            await policy.servers[0].client.policy()  # time for a switch that should not be
        assert (one.calls[1:], two.calls[1:]) == (["stage 1"], ["stage 1"])
        assert policy.available_servers(1) == policy.servers, "they sample meanwhile"
        two.staging.open[1].set()
        await changes.until(lambda: policy.version == 1)
        assert one.calls[1:] == two.calls[1:] == ["stage 1", "update 1"]


async def test_server_lost_while_staging_is_left_out(tmp_path):
    """Also if its connection stays open: `maintain` detects the loss, and the switch does not wait."""
    async with pool_of(tmp_path, 2) as (paths, policy, changes, _one, two):
        two.staging = Gate(1)
        publish_version(paths, 1)
        await two.staging.wait(1)
        policy.take_out(policy.servers[1])
        policy.servers[1].cancel_all()
        await changes.until(lambda: policy.servers[0].version.step == 1)
        two.staging.open[1].set()
        await changes.until(lambda: policy.servers[1].up and policy.version == 1)


async def test_hanging_server_delays_the_switch_by_one_probe(tmp_path):
    """Its process is stopped: connections stay open without answers."""
    async with pool_of(tmp_path, 2, probe_seconds=0.3) as (paths, policy, changes, _one, two):
        two.deaf = asyncio.Event()
        publish_version(paths, 1)
        await changes.until(lambda: policy.servers[0].version.step == 1)
        assert not policy.servers[1].up
        two.deaf.set()
        await changes.until(lambda: policy.servers[1].up and policy.version == 1)


async def test_version_with_late_visible_files_is_waited_for(tmp_path):
    """On a network file system; on a local disk it is invalid at once."""
    paths = RunPaths(tmp_path, fs_consistency_timeout_seconds=20)
    async with fake_engine() as engine, policy_of(paths, [engine]) as (policy, changes):
        hidden = tmp_path / "hidden"
        publish_version(RunPaths(tmp_path / "elsewhere"), 1)
        paths.weights_dir.mkdir(exist_ok=True)
        (tmp_path / "elsewhere/weights/step_1/manifest.json").rename(hidden)
        (tmp_path / "elsewhere/weights/step_1").rename(paths.weights(1))
        await asyncio.sleep(0.3)
        assert (policy.version, engine.calls[1:]) == (0, [])
        hidden.rename(paths.weights(1) / "manifest.json")
        await changes.until(lambda: policy.version == 1)


async def test_failed_switch_is_retried_and_ends_the_run_when_it_never_succeeds(tmp_path, monkeypatch):
    monkeypatch.setattr("prime_rl.orchestrator.inference.inference_pool._LEASE_RENEWAL_SECONDS", 0.05)
    with pytest.raises(ExceptionGroup) as caught:
        async with pool_of(tmp_path, 2) as (paths, policy, changes, one, two):
            two.failures = 2
            publish_version(paths, 1)
            await changes.until(lambda: policy.version == 1 and policy.servers[1].up)
            assert two.calls.count("update 1") == 3
            one.failures = two.failures = 100
            publish_version(paths, 2)
            await changes.until(lambda: False)
    assert "returned 500: no memory" in str(first_of(caught.value))


async def test_newer_version_cancels_staging(tmp_path):
    async with pool_of(tmp_path, 2) as (paths, policy, changes, one, two):
        two.staging = Gate(1)
        publish_version(paths, 1)
        await ask_until(policy, lambda: one.calls[1:] == two.calls[1:] == ["stage 1"])
        await changes.switch_to(policy, 2)
        assert one.calls[1:] == ["stage 1", "stage 2", "update 2"], "1 is never put in place"
        await ask_until(policy, lambda: steps_in(paths.weights_dir) == [2])
        assert policy.metrics()["weights/versions_skipped"] == 1


async def test_in_memory_version_replaced_by_newer_is_skipped(tmp_path):
    """Without a newer version such an error ends the run: the trainer drops only replaced versions."""
    paths = RunPaths(tmp_path)
    async with fake_engine() as engine:
        policy = InferencePool([server_of(InferenceClient(engine.url, "m", "test-run"))], paths, lambda: None)
        publish_version(paths, 1, transfer={"type": "nccl"})
        with pytest.raises(InvalidWeights, match="no longer"):
            await policy.weight_versions.refuse(1, InvalidWeights("no longer in memory"))
        publish_version(paths, 2)
        await policy.weight_versions.refuse(1, InvalidWeights("no longer in memory"))
        publish_version(paths, 3)
        with pytest.raises(InvalidWeights, match="a flipped byte"):
            await policy.weight_versions.refuse(2, InvalidWeights("a flipped byte"))


async def test_switch_in_progress_is_not_cancelled(tmp_path):
    async with pool_of(tmp_path) as (paths, policy, changes, one):
        one.switching = Gate(1)
        publish_version(paths, 1)
        await one.switching.wait(1)
        publish_version(paths, 2)
        waiting = asyncio.create_task(policy.wait_until_acknowledged(policy.servers[0], 1))
        await policy.servers[0].client.policy()
        assert policy.version == 0, "it samples from 1, and nobody has said so"
        assert not waiting.done()
        one.switching.open[1].set()
        await changes.until(lambda: policy.version == 2)
        assert one.calls[1:] == ["stage 1", "update 1", "stage 2", "update 2"]
        await waiting


async def test_pinned_evaluation_delays_the_newest_version_once(tmp_path):
    """Versions published meanwhile are staged; after the evaluation the servers switch to the newest."""
    paths, held, let_go = RunPaths(tmp_path), [], asyncio.Event()

    async def before_switch():
        held.append(1)
        await let_go.wait()

    async with fake_engine() as one, policy_of(paths, [one]) as (policy, changes):
        policy.before_switch = before_switch
        for step in (1, 2, 3):
            publish_version(paths, step)
            await ask_until(policy, lambda step=step: f"stage {step}" in one.calls and held)
        assert (len(held), policy.version) == (1, 0)
        let_go.set()
        await changes.until(lambda: policy.version == 3)
        assert [call for call in one.calls if "update" in call] == ["update 3"]


@pytest.mark.parametrize("fault", ["refusal", "wrong"])
async def test_invalid_version_is_skipped_with_keep_previous(tmp_path, fault):
    """A wrong canary is detected after the switch: the server rolls back, and its groups are sampled again."""
    paths, said = RunPaths(tmp_path), "model.safetensors is not what was published"
    async with fake_engine() as one, policy_of(paths, [one], on_refused="keep") as (policy, changes):
        await changes.switch_to(policy, 1)
        gate = Gate(2)

        async def switching(step):
            one.wrong = said if step == 2 else ""
            await gate(step)

        if fault == "refusal":
            one.refusal = said
        else:
            one.switching = switching
        publish_version(paths, 2)
        if fault == "wrong":
            await gate.wait(2)
            lost = asyncio.create_task(play_on(policy, policy.servers[0], 2))
            gate.open[2].set()
            with pytest.raises(InferenceServerLost):
                await lost
        await changes.until(lambda: policy.weight_versions.refused and policy.servers[0].up)
        assert said in str(policy.weight_versions.refused[2])
        assert (policy.version, one.step, one.hash) == (1, 1, "h1")
        assert policy.metrics()["policy/refused"] == 1
        policy.raise_if_refused(3)  # a newer one may come
        with pytest.raises(RunError, match=f"{said}; without version 2 nothing more can be sampled"):
            policy.raise_if_refused(2)
        one.refusal = ""
        await changes.switch_to(policy, 3)
        assert one.calls.count("stage 2") == 1, "it is not asked for again"
        assert policy.metrics()["weights/versions_skipped"] == 0


async def play_on(policy, server, newest):
    """Run a rollout whose last token has a version that its server did not acknowledge."""
    async with server.cancel_scope():
        await policy.wait_until_acknowledged(server, newest)


async def test_version_rejected_by_one_server_is_used_by_none(tmp_path):
    async with pool_of(tmp_path, 2, on_refused="keep") as (paths, policy, changes, one, two):
        two.refusal = "its disk is bad"
        publish_version(paths, 1)
        await changes.until(lambda: 1 in policy.weight_versions.refused)
        two.refusal = ""
        await changes.switch_to(policy, 2)
        assert one.calls[1:] == ["stage 1", "stage 2", "update 2"]


async def test_version_files_stay_while_retained_or_sampled(tmp_path):
    async with pool_of(tmp_path) as (paths, policy, changes, _one):
        for step in (1, 2, 3):
            await changes.switch_to(policy, step)
            if step == 2:
                policy.weight_versions.retain_files(2)
        await changes.switch_to(policy, 4)
        publish_version(paths, 5)
        await ask_until(policy, lambda: steps_in(paths.weights_dir) == [2, 5])
        policy.weight_versions.release_files(2)
        publish_version(paths, 6)
        await ask_until(policy, lambda: steps_in(paths.weights_dir) == [6])


async def test_server_rejecting_the_newest_version_stays_out_until_a_newer_one(tmp_path):
    async with pool_of(tmp_path, 2, on_refused="keep") as (paths, policy, changes, _one, two):
        for step in (1, 2):
            await changes.switch_to(policy, step)
        port = int(two.url.rsplit(":", 1)[1])
        await two.die()
        two.refused = {2}
        await two.start(port)
        await ask_until(policy, lambda: policy.servers[1].rejected_step == 2)
        assert (policy.version, [server.up for server in policy.servers]) == (2, [True, False])
        publish_version(paths, 3)
        await changes.until(lambda: policy.servers[1].up and policy.version == 3)
        assert not policy.weight_versions.refused


@pytest.mark.parametrize("seed", range(3))
async def test_any_events_all_servers_reach_the_newest_version(tmp_path, seed):
    """Versions faster than staging, some of them invalid, and servers that are lost and return."""
    rng, paths, last = random.Random(seed), RunPaths(tmp_path), 20
    refused = set(rng.sample(range(2, last), 5))

    async def take_time(step):
        await asyncio.sleep(rng.random() * 0.05)

    async def die_and_come_back(engine):
        await asyncio.sleep(rng.random() * 0.5)
        port = int(engine.url.rsplit(":", 1)[1])
        await engine.die()
        await asyncio.sleep(rng.random() * 0.5)
        await engine.start(port)

    async with (
        fake_engine() as one,
        fake_engine() as two,
        fake_engine() as three,
        policy_of(paths, [one, two, three], on_refused="keep") as (policy, changes),
    ):
        engines = [one, two, three]
        for engine in engines:
            engine.refused, engine.staging, engine.switching = refused, take_time, take_time
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(die_and_come_back(two))
            for step in range(1, last + 1):
                await asyncio.sleep(rng.random() * 0.06)
                publish_version(paths, step)
        await changes.until(lambda: all(s.up and s.version.step == last for s in policy.servers))
        assert [engine.step for engine in engines] == [last] * 3
        await ask_until(policy, lambda: steps_in(paths.weights_dir) == [last])
        updates = [int(call.split()[1]) for call in one.calls if call.startswith("update")]
        assert updates == sorted(set(updates) - refused), "it went forward, once to each"


async def test_start_hanging_directory_is_named_at_the_deadline(tmp_path, monkeypatch):
    hang = threading.Event()
    monkeypatch.setattr("prime_rl.orchestrator.inference.weight_versions.steps_in", lambda directory: hang.wait(60))
    paths = RunPaths(tmp_path)
    async with fake_engine() as engine, InferenceClient(engine.url, "m", "test-run", timeout_seconds=20) as client:
        policy = InferencePool([server_of(client)], paths, lambda: None)
        try:
            with pytest.raises(RunError, match=f"{paths.weights_dir} did not answer within 0 s"):
                async with asyncio.timeout(60):
                    await policy.start(timeout_seconds=0.3, is_restart=True)
        finally:
            hang.set()


async def test_start_restart_loads_the_newest_valid_version(tmp_path):
    """It never samples from the base model (version 0) in between."""
    paths = RunPaths(tmp_path)
    for step in (4, 5, 6):
        publish_version(paths, step)
    async with fake_engine() as engine, InferenceClient(engine.url, "m", "test-run", timeout_seconds=20) as client:
        engine.refused = {6}
        server = server_of(client)
        policy = InferencePool([server], paths, lambda: None, on_refused="keep")
        await policy.start(timeout_seconds=20, is_restart=True)
        assert (policy.version, engine.step, server.up) == (5, 5, True)
        ending = InferencePool([server], paths, lambda: None, on_refused="fail")
        with pytest.raises(InvalidWeights):
            await ending.start(timeout_seconds=20, is_restart=True)


# --- servers for which a run waits before it dispatches groups ------------------------------------------------------


OK = LoadedVersion(PolicyVersion(0, 0), "base")


class FakeServer:
    """A server that returns the given answers in order, and repeats the last one."""

    def __init__(self, policy=(OK,), reset=(OK,)):
        self.up, self.version, self.loaded = False, None, None
        self.switch_lock, self._left = asyncio.Lock(), {"policy": list(policy), "reset": list(reset)}
        self.client = SimpleNamespace(
            url="http://server", policy=lambda: self._answer("policy"), reset=lambda: self._answer("reset")
        )

    async def _answer(self, request):
        left = self._left[request]
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def policy(self):
        return await self.client.policy()

    async def wait_until_reachable(self, timeout_seconds):
        try:
            await self._answer("policy")
        except InferenceServerLost as error:
            raise RunError(f"waited {timeout_seconds} s: {error}") from None

    async def load(self, published):
        return LoadedVersion(published.version, "h")


@pytest.fixture
def join(tmp_path):
    async def start(servers, is_restart, timeout_seconds=5.0):
        pool = InferencePool(servers, RunPaths(tmp_path), lambda: None, reconnect_seconds=1.0)
        await pool.start(timeout_seconds, is_restart=is_restart)

    return start


@virtual_clock
async def test_bring_up_new_run_waits_for_all_servers(join):
    there, gone = FakeServer(), FakeServer(policy=[InferenceServerLost("gone")])
    with pytest.raises(RunError, match="waited 5"):
        await join([there, gone], is_restart=False)


@virtual_clock
async def test_bring_up_restart_needs_one_server(tmp_path, join):
    there, gone = FakeServer(), FakeServer(policy=[InferenceServerLost("gone")])
    publish_version(RunPaths(tmp_path), 4, 1)
    await join([gone, there], is_restart=True)
    assert there.up and there.version == PolicyVersion(1, 4) and not gone.up


@virtual_clock
async def test_bring_up_restart_waits_for_the_first_server(join):
    late = FakeServer(policy=[InferenceServerLost("not yet"), InferenceError("starting", 503), OK])
    await join([late, FakeServer(policy=[InferenceServerLost("gone")])], is_restart=True)
    assert late.up


@virtual_clock
async def test_bring_up_no_answer_in_time_raises(join):
    with pytest.raises(RunError, match=r"waited 0\.1 s: gone"):
        await join([FakeServer(policy=[InferenceServerLost("gone")])], is_restart=True, timeout_seconds=0.1)


@virtual_clock
async def test_bring_up_rejection_raises_without_waiting(join):
    with pytest.raises(InferenceError, match="no key"):
        await join([FakeServer(policy=[InferenceError("no key", 401)])], is_restart=True)
    with pytest.raises(InferenceError, match="another run"):
        await join([FakeServer(reset=[InferenceError("another run", 409)])], is_restart=False)


@virtual_clock
async def test_bring_up_server_lost_during_setup_may_return(join):
    server = FakeServer(reset=[InferenceServerLost("died"), InferenceError("no memory", 500), OK])
    await join([server], is_restart=False)
    assert server.up
    with pytest.raises(RunError, match="died; lost 10 times"):
        await join([FakeServer(reset=[InferenceServerLost("died")])], is_restart=False)
