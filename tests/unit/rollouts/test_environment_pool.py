"""Groups played in real worker processes against a fake engine; everything that can go wrong with them."""

import asyncio
import itertools
import json
import os
import resource
import signal
import sys
from collections import Counter
from unittest import mock

import numpy as np
import psutil
import pytest
import pytest_asyncio
from aiohttp import web

from prime_rl.configs.environment import EnvConfig
from prime_rl.core.errors import ConfigError, RunError
from prime_rl.liveness.timeline_writer import TimelineWriter
from prime_rl.rollouts.clients.inference_client import InferenceError, InferenceServerLost
from prime_rl.rollouts.group_attempts import EnvironmentFailed, SampleTooLong
from prime_rl.rollouts.workers import environment_pool
from prime_rl.rollouts.workers.environment_pool import EnvironmentPool
from prime_rl.rollouts.workers.protocol import DiscardedWork, ModelAccess, RolloutSeconds
from prime_rl.rollouts.workers.worker_handle import WorkerHandle
from prime_rl.storage.paths import RunPaths
from tests.support.fake_engine import fake_engine

pytestmark = pytest.mark.asyncio(loop_scope="session")

SAMPLING = {"max_tokens": 4, "temperature": 1.0}


def play(pool, engine, example=1, count=2, seq_len=64, seed=None):
    return pool.run_group(example, count, engine.url, SAMPLING, seq_len, seed)


def pid(rollouts):
    return int(rollouts[0].metrics["worker"])


def lines_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


async def until(true):
    """Wait for something that announces itself only in another process."""
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.01)
    return True


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def kill_idle_worker(pool):
    """Kill the only worker while it waits for the engine, so that nobody's code can be blamed."""
    process = pool._workers[0]._process
    await until(lambda: process.crash_record.running_request is None)
    os.kill(process.pid, signal.SIGKILL)


class Gate:
    """Holds completions back until opened; tells when one has arrived."""

    def __init__(self, engine, held=lambda body: True):
        self.arrived, self.opened = asyncio.Event(), asyncio.Event()
        self.waiting = 0
        self._held = held
        engine.gate = self

    async def arrivals(self, count):
        while self.waiting < count:
            self.arrived.clear()
            await self.arrived.wait()

    async def __call__(self, body):
        if self._held(body):
            self.waiting += 1
            self.arrived.set()
            await self.opened.wait()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pool(host, tokenizer_dir):
    """A pool of two workers without trouble."""
    access = ModelAccess("m", str(tokenizer_dir))
    async with EnvironmentPool(EnvConfig(id="troubled_environment"), host, access, workers=2) as pool:
        yield pool


async def test_group_returns_the_tokens_that_the_server_reported(pool):
    async with fake_engine() as engine:
        engine.step = 5
        assert len(pool) == 8
        rollouts = await play(pool, engine, example=3, count=2)
        prompts = [request["token_ids"] for request in engine.requests]
    assert len(rollouts) == 2
    for rollout, prompt in zip(rollouts, prompts, strict=True):
        (sample,) = rollout.samples
        assert sample.tokens.tolist() == [*prompt, 20, 21, 22, 23]
        assert sample.loss_mask.tolist() == [False] * len(prompt) + [True] * 4
        assert sample.logprobs.tolist() == [0.0] * len(prompt) + [-0.5] * 4
        assert sample.versions.tolist() == [-1] * len(prompt) + [5] * 4
        assert [a.dtype for a in (sample.tokens, sample.loss_mask, sample.logprobs, sample.versions)] == [
            np.int32, np.bool_, np.float32, np.int32,
        ]  # fmt: skip
        assert rollout.reward == 3 / 8
        assert rollout.is_truncated
        assert rollout.text[0] == ("user", "say it 3")
        assert [role for role, _ in rollout.text] == ["user", "assistant"]
        assert rollout.metrics["num_turns"] == 1
        assert rollout.metrics["open_files"] >= min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 65536)


async def test_groups_are_distributed_over_workers(pool):
    async with fake_engine() as engine:
        gate = Gate(engine)
        groups = [asyncio.create_task(play(pool, engine, example)) for example in range(1, 5)]
        await gate.arrivals(8)
        gate.opened.set()
        workers = Counter([pid(rollouts) for rollouts in await asyncio.gather(*groups)])
    assert [*workers.values()] == [2, 2]


