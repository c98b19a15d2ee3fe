"""Servers that die, come back, or were never told: what samples from which version is always known (I1, I5)."""

import asyncio
import random
from contextlib import asynccontextmanager

import pytest

from prime_rl.configs.concurrency import ConcurrencyConfig
from prime_rl.errors import RunError
from prime_rl.orchestrator.concurrency import ConcurrencyController
from prime_rl.orchestrator.engine import Engine, EngineLost
from prime_rl.orchestrator.policy import Policy
from prime_rl.orchestrator.server import Server, VersionRefused
from prime_rl.run.paths import RunPaths, steps_in
from prime_rl.types import PolicyVersion
from tests.support.fake_engine import fake_engine, publish_version


class Changes:
    """Wakes whoever waits whenever the policy says that something has changed."""

    def __init__(self):
        self.event = asyncio.Event()

    async def until(self, condition):
        async with asyncio.timeout(20):
            while not condition():
                self.event.clear()
                await self.event.wait()


@asynccontextmanager
async def policy_of(paths, engines, limit=None, probe_s=None, **options):
    changes = Changes()
    clients = [Engine(fake.url, "m", "test-run", timeout_s=20, probe_s=probe_s) for fake in engines]
    config = ConcurrencyConfig(initial=limit)
    servers = [Server(client, ConcurrencyController(config, seq_len=64)) for client in clients]
    policy = Policy(servers, paths, changes.event.set, **options)
    stop = asyncio.Event()
    for client in clients:
        await client.__aenter__()
    try:
        await policy.start(timeout_s=10)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(policy.watch(stop))
            tasks.create_task(policy.keep(stop))
            try:
                yield policy, changes
            finally:
                stop.set()
    finally:
        for client in clients:
            await client.__aexit__()


async def test_a_dead_server_is_taken_out_and_rejoins_at_the_current_version(tmp_path):
    paths = RunPaths(tmp_path)
    async with fake_engine() as one, fake_engine() as two, policy_of(paths, [one, two]) as (policy, changes):
        publish_version(paths, 1)
        await changes.until(lambda: policy.version == 1)
        port = int(two.url.rsplit(":", 1)[1])
        await two.die()
        policy.suspect(policy.servers[1])
        publish_version(paths, 2)
        await changes.until(lambda: policy.version == 2)
        assert [server.engine.url for server in policy.by_load(1)] == [one.url]
        assert two.step == 1
        await two.start(port)
        await changes.until(lambda: policy.servers[1].up)
        assert (two.step, two.hash, two.holder) == (2, "h2", "test-run")
        assert policy.servers[1].version == PolicyVersion(0, 2)


async def test_a_server_that_was_started_again_unnoticed_is_brought_up_to_date(tmp_path):
    paths = RunPaths(tmp_path)
    async with fake_engine() as engine, policy_of(paths, [engine]) as (policy, changes):
        publish_version(paths, 3)
        await changes.until(lambda: policy.version == 3)
        engine.step, engine.hash, engine.holder = 0, "base", None
        await changes.until(lambda: engine.step == 3 and policy.servers[0].up)
        assert engine.holder == "test-run"


@pytest.mark.parametrize("reborn", [False, True])
async def test_what_plays_on_a_server_ends_with_it(tmp_path, reborn):
    """Also what waits for an answer on a connection that nobody has closed."""

    async def play(server, begun):
        async with server.life():
            begun.set()
            await asyncio.Event().wait()

    paths = RunPaths(tmp_path)
    async with fake_engine() as one, fake_engine() as two, policy_of(paths, [one, two]) as (policy, _):
        begun = asyncio.Event()
        lost = asyncio.create_task(play(policy.servers[1], begun))
        await begun.wait()
        if reborn:
            two.step, two.hash, two.holder = 5, "other", None
        else:
            await two.die()
        with pytest.raises(EngineLost, match="died"):
            async with asyncio.timeout(20):
                await lost
        async with policy.servers[0].life():
            pass  # the other one lives


async def test_a_false_alarm_costs_no_reload(tmp_path):
    paths = RunPaths(tmp_path)
    async with fake_engine() as engine, policy_of(paths, [engine]) as (policy, changes):
        resets = []
        original = engine.reload
        engine.reload = lambda request: resets.append(1) or original(request)
        policy.suspect(policy.servers[0])
        assert policy.by_load(1) == []
        await changes.until(lambda: policy.servers[0].up)
        assert resets == []


async def test_what_was_admitted_waits_for_a_server_of_its_version(tmp_path):
    paths = RunPaths(tmp_path)
    async with fake_engine() as engine, policy_of(paths, [engine]) as (policy, _):
        waiting = asyncio.create_task(policy.any_at(1))
        async with asyncio.timeout(20):
            assert await policy.any_at(0) is policy.servers[0]
            assert not waiting.done()
            publish_version(paths, 1)
            assert (await waiting).version.step == 1


