"""Online evaluation: due, skipped and pinned evaluations; failures do not end the run."""

import asyncio
import json

import pytest

from prime_rl.configs.environment import EvalEnvConfig
from prime_rl.configs.sampling import SamplingConfig
from prime_rl.core.errors import RunError
from prime_rl.core.types import PolicyVersion
from prime_rl.evaluation.eval_plan import EvalTask
from prime_rl.orchestrator.online_evaluation import EvalSchedule, OnlineEvaluator
from prime_rl.rollouts.clients.inference_client import InferenceClient, InferenceServerLost
from prime_rl.rollouts.group_attempts import EnvironmentFailed
from prime_rl.storage.paths import RunPaths
from tests.support.fake_engine import fake_engine, publish_version
from tests.support.virtual_clock import virtual_clock
from tests.unit.evaluation.fakes import FakeMonitor, FakePolicy, FakePool, make_rollout


class Held:
    """An environment whose examples wait for the test."""

    def __init__(self):
        self.gate = asyncio.Event()
        self.started = asyncio.Event()

    async def __call__(self, example, url):
        self.started.set()
        await self.gate.wait()


class Run:
    """An evaluator with its dependencies and its reported metrics."""

    def __init__(self, tmp_path, *pools, policy=None, prefix="eval", **options):
        self.paths, self.monitor, self.policy = RunPaths(tmp_path), FakeMonitor(), policy or FakePolicy()
        tasks = [(EvalTask(EvalEnvConfig(id=pool.name), SamplingConfig(), -1, 2), pool) for pool in pools]
        settings = {"interval": 2, "base": True, **options}
        self.evaluator = OnlineEvaluator(
            [EvalSchedule(prefix, tasks, **settings)], self.policy, self.monitor, self.paths
        )

    @property
    def versions(self):
        return [step for step, _ in self.monitor.lines]

    @property
    def metrics(self):
        return self.monitor.lines[-1][1]

    async def switch(self, version, tasks):
        self.policy.switch(version)
        self.evaluator.on_switch(version, tasks)

    async def visit(self, *versions):
        """Switch to each version in turn, and let its evaluations end."""
        for version in versions:
            async with asyncio.TaskGroup() as tasks:
                await self.switch(version, tasks)


@pytest.mark.parametrize(
    ("visited", "last", "evaluated", "skipped"),
    [
        # 4 was skipped: training was faster than switching. Servers that return sample from the base model briefly.
        ([0, 0, 1, 2, 0, 1, 2, 3, 0, 5, 6, 7], 7, [0, 2, 5, 6, 7], 0),
        ([0, 3, 9], 9, [0, 3, 9], 2),  # 3 in place of 2, 9 in place of 8; 4 and 6 are skipped
        ([0, 3], 7, [0, 3, 7], 1),  # the last switch is seen at the end only; 4 is skipped
    ],
)
async def test_online_eval_due_versions_and_the_last_are_evaluated_once(tmp_path, visited, last, evaluated, skipped):
    run = Run(tmp_path, FakePool())
    await run.visit(*visited)
    for _ in range(2):
        await run.evaluator.finish(last)
    assert run.versions == evaluated
    assert run.evaluator.num_skipped == run.metrics["eval/skipped"] == skipped


@pytest.mark.parametrize(("started", "skipped"), [([0, 4], 2), ([0, 4, 8], 2), ([], 0)])
async def test_online_eval_versions_that_passed_during_a_restart_count_as_skipped(tmp_path, started, skipped):
    """Version 4 was evaluated, 16 is current: 8 and 12 are skipped once, also if 8 was interrupted."""
    run = Run(tmp_path, FakePool(), interval=4)
    report(run.paths, *({"step": v, "eval/time_s": 1.0} for v in started if v != 8))
    begin(run.paths, *started)
    await run.evaluator.read_history()
    await run.visit(16)
    assert run.versions == [16]
    assert run.evaluator.num_skipped == skipped


@pytest.mark.parametrize(("base", "first", "expected"), [(False, 0, [3]), (True, 0, [0, 3]), (True, 4, [4, 5])])
async def test_online_eval_base_model_and_resumed_run(tmp_path, base, first, expected):
    run = Run(tmp_path, FakePool(), base=base, interval=4)
    last = expected[-1]
    await run.visit(first)
    async with asyncio.TaskGroup() as tasks:
        await run.switch(last, tasks)
        await run.evaluator.finish(last)
    assert run.versions == expected


async def test_online_eval_newer_version_replaces_the_waiting_one(tmp_path):
    held = Held()
    run = Run(tmp_path, FakePool(behave=held), interval=1)
    async with asyncio.TaskGroup() as tasks:
        await run.switch(0, tasks)
        await held.started.wait()
        await run.evaluator.before_switch()  # it is not pinned
        for version in (1, 2, 3):
            await run.switch(version, tasks)  # returns while the first goes on
        assert run.versions == []
        held.gate.set()
        await run.evaluator.finish(3)
    assert run.versions == [0, 3]
    assert "eval/held_s" not in run.metrics
    assert run.evaluator.num_skipped == run.metrics["eval/skipped"] == 2