async def test_seeds_differ_by_rollout_and_repeat_by_group(pool):
    async with fake_engine() as engine:
        for _ in range(2):
            await play(pool, engine, count=3, seed=[7, 1])
        seeds = [request["sampling_params"]["seed"] for request in engine.requests]
        await play(pool, engine, count=1)
        assert "seed" not in engine.requests[-1]["sampling_params"]
    assert sorted(seeds[:3]) == sorted(seeds[3:])
    assert len(set(seeds)) == 3


async def test_group_that_cannot_be_sampled_raises_the_reason(pool):
    async with fake_engine() as engine:
        with pytest.raises(SampleTooLong, match="does not fit into seq_len = 10"):
            await play(pool, engine, seq_len=10)
        engine.fault = lambda body: web.json_response({"error": {"message": "engine is dead"}}, status=500)
        with pytest.raises(InferenceError, match="returned 500: engine is dead"):
            await play(pool, engine)
        with pytest.raises(InferenceServerLost, match=r"http://127.0.0.1:1 cannot be reached"):
            await pool.run_group(1, 2, "http://127.0.0.1:1", SAMPLING, 64)


async def test_model_access_reaches_the_workers(open_pool, tokenizer_dir):
    """An unknown token in a batch would end the trainer, which looks it up in an embedding."""
    access = ModelAccess("m", str(tokenizer_dir), vocabulary=24, trajectory_strategy="branching")
    async with fake_engine() as engine, open_pool(turns=3, access=access) as pool:
        (rollout,) = await play(pool, engine, count=1, seq_len=512)
        assert len(rollout.samples) == 3
        engine.reply = lambda body: ([24], "stop")
        with pytest.raises(InferenceError, match="the vocabulary has 24 tokens"):
            await play(pool, engine)


FAILURES = [
    ("raise", "reward function reward raised KeyError: 'broken reward'"),
    ("nan", "reward function reward is nan, not a finite number"),
    ("inf", "reward function reward is inf, not a finite number"),
    ("none", "reward function reward is None, not a number"),
    ("text", "reward function reward is '1.0', not a number"),
    ("list", "reward function reward is [1.0], not a number"),
    ("huge", "the reward is 1e+30, above the limit of 1e+06"),
    ("interrupt", "reward function reward raised KeyboardInterrupt: broken reward"),
    ("cancelled", "reward function reward raised CancelledError: broken reward, although nothing was cancelled"),
    ("base", "Custom: broken environment"),
    ("sys.exit", "reward function reward raised SystemExit: 4"),
    ("base interrupt", "KeyboardInterrupt: broken environment"),
    ("base exit", "SystemExit: broken environment"),
    ("exit in cleanup", "SystemExit: 5"),
    ("base cancelled", "CancelledError: broken environment, although nothing was cancelled"),
    ("setup", "KeyError: 'broken environment'"),
    ("turn", "ToolCallError: no such tool (from ZeroDivisionError: division by zero)"),
]


async def test_failed_environment_raises_instead_of_scoring_0(open_pool):
    """Nor is the worker ended; its executors are sized as those of verifiers."""
    troubles = [trouble for trouble, _ in FAILURES]
    async with (
        fake_engine() as engine,
        open_pool(troubles=[*troubles, None, "executors", "step reward"], turns=2) as pool,
    ):
        for example, (trouble, message) in enumerate(FAILURES):
            with pytest.raises(EnvironmentFailed) as failure:
                await play(pool, engine, example=example)
            advice = ' (env.reward_errors = "zero" counts it as 0, as verifiers does)'
            assert str(failure.value) == message + (advice if message.startswith("reward function") else ""), trouble
        assert (await play(pool, engine, example=len(troubles)))[0].reward == len(troubles) / 8
        (rollout, _) = await play(pool, engine, example=len(troubles) + 1)
        assert rollout.reward == min(4, os.cpu_count()), "the processes of MathRubric, after 40 threads met"
        with pytest.raises(ConfigError, match="'troubled_environment': its rubric sets `reward` of single steps"):
            await play(pool, engine, example=len(troubles) + 2)
        assert pool.deaths == 0