async def test_when_all_are_lost_the_run_ends(tmp_path):
    with pytest.raises(ExceptionGroup) as caught:
        async with fake_engine() as engine, policy_of(RunPaths(tmp_path), [engine]):
            await engine.die()
            await asyncio.Event().wait()
    error = caught.value
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, EngineLost)
    assert engine.url in str(error)


async def test_a_server_that_loads_something_else_ends_the_run(tmp_path):
    paths = RunPaths(tmp_path)
    with pytest.raises(ExceptionGroup) as caught:
        async with fake_engine() as engine, policy_of(paths, [engine]):
            engine.loaded = lambda: {"run_id": "test-run", "branch": 0, "step": engine.step, "hash": "another"}
            publish_version(paths, 1)
            await asyncio.Event().wait()
    (error,) = caught.value.exceptions
    assert isinstance(error, RunError)
    assert "another" in str(error)


async def test_weights_that_are_refused_end_the_run_in_the_servers_words(tmp_path):
    """Altered, or not what the trainer says they are: one error, and nothing has moved."""
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
    assert str(error) == f"{engine.url}/stage_weights answered 400: {said}"
    assert (policy.version, engine.step) == (0, 0)


async def test_what_a_switch_cost_is_told_of_the_slowest_server(tmp_path):
    paths = RunPaths(tmp_path)
    async with fake_engine() as one, fake_engine() as two, policy_of(paths, [one, two]) as (policy, changes):
        assert "canary/max_logprob_difference" not in policy.metrics()
        one.switch = {"stage_s": 2.0, "pause_s": 0.1, "canary_difference": 1e-6}
        two.switch = {"stage_s": 1.0, "pause_s": 0.3, "canary_difference": 3e-6}
        publish_version(paths, 1)
        await changes.until(lambda: policy.version == 1)
        metrics = policy.metrics()
        assert (metrics["time/switch_stage"], metrics["time/switch_pause"]) == (2.0, 0.3)
        assert metrics["canary/max_logprob_difference"] == 3e-6


async def test_room_is_what_the_controller_leaves(tmp_path):
    async with fake_engine() as engine, policy_of(RunPaths(tmp_path), [engine], limit=10) as (policy, _):
        server = policy.servers[0]
        server.in_flight = 4
        assert policy.by_load(6) == [server]
        assert policy.by_load(7) == []
        server.in_flight = 0
        assert policy.by_load(99) == [server], "a group larger than the limit is played alone"


class Gate:
    """Lets a fake engine's `staging` or `switching` of each step pass when the test says so."""

    def __init__(self, *closed):
        self.open = {step: asyncio.Event() for step in closed}
        self.reached = {step: asyncio.Event() for step in closed}

    async def __call__(self, step):
        if step in self.open:
            self.reached[step].set()
            await self.open[step].wait()


async def ask_until(policy, condition):
    """Give everything else turns until `condition`: not every change is told."""
    async with asyncio.timeout(20):
        while not condition():
            await policy.servers[0].engine.look()


async def test_servers_switch_only_when_all_have_staged(tmp_path):
    paths = RunPaths(tmp_path)
    async with fake_engine() as one, fake_engine() as two, policy_of(paths, [one, two]) as (policy, changes):
        two.staging = Gate(1)
        publish_version(paths, 1)
        async with asyncio.timeout(20):
            await two.staging.reached[1].wait()
            await policy.servers[0].engine.policy()  # time for a switch that should not be
        assert (one.calls[1:], two.calls[1:]) == (["stage 1"], ["stage 1"])
        assert policy.by_load(1) == policy.servers, "they sample meanwhile"
        two.staging.open[1].set()
        await changes.until(lambda: policy.version == 1)
        assert one.calls[1:] == two.calls[1:] == ["stage 1", "update 1"]


async def test_a_server_that_is_lost_while_staging_is_left_behind(tmp_path):
    """Even if nobody closes its connection: `keep` notices that it is gone, and the switch does not wait."""
    paths = RunPaths(tmp_path)
    async with fake_engine() as one, fake_engine() as two, policy_of(paths, [one, two]) as (policy, changes):
        two.staging = Gate(1)
        publish_version(paths, 1)
        async with asyncio.timeout(20):
            await two.staging.reached[1].wait()
        policy.suspect(policy.servers[1])
        policy.servers[1].died()
        await changes.until(lambda: policy.servers[0].version.step == 1)
        two.staging.open[1].set()
        await changes.until(lambda: policy.servers[1].up and policy.version == 1)