async def test_online_eval_writes_metrics_and_rollouts(tmp_path):
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
async def test_online_eval_failing_environment_is_reported(tmp_path, error):
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


@virtual_clock
async def test_online_eval_stuck_environment_times_out(tmp_path):
    run = Run(tmp_path, FakePool(name="stuck", behave=Held()), FakePool(), idle_timeout_seconds=600)
    await run.evaluator.finish(0)
    assert (run.metrics["eval/stuck/failed"], run.metrics["eval/fake/failed"]) == (1, 0)


async def test_online_eval_lost_server_examples_move_to_another(tmp_path):
    def lose(example, url):
        if url == "http://a":
            raise InferenceServerLost("gone")

    run = Run(tmp_path, FakePool(behave=lose), policy=FakePolicy("http://a", "http://b"))
    await run.evaluator.finish(0)
    assert set(run.policy.taken_out) == {"http://a"}
    assert run.metrics["eval/fake/examples"] == 4


async def test_online_eval_failing_run_cancels_it(tmp_path):
    held = Held()
    pool = FakePool(behave=held)
    run = Run(tmp_path, pool)
    with pytest.raises(ExceptionGroup):
        async with asyncio.TaskGroup() as tasks:
            await run.switch(0, tasks)
            await held.started.wait()
            raise RunError("the trainer has died")
    assert pool.in_flight == 0
    assert run.versions == []


@virtual_clock
async def test_online_eval_pinned_delays_the_switch(tmp_path):
    held = Held()
    run = Run(tmp_path, FakePool(behave=held), mode="pinned", hold_seconds=60)
    await run.evaluator.before_switch()  # nothing is pinned yet
    async with asyncio.TaskGroup() as tasks:
        await run.switch(0, tasks)
        switch = tasks.create_task(run.evaluator.before_switch())
        await asyncio.sleep(9)
        assert not switch.done()
        held.gate.set()
        await switch
        assert run.versions == [0]
        await run.switch(1, tasks)
        await run.evaluator.before_switch()  # version 1 is not due
        await run.evaluator.finish(1)
    assert run.metrics["eval/held_s"] == pytest.approx(9)


@virtual_clock
async def test_online_eval_pinned_delays_the_switch_at_most_hold_seconds(tmp_path):
    held = Held()
    run = Run(tmp_path, FakePool(behave=held), mode="pinned", hold_seconds=50)
    async with asyncio.TaskGroup() as tasks:
        await run.switch(0, tasks)
        await held.started.wait()
        await run.evaluator.before_switch()
        assert run.versions == [], "the evaluation still goes on"
        async with asyncio.timeout(1):
            await run.evaluator.before_switch()  # it has had its time
        held.gate.set()
        await run.evaluator.finish(0)
    assert run.metrics["eval/held_s"] == pytest.approx(50)


async def test_online_eval_separate_servers_load_retained_files(tmp_path, engine):
    seen = []

    def look(example, url):
        seen.append((url, engine.step, engine.hash, engine.holder, list(run.policy.weight_versions.kept)))

    def own_servers():
        return [InferenceClient(engine.url, "m", "evaluations")]

    run = Run(tmp_path, FakePool(1, behave=look), mode="pinned", own_servers=own_servers)
    publish_version(run.paths, 2)
    async with asyncio.TaskGroup() as tasks:
        await run.switch(0, tasks)
        await run.switch(2, tasks)
        await run.evaluator.finish(2)
    assert run.versions == [2]
    assert seen[-1] == (engine.url, 2, "h2", "evaluations", [2])
    assert (engine.holder, engine.step) == (None, 0), "given back, at the base model"
    assert run.policy.weight_versions.kept == []


async def test_online_eval_skipped_evaluation_releases_its_files(tmp_path, engine):
    held = Held()
    pool = FakePool(1, behave=held)
    own = [InferenceClient(engine.url, "m", "evaluations")]
    run = Run(tmp_path, pool, mode="pinned", interval=1, own_servers=lambda: own)
    for step in (1, 2, 3):
        publish_version(run.paths, step)
    async with asyncio.TaskGroup() as tasks:
        await run.switch(1, tasks)
        await held.started.wait()
        await run.switch(2, tasks)
        await run.switch(3, tasks)
        assert run.policy.weight_versions.kept == [1, 3]
        held.gate.set()
        await run.evaluator.finish(3)
    assert run.versions == [1, 3]
    assert run.policy.weight_versions.kept == []