@pytest.mark.extended
@pytest.mark.parametrize(
    ("trouble", "limit", "how", "hint"),
    [
        ("block", {"silence_timeout_seconds": 1.0}, r"was killed: its event loop was blocked for \d+\.\d s",
         "env.silence_timeout_seconds = 1 limits the block"),
        ("wait stubbornly", {"timeout_seconds": 1.5}, "nor after it was cancelled", ""),
    ],
)  # fmt: skip
async def test_reward_that_cannot_be_cancelled_kills_its_worker(open_pool, trouble, limit, how, hint):
    """The limits are so long that they do not end while the rollout is still being sampled."""
    warned, args = [], {"config": limit, "grace_seconds": 0.7, "retries": 1}
    async with fake_engine() as engine, open_pool(trouble=trouble, warn=lambda *w: warned.append(w), **args) as pool:
        with pytest.raises(EnvironmentFailed, match=f"{how} while it ran example 0, the last of 2 attempts"):
            await play(pool, engine, example=0)
        assert pool.deaths == 1, "the second attempt was in a process of its own"
        assert hint in warned[0][2](1)
        assert (await play(pool, engine, example=1))[0].reward == 1 / 8


def play_held(pool, engine, *examples):
    """Start groups whose completions a gate holds back, and return that gate."""
    gate = Gate(engine, held=lambda body: body["sampling_params"]["max_tokens"] == 3)
    return gate, [asyncio.create_task(pool.run_group(i, 1, engine.url, {"max_tokens": 3}, 64)) for i in examples]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("trouble", "how"),
    [
        ("exit", "exited with code 7"),
        ("kill", r"was killed by SIGKILL \(signal 9\)"),
        ("exit in a task", "exited with code 4"),
    ],
)
async def test_groups_in_the_worker_of_a_crashing_group_run_again(open_pool, trouble, how):
    async with fake_engine() as engine, open_pool(trouble=trouble) as pool:
        first = pid(await play(pool, engine, example=1))
        gate, others = play_held(pool, engine, 3, 4, 5)
        await gate.arrivals(3)
        with pytest.raises(EnvironmentFailed, match=f"{how} while it ran example 0, the last of 3 attempts"):
            await play(pool, engine, example=0)
        assert pool.deaths == 1
        gate.opened.set()
        results = await asyncio.gather(*others)
        assert [rollouts[0].reward for rollouts in results] == [3 / 8, 4 / 8, 5 / 8]
        assert first not in [pid(rollouts) for rollouts in results]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("trouble", "how"),
    [
        ("block", "was killed: .*"),
        ("exit", "exited with code 1"),
        ("kill", "exited with code 1"),
    ],
)
async def test_group_that_ends_its_own_interpreter_is_named(open_pool, packages, trouble, how):
    own = {"interpreter": sys.executable, "name": "own", "num_retries": 0}
    name = str(packages / "troubled_environment.py")
    async with (
        fake_engine() as engine,
        open_pool(name=name, config=own, trouble=trouble, timeout=3, grace_seconds=1, retries=1) as pool,
    ):
        gate, others = play_held(pool, engine, 3, 4)
        await gate.arrivals(2)
        assert pool.memory_bytes() > 1.5 * psutil.Process(pool._workers[0].pid).memory_info().rss
        with pytest.raises(EnvironmentFailed, match=f"{how} while it ran example 0, the last of 2 attempts"):
            await play(pool, engine, example=0)
        assert pool.deaths == 1
        gate.opened.set()
        assert [rollouts[0].reward for rollouts in await asyncio.gather(*others)] == [3 / 8, 4 / 8]