async def test_a_server_that_hangs_holds_up_the_switch_no_longer_than_a_probe(tmp_path):
    """It is stopped, or its loop is blocked: connections are open, and nothing is ever answered."""
    paths = RunPaths(tmp_path)
    async with (
        fake_engine() as one,
        fake_engine() as two,
        policy_of(paths, [one, two], probe_s=0.3) as (policy, changes),
    ):
        two.deaf = asyncio.Event()
        publish_version(paths, 1)
        await changes.until(lambda: policy.servers[0].version.step == 1)
        assert not policy.servers[1].up
        two.deaf.set()
        await changes.until(lambda: policy.servers[1].up and policy.version == 1)


async def test_a_version_whose_files_are_seen_later_than_its_name_is_waited_for(tmp_path):
    """Over a network file system; on a local disk it is refused at once."""
    paths = RunPaths(tmp_path, visibility_s=20)
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


async def test_a_switch_that_fails_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr("prime_rl.orchestrator.policy._LEASE_RENEWAL_S", 0.05)
    paths = RunPaths(tmp_path)
    async with fake_engine() as one, fake_engine() as two, policy_of(paths, [one, two]) as (policy, changes):
        two.failures = 2
        publish_version(paths, 1)
        await changes.until(lambda: policy.version == 1 and policy.servers[1].up)
        assert two.calls.count("update 1") == 3


async def test_a_switch_that_fails_every_time_ends_the_run_in_the_servers_words(tmp_path, monkeypatch):
    monkeypatch.setattr("prime_rl.orchestrator.policy._LEASE_RENEWAL_S", 0.05)
    paths = RunPaths(tmp_path)
    with pytest.raises(ExceptionGroup) as caught:
        async with fake_engine() as engine, policy_of(paths, [engine]) as (_, changes):
            engine.failures = 100
            publish_version(paths, 1)
            await changes.until(lambda: False)
    error = caught.value
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    assert "answered 500: no memory" in str(error)


async def test_a_newer_version_takes_the_place_of_one_that_is_being_staged(tmp_path):
    paths = RunPaths(tmp_path)
    async with fake_engine() as one, fake_engine() as two, policy_of(paths, [one, two]) as (policy, changes):
        two.staging = Gate(1)
        publish_version(paths, 1)
        async with asyncio.timeout(20):
            await two.staging.reached[1].wait()
        publish_version(paths, 2)
        await changes.until(lambda: policy.version == 2)
        assert one.calls[1:] == ["stage 1", "stage 2", "update 2"], "1 is never put in place"
        await ask_until(policy, lambda: steps_in(paths.weights_dir) == [2])
        assert policy.metrics()["policy/skipped"] == 1


async def test_a_version_that_has_left_the_trainers_memory_gives_way_to_a_newer_one(tmp_path):
    """By itself such a refusal ends the run: the trainer drops a version only when newer ones are published."""
    paths = RunPaths(tmp_path)
    async with fake_engine() as engine:
        server = Server(Engine(engine.url, "m", "test-run"), ConcurrencyController(ConcurrencyConfig(), seq_len=64))
        policy = Policy([server], paths, lambda: None)
        publish_version(paths, 1, transfer={"type": "nccl"})
        with pytest.raises(VersionRefused, match="no longer"):
            policy.published.refuse(1, VersionRefused("no longer in memory"))
        publish_version(paths, 2)
        policy.published.refuse(1, VersionRefused("no longer in memory"))
        publish_version(paths, 3)
        with pytest.raises(VersionRefused, match="a flipped byte"):
            policy.published.refuse(2, VersionRefused("a flipped byte"))


async def test_a_version_that_is_being_put_in_place_is_not_given_up(tmp_path):
    paths = RunPaths(tmp_path)
    async with fake_engine() as one, policy_of(paths, [one]) as (policy, changes):
        one.switching = Gate(1)
        publish_version(paths, 1)
        async with asyncio.timeout(20):
            await one.switching.reached[1].wait()
        publish_version(paths, 2)
        acknowledged = asyncio.create_task(policy.acknowledged(policy.servers[0], 1))
        await policy.servers[0].engine.policy()
        assert policy.version == 0, "it samples from 1, and nobody has said so"
        assert not acknowledged.done()
        one.switching.open[1].set()
        await changes.until(lambda: policy.version == 2)
        assert one.calls[1:] == ["stage 1", "update 1", "stage 2", "update 2"]
        await acknowledged


