"""Evaluation beside training: what is due, what gives way, what is pinned, and that nothing of it ends the run."""

import asyncio
import json

import pytest

from prime_rl.configs.playing import PlayedEnvConfig
from prime_rl.configs.shared import SamplingConfig
from prime_rl.errors import RunError
from prime_rl.orchestrator.engine import Engine, EngineLost
from prime_rl.orchestrator.evals.online import OnlineEvaluator, Schedule
from prime_rl.orchestrator.evals.workloads import Play
from prime_rl.orchestrator.workers.failures import EnvironmentFailed
from prime_rl.run.paths import RunPaths
from prime_rl.types import PolicyVersion
from tests.support.fake_engine import fake_engine, publish_version
from tests.unit.orchestrator.evals.fakes import FakeMonitor, FakePolicy, FakePool, make_rollout


class Held:
    """An environment whose examples end when the test lets them."""

    def __init__(self):
        self.gate = asyncio.Event()
        self.begun = asyncio.Event()

    async def __call__(self, example, url):
        self.begun.set()
        await self.gate.wait()


class Run:
    """An evaluator with what it needs, and what it has reported."""

    def __init__(self, tmp_path, *pools, policy=None, prefix="eval", **options):
        self.paths, self.monitor, self.policy = RunPaths(tmp_path), FakeMonitor(), policy or FakePolicy()
        plays = [(Play(PlayedEnvConfig(id=pool.name), SamplingConfig(), -1, 2), pool) for pool in pools]
        settings = {"interval": 2, "base": True, **options}
        self.evaluator = OnlineEvaluator([Schedule(prefix, plays, **settings)], self.policy, self.monitor, self.paths)

    @property
    def versions(self):
        return [step for step, _ in self.monitor.lines]

    @property
    def metrics(self):
        return self.monitor.lines[-1][1]

    async def switch(self, version, tasks):
        self.policy.switch(version)
        self.evaluator.on_switch(version, tasks)

    async def rest(self):
        """Wait until nothing is being evaluated."""
        if self.evaluator._runner is not None:
            await asyncio.wait({self.evaluator._runner})


async def test_due_versions_are_evaluated_once_and_the_last_always(tmp_path):
    run = Run(tmp_path, FakePool())
    async with asyncio.TaskGroup() as tasks:
        for version in (0, 0, 1, 2, 3, 5, 6, 7):  # 4 was skipped: training was faster than switching
            await run.switch(version, tasks)
            await run.rest()
        await run.evaluator.finish(7)
        await run.evaluator.finish(7)
    assert run.versions == [0, 2, 5, 6, 7]


@pytest.mark.parametrize(("base", "first", "expected"), [(False, 0, [3]), (True, 0, [0, 3]), (True, 4, [4, 5])])
async def test_the_base_model_and_a_run_that_is_resumed(tmp_path, base, first, expected):
    run = Run(tmp_path, FakePool(), base=base, interval=4)
    last = expected[-1]
    async with asyncio.TaskGroup() as tasks:
        await run.switch(first, tasks)
        await run.rest()
        await run.switch(last, tasks)
        await run.evaluator.finish(last)
    assert run.versions == expected


async def test_an_evaluation_overlaps_and_a_newer_one_takes_the_waiting_ones_place(tmp_path):
    held = Held()
    run = Run(tmp_path, FakePool(behave=held), interval=1)
    async with asyncio.TaskGroup() as tasks:
        await run.switch(0, tasks)
        await held.begun.wait()
        for version in (1, 2, 3):
            await run.switch(version, tasks)  # returns while the first goes on
        assert run.versions == []
        held.gate.set()
        await run.evaluator.finish(3)
    assert run.versions == [0, 3]
    assert run.evaluator.skipped == run.metrics["eval/skipped"] == 2