async def test_externally_killed_worker_is_replaced_and_its_groups_run_again(open_pool):
    warned = []

    def warn(kind, env, text):
        warned.append((kind, env, text(1), text(10)))

    async with fake_engine() as engine, open_pool(warn=warn) as pool:
        gate = Gate(engine)
        groups = [asyncio.create_task(play(pool, engine, example=i, seed=[1, i])) for i in (5, 6)]
        await gate.arrivals(4)
        await kill_idle_worker(pool)
        gate.opened.set()
        assert [rollouts[0].reward for rollouts in await asyncio.gather(*groups)] == [5 / 8, 6 / 8]
        assert (pool.deaths, pool.discarded.rollouts) == (1, {"replayed": 4})
        seeds = [request["sampling_params"]["seed"] for request in engine.requests]
    assert set(seeds[:-4]) <= set(seeds[-4:]), "the second attempt is seeded as the first was"
    ((kind, env, first, tenth),) = warned
    assert (kind, env) == ("worker", "troubled_environment")
    assert "worker 0 was killed by SIGKILL (signal 9); starting another, 2 groups run again" in first
    assert "env_troubled_environment_0.log" in first and "workers have died" not in first
    assert "10 workers have died and 4 rollouts were repeated" in tenth


@pytest.mark.extended
async def test_repeated_worker_deaths_without_a_known_cause_raise(open_pool):
    async with fake_engine() as engine, open_pool(retries=1) as pool:
        gate = Gate(engine)
        group = asyncio.create_task(play(pool, engine, example=6))
        for attempt in (1, 2):
            await gate.arrivals(2 * attempt)
            await kill_idle_worker(pool)
        with pytest.raises(EnvironmentFailed, match=r"SIGKILL .* with example 6 in flight, the last of 2 attempts"):
            await group


async def test_worker_takes_its_silence_limit_from_the_configuration(host):
    for timeout_seconds, silence_seconds in ((None, 7), (20, 7), (2, 5)):
        config = EnvConfig(id="x", silence_timeout_seconds=7, timeout_seconds=timeout_seconds, cleanup_seconds=3)
        worker = WorkerHandle(host, await host.start(None), config, DiscardedWork(), RolloutSeconds(), print)
        assert worker._silence_seconds == silence_seconds
        await worker.close(0)


@pytest.mark.extended
async def test_worker_that_outgrows_its_memory_is_replaced_after_its_groups(open_pool):
    with pytest.raises(ConfigError, match=r"needs .* GiB before its first group; raise env.max_memory_gib") as caught:
        async with open_pool(config={"max_memory_gib": 0.001}):
            pass
    loaded = float(str(caught.value).split(" needs ")[1].split()[0])
    leaks, warned = {"trouble": "leak", "config": {"max_memory_gib": loaded + 0.1}}, []
    async with fake_engine() as engine, open_pool(warn=lambda *args: warned.append(args), **leaks) as pool:
        gate = Gate(engine, held=lambda body: body["sampling_params"]["max_tokens"] == 3)
        held = asyncio.create_task(pool.run_group(1, 2, engine.url, SAMPLING | {"max_tokens": 3}, 64))
        await gate.arrivals(2)
        large = pid(await play(pool, engine, example=0))
        await until(lambda: pool._workers and pool._workers[0].pid != large)
        assert pid(await play(pool, engine)) != large
        gate.opened.set()
        assert pid(await held) == large, "its groups end"
        await until(lambda: not alive(large))
        assert pool.deaths == 0
    assert "worker 0 exceeded env.max_memory_gib" in warned[0][2](1)


@pytest.mark.extended
async def test_reward_that_exceeds_the_time_limit_is_cancelled(open_pool):
    limit = {"scoring_timeout_seconds": 2.0}
    async with fake_engine() as engine, open_pool(trouble="wait", grace_seconds=60, config=limit) as pool:
        before, scoring = pid(await play(pool, engine)), asyncio.Event()
        with pytest.raises(EnvironmentFailed, match=r"took longer than 2 s \(env.scoring_timeout_seconds\)"):
            await pool.run_group(0, 2, engine.url, SAMPLING, 64, None, scoring.set)
        assert scoring.is_set()
        assert pid(await play(pool, engine)) == before, "the worker lives on"