async def test_an_evaluation_holds_the_newest_once(tmp_path):
    """Versions that appear meanwhile are staged, and when it lets go the newest is put in place."""
    paths, held, let_go = RunPaths(tmp_path), [], asyncio.Event()

    async def before_switch():
        held.append(1)
        await let_go.wait()

    async with fake_engine() as one, policy_of(paths, [one], before_switch=before_switch) as (policy, changes):
        for step in (1, 2, 3):
            publish_version(paths, step)
            await ask_until(policy, lambda step=step: f"stage {step}" in one.calls and held)
        assert (len(held), policy.version) == (1, 0)
        let_go.set()
        await changes.until(lambda: policy.version == 3)
        assert [call for call in one.calls if "update" in call] == ["update 3"]


@pytest.mark.parametrize("fault", ["refusal", "wrong"])
async def test_a_refused_version_is_left_out_where_the_run_says_so(tmp_path, fault):
    """A canary that is wrong is seen after the switch: the server goes back, and what it plays is played again."""
    paths, said = RunPaths(tmp_path), "model.safetensors is not what was published"
    async with fake_engine() as one, policy_of(paths, [one], on_refused="keep") as (policy, changes):
        publish_version(paths, 1)
        await changes.until(lambda: policy.version == 1)
        setattr(one, fault, said)
        one.switching = Gate(2)
        publish_version(paths, 2)
        if fault == "wrong":
            async with asyncio.timeout(20):
                await one.switching.reached[2].wait()
            lost = asyncio.create_task(play_on(policy, policy.servers[0], 2))
            one.switching.open[2].set()
            with pytest.raises(EngineLost):
                await lost
            one.wrong = ""
        await changes.until(lambda: policy.published.refused and policy.servers[0].up)
        assert said in str(policy.published.refused[2])
        assert (policy.version, one.step, one.hash) == (1, 1, "h1")
        assert policy.metrics()["policy/refused"] == 1
        policy.end_if_refused(3)  # a newer one may come
        with pytest.raises(RunError, match=f"{said}; without version 2 nothing more can be sampled"):
            policy.end_if_refused(2)
        one.refusal = ""
        publish_version(paths, 3)
        await changes.until(lambda: policy.version == 3)
        assert one.calls.count("stage 2") == 1, "it is not asked for again"
        assert policy.metrics()["policy/skipped"] == 0


async def play_on(policy, server, newest):
    """Play a rollout whose last token is of a version that its server has not acknowledged."""
    async with server.life():
        await policy.acknowledged(server, newest)


async def test_a_refusal_by_one_server_keeps_the_version_from_all(tmp_path):
    paths = RunPaths(tmp_path)
    async with (
        fake_engine() as one,
        fake_engine() as two,
        policy_of(paths, [one, two], on_refused="keep") as (policy, changes),
    ):
        two.refusal = "its disk is bad"
        publish_version(paths, 1)
        await changes.until(lambda: 1 in policy.published.refused)
        two.refusal = ""
        publish_version(paths, 2)
        await changes.until(lambda: policy.version == 2)
        assert one.calls[1:] == ["stage 1", "stage 2", "update 2"]


async def test_files_stay_as_long_as_somebody_needs_them(tmp_path):
    paths = RunPaths(tmp_path)
    async with fake_engine() as one, policy_of(paths, [one]) as (policy, changes):
        for step in (1, 2, 3):
            publish_version(paths, step)
            await changes.until(lambda step=step: policy.version == step)
            if step == 2:
                policy.published.keep_files(2)
        publish_version(paths, 4)
        await changes.until(lambda: policy.version == 4)
        publish_version(paths, 5)
        await ask_until(policy, lambda: steps_in(paths.weights_dir) == [2, 5])
        policy.published.free_files(2)
        publish_version(paths, 6)
        await ask_until(policy, lambda: steps_in(paths.weights_dir) == [6])


async def test_a_server_that_alone_refuses_the_newest_stays_out_until_there_is_a_newer_one(tmp_path):
    paths = RunPaths(tmp_path)
    async with (
        fake_engine() as one,
        fake_engine() as two,
        policy_of(paths, [one, two], on_refused="keep") as (policy, changes),
    ):
        for step in (1, 2):
            publish_version(paths, step)
            await changes.until(lambda step=step: policy.version == step)
        port = int(two.url.rsplit(":", 1)[1])
        await two.die()
        two.refused = {2}
        await two.start(port)
        await ask_until(policy, lambda: policy.servers[1].rejects == 2)
        assert (policy.version, [server.up for server in policy.servers]) == (2, [True, False])
        publish_version(paths, 3)
        await changes.until(lambda: policy.servers[1].up and policy.version == 3)
        assert not policy.published.refused


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_comes_between_all_servers_end_at_the_newest(tmp_path, seed):
    """Versions faster than servers stage them, some of them refused, and servers that die and come back meanwhile."""
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