async def test_metrics_and_rollouts_are_written(tmp_path):
    pool = FakePool(
        4, behave=lambda example, url: [make_rollout(float(example), (3, 5)), make_rollout(0.0, (4, 4), True)]
    )
    run = Run(tmp_path, pool, policy=FakePolicy(step=4), max_concurrent=3)
    await run.evaluator.finish(4)
    metrics = run.metrics
    assert (metrics["eval/fake/pass@1"], metrics["eval/fake/pass@2"]) == (3 / 8, 3 / 4)
    assert metrics["eval/fake/avg@2"] == metrics["eval/fake/metrics/accuracy"] == 6 / 8
    assert (metrics["eval/fake/version/min"], metrics["eval/fake/version/max"]) == (3, 5)
    assert (metrics["eval/fake/errors"], metrics["eval/fake/failed"]) == (0, 0)
    assert pool.most == 2, "a share of the servers, in whole groups"
    lines = (run.paths.evals_dir / "fake/step_4.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["example"] for line in lines) == [0, 1, 2, 3]


@pytest.mark.parametrize("error", [RunError("its workers do not start"), RuntimeError("a defect of ours")])
async def test_an_environment_that_fails_is_reported_and_ends_nothing(tmp_path, error):
    def fail(example, url):
        raise error

    def fail_sometimes(example, url):
        if example == 1:
            raise EnvironmentFailed("KeyError")

    run = Run(tmp_path, FakePool(name="broken", behave=fail), FakePool(name="shaky", behave=fail_sometimes), FakePool())
    async with asyncio.TaskGroup() as tasks:
        await run.switch(0, tasks)
        await run.evaluator.finish(0)
    metrics = run.metrics
    assert (metrics["eval/broken/failed"], metrics["eval/broken/examples"]) == (1, 0)
    assert (metrics["eval/shaky/failed"], metrics["eval/shaky/errors"], metrics["eval/shaky/examples"]) == (0, 1, 3)
    assert metrics["eval/shaky/reward/mean"] == pytest.approx(1 / 3), "an error is no reward of 0"
    assert metrics["eval/fake/examples"] == 4


async def test_a_stuck_environment_is_given_up(tmp_path):
    run = Run(tmp_path, FakePool(name="stuck", behave=Held()), FakePool(), patience_s=0.05)
    await run.evaluator.finish(0)
    assert (run.metrics["eval/stuck/failed"], run.metrics["eval/fake/failed"]) == (1, 0)


async def test_a_lost_server_is_taken_out_and_its_examples_played_elsewhere(tmp_path):
    def lose(example, url):
        if url == "http://a":
            raise EngineLost("gone")

    run = Run(tmp_path, FakePool(behave=lose), policy=FakePolicy("http://a", "http://b"))
    await run.evaluator.finish(0)
    assert set(run.policy.suspected) == {"http://a"}
    assert run.metrics["eval/fake/examples"] == 4


async def test_a_run_that_fails_ends_its_evaluation(tmp_path):
    held = Held()
    pool = FakePool(behave=held)
    run = Run(tmp_path, pool)
    with pytest.raises(ExceptionGroup):
        async with asyncio.TaskGroup() as tasks:
            await run.switch(0, tasks)
            await held.begun.wait()
            raise RunError("the trainer has died")
    assert pool.in_flight == 0
    assert run.versions == []


async def test_span_holds_no_switch(tmp_path):
    held = Held()
    run = Run(tmp_path, FakePool(behave=held))
    async with asyncio.TaskGroup() as tasks:
        await run.switch(0, tasks)
        await held.begun.wait()
        await run.evaluator.before_switch()
        held.gate.set()
        await run.evaluator.finish(0)
    assert "eval/held_s" not in run.metrics


async def test_pinned_holds_the_switch_until_it_is_done(tmp_path):
    held = Held()
    run = Run(tmp_path, FakePool(behave=held), mode="pinned", hold_s=60)
    await run.evaluator.before_switch()  # nothing is pinned yet
    async with asyncio.TaskGroup() as tasks:
        await run.switch(0, tasks)
        switch = tasks.create_task(run.evaluator.before_switch())
        await held.begun.wait()
        assert not switch.done()
        held.gate.set()
        await switch
        assert run.versions == [0]
        await run.switch(1, tasks)
        await run.evaluator.before_switch()  # version 1 is not due
        await run.evaluator.finish(1)
    assert run.metrics["eval/held_s"] > 0


async def test_pinned_holds_the_switch_no_longer_than_it_may(tmp_path):
    held = Held()
    run = Run(tmp_path, FakePool(behave=held), mode="pinned", hold_s=0.05)
    async with asyncio.TaskGroup() as tasks:
        await run.switch(0, tasks)
        await held.begun.wait()
        await run.evaluator.before_switch()
        assert run.versions == [], "the evaluation still goes on"
        async with asyncio.timeout(0.04):
            await run.evaluator.before_switch()  # it has had its time
        held.gate.set()
        await run.evaluator.finish(0)
    assert run.metrics["eval/held_s"] >= 0.05


async def test_servers_for_evaluation_alone_get_the_version_whose_files_the_run_keeps_so_long(tmp_path):
    async with fake_engine() as fake:
        seen = []

        def look(example, url):
            seen.append((url, fake.step, fake.hash, fake.holder, list(run.policy.published.kept)))

        def own_servers():
            return [Engine(fake.url, "m", "evaluations")]

        run = Run(tmp_path, FakePool(1, behave=look), mode="pinned", own_servers=own_servers)
        publish_version(run.paths, 2)
        async with asyncio.TaskGroup() as tasks:
            await run.switch(0, tasks)
            await run.switch(2, tasks)
            await run.evaluator.finish(2)
        assert run.versions == [2]
        assert seen[-1] == (fake.url, 2, "h2", "evaluations", [2])
        assert (fake.holder, fake.step) == (None, 0), "given back, at the base model"
        assert run.policy.published.kept == []


async def test_the_files_of_an_evaluation_that_gives_way_are_freed(tmp_path):
    async with fake_engine() as fake:
        held = Held()
        pool = FakePool(1, behave=held)
        run = Run(tmp_path, pool, mode="pinned", interval=1, own_servers=lambda: [Engine(fake.url, "m", "evaluations")])
        for step in (1, 2, 3):
            publish_version(run.paths, step)
        async with asyncio.TaskGroup() as tasks:
            await run.switch(1, tasks)
            await held.begun.wait()
            await run.switch(2, tasks)
            await run.switch(3, tasks)
            assert run.policy.published.kept == [1, 3]
            held.gate.set()
            await run.evaluator.finish(3)
        assert run.versions == [1, 3]
        assert run.policy.published.kept == []


async def test_pinned_goes_to_a_server_of_its_version(tmp_path):
    """A server that was lost and has come back samples from a newer one."""
    pool = FakePool(4)
    policy = FakePolicy("http://a", "http://b", step=2)
    policy.servers[0].version = PolicyVersion(0, 3)
    run = Run(tmp_path, pool, policy=policy, mode="pinned")
    await run.evaluator.finish(2)
    assert set(pool.urls) == {"http://b"}


async def test_a_server_for_evaluation_alone_that_is_gone_ends_nothing(tmp_path):
    async with fake_engine() as fake:
        url = fake.url
    run = Run(tmp_path, FakePool(), mode="pinned", own_servers=lambda: [Engine(url, "m", "evaluations")])
    await run.evaluator.finish(0)
    assert run.metrics["eval/failed"] == 1
    assert "eval/fake/reward/mean" not in run.metrics