async def test_child_processes_end_with_their_worker(open_pool, tmp_path):
    marker = tmp_path / "marker"
    async with fake_engine() as engine, open_pool(trouble="leave a child", marker=str(marker), retries=0) as pool:
        with pytest.raises(EnvironmentFailed):
            await play(pool, engine, example=0)
        assert pool.discarded.tokens == {"replayed": 8}, "from the page that it shared with main"
        child = int(marker.read_text())
        await until(lambda: not alive(child))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"trouble": "load once"}, "'troubled_environment' .* does not load: .*the data set is gone"),
        ({"trouble": "grow"}, "had 8 examples and now has 9: its data set changed"),
        ({"trouble": "unseeded", "examples": 40, "split": "eval"}, "its examples differ between two workers"),
    ],
    ids=["fails to load", "other number", "other examples"],
)
async def test_worker_that_restarts_with_other_examples_ends_the_pool(open_pool, tmp_path, args, message):
    async with fake_engine() as engine, open_pool(marker=str(tmp_path / "marker"), **args) as pool:
        await play(pool, engine)
        await kill_idle_worker(pool)
        with pytest.raises(RunError, match=message):
            await play(pool, engine)


async def test_workers_with_different_examples_warn_once_in_training_and_are_refused_in_evaluations(open_pool, said):
    args, message = {"trouble": "unseeded", "examples": 40}, "its examples differ between two workers"
    async with open_pool(workers=2, split="eval"):
        pass  # they are the same
    async with open_pool(workers=3, **args):
        pass
    assert len([line for line in said() if message in line]) == 1
    with pytest.raises(ConfigError, match=f"environment 'troubled_environment': {message}: .*; seed it, or"):
        async with open_pool(workers=2, split="eval", **args):
            pass


async def test_pool_survives_the_death_of_the_fork_server(open_pool, host):
    async with fake_engine() as engine, open_pool() as pool:
        gate = Gate(engine)
        group = asyncio.create_task(play(pool, engine))
        await gate.arrived.wait()
        host._server.kill()
        gate.opened.set()
        assert (await group)[0].reward == 1 / 8


async def test_cancelling_a_group_cancels_it_in_its_worker_and_counts_its_tokens(open_pool, tmp_path):
    marker = tmp_path / "marker"
    async with fake_engine() as engine, open_pool(trouble="wait", marker=str(marker)) as pool:
        group = asyncio.create_task(play(pool, engine, example=0, count=1))
        await until(marker.exists)
        group.cancel()
        with pytest.raises(asyncio.CancelledError):
            await group
        assert (await play(pool, engine))[0].reward == 1 / 8
        assert marker.read_text() == "cancelled"
        await until(lambda: pool.discarded.tokens == {"cancelled": 4})
        assert pool.discarded.rollouts == {"cancelled": 1}
        assert pool._workers[0].in_flight == 0
        assert pool.deaths == 0


async def test_five_turns_are_trained_exactly_as_sampled(open_pool):
    """Every turn's prompt begins with all ids that the engine was given and gave before: nothing is tokenised twice."""
    odd = [99, 126, 98, 2]  # 126 is no token of any text; 2 ends a turn
    async with fake_engine() as engine, open_pool(turns=5) as pool:

        def answer(body):
            engine.step += 1
            return odd, "stop"

        engine.reply = answer
        (rollout,) = await play(pool, engine, count=1, seq_len=512)
        prompts = [request["token_ids"] for request in engine.requests]
    assert len(prompts) == 5
    for earlier, later in itertools.pairwise(prompts):
        assert later[: len(earlier) + len(odd)] == earlier + odd
    (sample,) = rollout.samples
    assert sample.tokens.tolist() == prompts[-1] + odd
    assert sample.tokens[sample.loss_mask].tolist() == odd * 5
    versions = [version for step in range(5) for version in (step, step, step + 1, step + 1)]
    assert sample.versions[sample.loss_mask].tolist() == versions


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            {"trouble": "load"},
            r"environment 'troubled_environment' with env.args = {'trouble': 'load'} does not load: .*cannot load this",
        ),
        ({"no_such_argument": 1}, "env.args.no_such_argument: environment .* has no such argument"),
        ({"examples": 0}, "environment 'troubled_environment' has no train examples; check env.args"),
        ({"check_seq_len": 12}, "the prompt of example 0 of environment 'troubled_environment' has 16 tokens"),
    ],
)
async def test_environment_that_does_not_load_raises_config_error(open_pool, args, message):
    with pytest.raises(ConfigError, match=message) as failure:
        async with open_pool(workers=2, **args):
            pass
    assert "\n" not in str(failure.value)