async def test_online_eval_pinned_prefers_servers_with_its_version(tmp_path):
    """A server that returned samples from a newer version."""
    pool = FakePool(4)
    policy = FakePolicy("http://a", "http://b", step=2)
    policy.servers[0].version = PolicyVersion(0, 3)
    run = Run(tmp_path, pool, policy=policy, mode="pinned")
    await run.evaluator.finish(2)
    assert set(pool.urls) == {"http://b"}


async def test_online_eval_unusable_separate_server_does_not_end_the_run(tmp_path, said):
    """It has other settings, or is lost."""

    def run_with(fake):
        return Run(
            tmp_path,
            FakePool(),
            mode="pinned",
            own_servers=lambda: [InferenceClient(fake.url, "m", "evaluations")],
            find_problem=lambda url, settings: f"{settings['seq_len']} tokens at {url} are too few",
        )

    async with fake_engine() as fake:
        fake.settings = {"seq_len": 16}
        run = run_with(fake)
        await run.evaluator.finish(0)
        assert f"eval of version 0 failed: 16 tokens at {fake.url} are too few" in said()
        assert run.metrics["eval/failed"] == 1 and fake.holder is None
    run = run_with(fake)
    await run.evaluator.finish(0)
    assert run.metrics["eval/failed"] == 1
    assert "eval/fake/reward/mean" not in run.metrics


def report(paths, *lines):
    """Write metrics as an earlier process reported them."""
    paths.metrics_dir.mkdir(parents=True)
    paths.metrics("orchestrator").write_text("".join(json.dumps(line) + "\n" for line in lines))


def begin(paths, *versions, folder="fake"):
    """Write result files of started evaluations."""
    (paths.evals_dir / folder).mkdir(parents=True)
    for version in versions:
        (paths.evals_dir / folder / f"step_{version}.jsonl").write_text("")


@pytest.mark.parametrize(
    ("reported", "started", "version", "expected"),
    [
        ([0], [0], 1, []),  # done: the base model is not evaluated again
        ([0, 4], [0, 4], 4, []),  # nor is the version that is sampled from
        ([0], [0, 4], 4, [4]),  # interrupted, on its own version
        ([], [0], 0, [0]),
        ([0], [0, 4], 5, [5]),  # version 4 is gone: the first behind a multiple takes its place
        ([0], [0], 5, [5]),  # it was due, and had not started
        ([], [0], 3, []),  # the base model cannot be evaluated any more
        ([0], [0, 8], 4, [4]),  # version 8 was of a branch that a rewind has ended
    ],
)
async def test_online_eval_restart_repeats_only_interrupted_evaluations(tmp_path, reported, started, version, expected):
    run = Run(tmp_path, FakePool(), interval=4)
    report(run.paths, {"step": 0, "time/step": 1.0}, *({"step": v, "eval/time_s": 1.0} for v in reported))
    begin(run.paths, *started)
    before = run.paths.evals_dir / "fake/step_0.jsonl"
    before.write_text("as it was")
    await run.evaluator.read_history()
    await run.visit(version)
    assert run.versions == expected
    assert 0 in expected or before.read_text() == "as it was"
    lost = [v for v in started if v not in reported and v < version]
    assert run.evaluator.num_skipped == len(lost)
    await run.evaluator.finish(version)
    assert run.versions == (expected if version in reported + expected else [*expected, version])


async def test_online_eval_restart_with_other_examples_warns(tmp_path, said):
    pool = FakePool()
    for content, warns in (("a", False), ("a", False), ("b", True), ("b", False)):
        pool.content_hash, before = content, len(said())
        run = Run(tmp_path, pool)
        await run.evaluator.finish(4)
        assert any("eval/fake: its examples differ" in line for line in said()[before:]) == warns


@pytest.mark.parametrize(("interrupted", "is_published"), [(2, True), (0, False), (2, False)])
async def test_online_eval_separate_servers_repeat_on_the_interrupted_version(
    tmp_path, interrupted, is_published, engine
):
    seen = []

    def look(example, url):
        seen.append((engine.step, list(run.policy.weight_versions.kept)))

    own = [InferenceClient(engine.url, "m", "evaluations")]
    run = Run(tmp_path, FakePool(1, behave=look), mode="pinned", interval=4, own_servers=lambda: own)
    if interrupted:
        report(run.paths, {"step": 0, "eval/time_s": 1.0})
    if is_published:
        publish_version(run.paths, interrupted)
    publish_version(run.paths, 5)
    begin(run.paths, interrupted)
    await run.evaluator.read_history()
    await run.visit(5)
    if is_published or not interrupted:
        assert run.versions == [interrupted, 5]
        assert seen[0] == (interrupted, [interrupted, 5] if interrupted else [5])
    else:
        assert run.versions == [5]
        assert run.metrics["eval/skipped"] == 1
    assert run.policy.weight_versions.kept == []
