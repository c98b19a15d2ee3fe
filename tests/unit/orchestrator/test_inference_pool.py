"""Awaited, lost, restarted and outdated servers: the recorded version of each server is correct (I1, I5)."""

import asyncio
import itertools
import random
import threading
import time
from types import SimpleNamespace

import pytest

from prime_rl.core.errors import RunError
from prime_rl.core.types import PolicyVersion
from prime_rl.orchestrator.inference import inference_pool, weight_versions
from prime_rl.orchestrator.inference.inference_pool import InferencePool
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
from tests.unit.orchestrator.engine_pools import policy_of, pool_of, server_of
from tests.unit.orchestrator.test_inference_server import PAGE


async def test_lost_slot_of_a_full_server_is_waited_for(tmp_path):
    async with pool_of(tmp_path, slot="alpha") as (paths, policy, changes, engine):
        await changes.switch_to(policy, 1)
        left = itertools.chain([9.0, 30.0], itertools.repeat(0.0))
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


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_lost_server_cancels_its_rollouts(tmp_path, is_restarted):
    """Also requests on a connection that was not closed, of a server that restarted unnoticed and is updated."""

    async def play(server, started):
        async with server.cancel_scope():
            started.set()
            await asyncio.Event().wait()

    async with pool_of(tmp_path, 2) as (_paths, policy, changes, _one, two):
        await changes.switch_to(policy, 3)
        started = asyncio.Event()
        lost = asyncio.create_task(play(policy.servers[1], started))
        await started.wait()
        if is_restarted:
            two.step, two.hash, two.holder = 0, "base", None
        else:
            await two.die()
        with pytest.raises(InferenceServerLost, match="died"):
            async with asyncio.timeout(60):
                await lost
        async with policy.servers[0].cancel_scope():
            pass  # the other one lives
        if is_restarted:
            await changes.until(lambda: policy.servers[1].up)
            assert (two.step, two.holder) == (3, "test-run")


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


async def test_all_servers_lost_ends_the_run(tmp_path, engine):
    with pytest.raises(InferenceServerLost, match=engine.url):
        async with policy_of(RunPaths(tmp_path), [engine], reconnect_seconds=0.1):
            await engine.die()
            await asyncio.Event().wait()


async def test_server_loading_another_version_ends_the_run(tmp_path):
    with pytest.raises(RunError, match="another"):
        async with pool_of(tmp_path) as (paths, _policy, _changes, engine):
            engine.loaded = lambda: {"run_id": "test-run", "branch": 0, "step": engine.step, "hash": "another"}
            publish_version(paths, 1)
            await asyncio.Event().wait()


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
        assert (values["inference/requests_waiting"], values["inference/preemptions"]) == (2, 4)
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


async def test_run_starts_with_min_servers_and_the_others_join_leave_and_return(tmp_path):
    async with fake_engine() as one, fake_engine() as two:
        port = int(two.url.rsplit(":", 1)[1])
        await two.die()
        async with policy_of(RunPaths(tmp_path), [one, two], min_servers=1) as (policy, changes):
            assert policy.available_servers(1) == policy.servers[:1]
            for step in (1, 2):
                await changes.switch_to(policy, step)
                await two.start(port)
                await changes.until(lambda: policy.servers[1].up)
                assert (two.step, two.hash, two.holder) == (step, f"h{step}", "test-run")
                assert policy.servers[1].version == PolicyVersion(0, step)
                await two.die()
                await ask_until(policy, lambda: not policy.servers[1].up)
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


async def test_hanging_server_does_not_delay_the_switch(tmp_path):
    """Its process is stopped: connections stay open without answers."""
    async with pool_of(tmp_path, 2, probe_seconds=0.1) as (paths, policy, changes, _one, two):
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
        await asyncio.sleep(0.1)
        assert (policy.version, engine.calls[1:]) == (0, [])
        hidden.rename(paths.weights(1) / "manifest.json")
        await changes.until(lambda: policy.version == 1)


async def test_failed_switch_is_retried_and_ends_the_run_when_it_never_succeeds(tmp_path, monkeypatch):
    monkeypatch.setattr(inference_pool, "_LEASE_RENEWAL_SECONDS", 0.02)
    with pytest.raises(InferenceError, match="returned 500: no memory"):
        async with pool_of(tmp_path, 2) as (paths, policy, changes, one, two):
            two.failures = 2
            publish_version(paths, 1)
            await changes.until(lambda: policy.version == 1 and policy.servers[1].up)
            assert two.calls.count("update 1") == 3
            one.failures = two.failures = 100
            publish_version(paths, 2)
            await changes.until(lambda: False)


async def test_newer_version_cancels_staging(tmp_path):
    async with pool_of(tmp_path, 2) as (paths, policy, changes, one, two):
        two.staging = Gate(1)
        publish_version(paths, 1)
        await ask_until(policy, lambda: one.calls[1:] == two.calls[1:] == ["stage 1"])
        await changes.switch_to(policy, 2)
        assert one.calls[1:] == ["stage 1", "stage 2", "update 2"], "1 is never put in place"
        await ask_until(policy, lambda: steps_in(paths.weights_dir) == [2])
        assert policy.metrics()["weights/versions_skipped"] == 1


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