async def test_worker_death_while_loading_raises_with_the_log_path(open_pool):
    with pytest.raises(
        RunError, match=r"troubled_environment does not load: its worker exited with code 3; see .*env_troubled_.*0.log"
    ):
        async with open_pool(trouble="exit while loading", check_seq_len=64):
            pass


async def test_closing_ends_groups_and_processes(open_pool):
    async with fake_engine() as engine:
        gate = Gate(engine)
        async with open_pool(workers=2) as pool:
            group = asyncio.create_task(play(pool, engine))
            await gate.arrived.wait()
            pids = [worker._process.pid for worker in pool._workers]
        with pytest.raises(RunError, match="environment troubled_environment is closed"):
            await group
        gate.opened.set()
    assert not any(alive(pid) for pid in pids)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("cancels", "cleanup_seconds", "grace_seconds", "left"),
    [(False, 2.5, 60.0, "cleaned"), (True, 2.5, 60.0, "cleaned"), (False, 1000.0, 0.5, "cancelled")],
    ids=["close", "cancel and close", "cleanup takes too long"],
)
async def test_closing_waits_for_the_cleanup_of_groups(
    open_pool, tmp_path, cancels, cleanup_seconds, grace_seconds, left
):
    marker = tmp_path / "marker"
    args = {"trouble": "wait", "marker": str(marker), "cleanup_seconds": cleanup_seconds}
    async with fake_engine() as engine:
        async with open_pool(grace_seconds=grace_seconds, **args) as pool:
            group = asyncio.create_task(play(pool, engine, example=0))
            await until(marker.exists)
            if cancels:
                group.cancel()
        await asyncio.gather(group, return_exceptions=True)
    assert marker.read_text() == left


@pytest.mark.extended
async def test_warning_of_several_workers_is_logged_once(open_pool, said):
    async with fake_engine() as engine, open_pool(trouble="sampling", workers=2) as pool:
        await asyncio.gather(*(play(pool, engine) for _ in range(4)))
    (line,) = [line for line in said() if "sampling parameters are ignored" in line]
    assert "environment troubled_environment: " in line and "temperature = 0.1" in line


@pytest.mark.extended
async def test_timeline_has_the_share_of_busy_workers(open_pool, tmp_path, monkeypatch):
    monkeypatch.setattr(environment_pool, "_TIMELINE_SECONDS", 0.02)
    timeline = TimelineWriter(RunPaths(tmp_path), "env_troubled", interval_seconds=0.01)
    file = RunPaths(tmp_path).timeline("env_troubled")
    async with fake_engine() as engine, open_pool(timeline=timeline, workers=2) as pool:
        await play(pool, engine)
        await play(pool, engine, example=2)
        await until(lambda: sum(line.get("groups", 0) for line in lines_of(file)) == 2)
    start, *lines = lines_of(file)
    assert start["name"] == "start the workers"
    keys = {"name", "start", "end", "waiting_for", "step", "version", "busy", "groups", "rollouts"}
    assert all(line.keys() == keys and line["name"] == "rollouts" for line in lines)
    assert all(0 <= line["busy"] <= 1 for line in lines)
    assert all(before["end"] <= after["start"] for before, after in itertools.pairwise(lines))


async def test_timeline_counts_the_cpu_seconds_of_processes_that_live(monkeypatch):
    seconds = {1: 3.0, 2: 5.0}

    def process(pid):
        if pid not in seconds:
            raise psutil.NoSuchProcess(pid)
        return mock.Mock(cpu_times=lambda: (seconds[pid], 0.0, 0.0, 0.0, 9.0))

    monkeypatch.setattr(environment_pool.psutil, "Process", process)
    workers = environment_pool.WorkerTimeline(mock.Mock())
    assert workers.measure([1, 2]) == 0
    seconds[1], seconds[2] = 3.5, 6.0
    assert workers.measure([1, 2]) == 1.5
    del seconds[2]
    seconds[3], seconds[1] = 7.0, 3.75
    assert workers.measure([1, 2, 3]) == 0.25