async def test_version_with_a_wrong_canary_is_skipped_with_keep_previous(tmp_path):
    """It is detected after the switch: the server rolls back, and its groups are sampled again."""
    said = "model.safetensors is not what was published"
    async with pool_of(tmp_path, on_refused="keep") as (paths, policy, changes, one):
        await changes.switch_to(policy, 1)
        one.switching = Gate(2)
        one.wrong = said
        publish_version(paths, 2)
        await one.switching.wait(2)
        lost = asyncio.create_task(play_on(policy, policy.servers[0], 2))
        one.switching.open[2].set()
        with pytest.raises(InferenceServerLost):
            await lost
        one.wrong = ""
        await changes.until(lambda: policy.weight_versions.refused and policy.servers[0].up)
        assert said in str(policy.weight_versions.refused[2])
        assert (policy.version, one.step, one.hash) == (1, 1, "h1")
        assert policy.metrics()["policy/refused"] == 1
        policy.raise_if_refused(3)  # a newer one may come
        with pytest.raises(RunError, match=f"{said}; without version 2 nothing more can be sampled"):
            policy.raise_if_refused(2)
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


@pytest.mark.extended(after=1)
@pytest.mark.parametrize("seed", range(3))
async def test_any_events_all_servers_reach_the_newest_version(tmp_path, seed):
    """Versions faster than staging, some of them invalid, and servers that are lost and return."""
    rng, last = random.Random(seed), 12
    refused = set(rng.sample(range(2, last), 3))

    async def take_time(step):
        await asyncio.sleep(rng.random() * 0.03)

    async def die_and_come_back(engine):
        await asyncio.sleep(rng.random() * 0.2)
        port = int(engine.url.rsplit(":", 1)[1])
        await engine.die()
        await asyncio.sleep(rng.random() * 0.2)
        await engine.start(port)

    async with pool_of(tmp_path, 3, on_refused="keep") as (paths, policy, changes, *engines):
        for engine in engines:
            engine.refused, engine.staging, engine.switching = refused, take_time, take_time
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(die_and_come_back(engines[1]))
            for step in range(1, last + 1):
                await asyncio.sleep(rng.random() * 0.03)
                publish_version(paths, step)
        await changes.until(lambda: all(s.up and s.version.step == last for s in policy.servers))
        assert [engine.step for engine in engines] == [last] * 3
        await ask_until(policy, lambda: steps_in(paths.weights_dir) == [last])
        updates = [int(call.split()[1]) for call in engines[0].calls if call.startswith("update")]
        assert updates == sorted(set(updates) - refused), "it went forward, once to each"


async def test_start_hanging_directory_is_named_at_the_deadline(tmp_path, monkeypatch):
    hang = threading.Event()
    monkeypatch.setattr(weight_versions, "steps_in", lambda directory: hang.wait(60))
    paths = RunPaths(tmp_path)
    async with fake_engine() as engine, InferenceClient(engine.url, "m", "test-run", timeout_seconds=20) as client:
        policy = InferencePool([server_of(client)], paths, lambda: None)
        try:
            with pytest.raises(RunError, match=f"{paths.weights_dir} did not answer within 0 s"):
                async with asyncio.timeout(60):
                    await policy.start(timeout_seconds=0.1, is_restart=True)
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
    async def start(servers, is_restart):
        pool = InferencePool(servers, RunPaths(tmp_path), lambda: None, reconnect_seconds=1.0)
        await pool.start(5.0, is_restart=is_restart)

    return start


LOST = InferenceServerLost("gone")


@pytest.mark.parametrize(
    ("answers", "is_restart", "error", "message"),
    [
        ([{}, {"policy": [LOST]}], False, RunError, "waited 5.0 s: gone"),  # a new run waits for all servers
        ([{"policy": [LOST]}], True, RunError, "waited 5.0 s: gone"),
        ([{"policy": [InferenceError("no key", 401)]}], True, InferenceError, "no key"),
        ([{"reset": [InferenceError("another run", 409)]}], False, InferenceError, "another run"),
        ([{"reset": [LOST]}], False, RunError, "gone; lost 10 times"),
    ],
)
@virtual_clock
async def test_bring_up_without_enough_servers_raises(join, answers, is_restart, error, message):
    with pytest.raises(error, match=message):
        await join([FakeServer(**given) for given in answers], is_restart)


@virtual_clock
async def test_bring_up_restart_needs_one_server(tmp_path, join):
    there, gone = FakeServer(), FakeServer(policy=[LOST])
    publish_version(RunPaths(tmp_path), 4, 1)
    await join([gone, there], is_restart=True)
    assert there.up and there.version == PolicyVersion(1, 4) and not gone.up
    late = FakeServer(policy=[LOST, InferenceError("starting", 503), OK])
    await join([late, gone], is_restart=True)
    assert late.up


@virtual_clock
async def test_bring_up_server_lost_during_setup_may_return(join):
    server = FakeServer(reset=[LOST, InferenceError("no memory", 500), OK])
    await join([server], is_restart=False)
    assert server.up
