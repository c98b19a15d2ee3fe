"""The complete orchestrator over HTTP, with a fake engine and a trainer without a model."""

import asyncio
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from aiohttp import web

from prime_rl.configs.environment import EvalEnvConfig
from prime_rl.configs.sampling import SamplingConfig
from prime_rl.core.errors import ConfigError, RunError
from prime_rl.evaluation.eval_plan import EvalTask
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.monitors import Monitor
from prime_rl.orchestrator import orchestrator as orchestrator_module
from prime_rl.orchestrator.example_stream import ExampleStream
from prime_rl.orchestrator.inference import inference_server, weight_versions
from prime_rl.orchestrator.inference.inference_pool import InferencePool
from prime_rl.orchestrator.ledger import ledger as ledger_module
from prime_rl.orchestrator.ledger.ledger import read_ledger, replay
from prime_rl.orchestrator.online_evaluation import EvalSchedule
from prime_rl.orchestrator.orchestrator import EventLoopLag, OrchestratorLoop
from prime_rl.orchestrator.scheduler import DurationHistory
from prime_rl.orchestrator.waits import INFERENCE, TRAINER
from prime_rl.storage.batch import read_batch
from prime_rl.storage.paths import RunPaths, steps_in
from prime_rl.storage.wait_for import watch_directory
from tests.support.fake_engine import fake_engine, play_trainer, publish_version
from tests.support.loop_turns import needs_loop
from tests.unit.evaluation.fakes import FakePool
from tests.unit.orchestrator.loop_runs import (
    STEPS,
    batches,
    cancel,
    check_bound,
    check_progress,
    group_ids,
    limit_waits,
    make_config,
    metrics,
    no_trainer,
    random_pauses,
    records,
    run_orchestrator,
    samples,
    toy,
    until,
    with_ckpt,
)


@pytest.mark.parametrize("async_level", [0, 1, 2])
async def test_run_any_async_level_keeps_the_staleness_bound(tmp_path, async_level, monkeypatch):
    """The batches of two servers keep I1, I2 and I3 with random completions and switches."""
    config = make_config(tmp_path, async_level=async_level)
    loop = asyncio.get_running_loop()
    for name in ("log", "log_samples", "log_distributions"):
        monkeypatch.setattr(Monitor, name, needs_loop(getattr(Monitor, name), loop))
    canary = {"token_ids": [1, 2, 3], "logprobs": [-1.5, -0.25], "dtype": "float32"}
    async with fake_engine() as one, fake_engine() as two:
        one.base_canary = canary
        one.gate = two.gate = random_pauses(0.02)
        paths = await run_orchestrator(config, [one, two], trainer_delay_seconds=0.03)
        for engine in (one, two):
            assert engine.requests
            assert (engine.step, engine.holder) == (STEPS, None), "the last version is loaded and the lease given back"
        canaries = [{**canary, "url": one.url}]
        servers = {engine.url.replace("http://", "server/") for engine in (one, two)}
    check_bound(paths, async_level)
    assert {name for _, manifest in batches(paths) for name in manifest.get("sources", ())} == servers
    for step, (batch, manifest) in enumerate(batches(paths)):
        assert len(batch.seq_lens) == 6
        assert sorted(group for ids in batch.sources.values() for group in ids) in ([], manifest["group_ids"]), (
            "each group has one server"
        )
        assert manifest.get("base_canaries") == (None if step else canaries), "the trainer compares its base model"
        rows = samples(paths, step)
        rollouts = zip(batch.sample_group.tolist(), batch.sample_rollout.tolist(), strict=True)
        assert {(row["group_id"], row["rollout"]) for row in rows} == set(rollouts)
        assert rows[0]["messages"][0]["content"].startswith("say it")
        assert (batch.advantages == 0).all(), "all rollouts of a group have one reward here"
    assert sorted(group_ids(paths)) == list(range(STEPS * 3)), "every stream position is shipped exactly once"
    check_progress(paths)
    assert max(row["staleness/max"] for row in metrics(paths)) <= async_level
    assert all(row["tokens/unaccounted"] == 0 for row in metrics(paths))


@pytest.mark.asyncio(loop_scope="session")
async def test_run_with_workers_trains_on_the_token_ids_of_the_engine(tmp_path, tokenizer_dir, host):
    """Three turns become one sample whose unmasked ids are the sampled ones."""
    model = {"name": str(tokenizer_dir)}
    config = make_config(tmp_path, {"turns": 3}, model=model, max_steps=1, async_level=0, seq_len=256)
    async with fake_engine() as engine:
        paths = await run_orchestrator(config, [engine], launcher=host)
        prompts = {tuple(request["token_ids"]) for request in engine.requests}
    batch, _ = read_batch(paths.rollouts(0))
    assert batch.loss_mask.sum() == 6 * 3 * 6, "six rollouts, three turns, six tokens a turn"
    for end, length in zip(np.cumsum(batch.seq_lens), batch.seq_lens, strict=True):
        tokens = tuple(batch.tokens[end - length : end].tolist())
        assert any(tokens[: len(prompt)] == prompt for prompt in prompts)


@pytest.mark.extended
async def test_run_whose_last_version_arrives_long_after_the_end_of_the_trainer_completes(tmp_path, said, engine):
    """The last version is always a full one, and a relay copies it over a slow network."""
    config = make_config(tmp_path, heartbeat={"warn_after_seconds": 0.1, "dead_after_seconds": 0.3})

    async def trainer(paths, steps, stop, delay_seconds):
        await play_trainer(paths, steps - 1, stop)
        await until(lambda: paths.rollouts(steps - 1).exists())
        with HeartbeatWriter(paths, TRAINER, TRAINER, settings={"max_steps": STEPS}):
            pass  # no earlier heartbeat: one that is late would end the run
        await asyncio.sleep(2)
        publish_version(paths, steps)

    await run_orchestrator(config, [engine], trainer=trainer)
    assert engine.step == STEPS
    assert not [line for line in said() if "has ended" in line]


async def test_run_lost_server_returns(tmp_path, monkeypatch):
    """Its rollouts are sampled again on another server within the bound; none is lost or shipped twice."""
    config = make_config(tmp_path, async_level=1)
    async with fake_engine() as one, fake_engine() as two:
        port = int(two.url.rsplit(":", 1)[1])

        async def die(body):
            two.gate = None
            reborn.append(asyncio.create_task(die_and_return()))
            await asyncio.Event().wait()

        async def die_and_return():
            await two.die()
            await noticed.wait()
            await two.start(port)

        def take_out(policy, server, *why):
            noticed.set()
            return original(policy, server)

        reborn, noticed, original = [], asyncio.Event(), InferencePool.take_out
        monkeypatch.setattr(InferencePool, "take_out", take_out)
        two.gate = die
        paths = await run_orchestrator(config, [one, two], trainer_delay_seconds=0.05)
        await reborn[0]
    check_bound(paths, 1)
    assert sorted(group_ids(paths)) == list(range(STEPS * 3))
    assert metrics(paths)[-1]["groups/retried"] >= 1


async def test_run_two_agents_get_the_advantages_of_their_own_rewards(tmp_path):
    """Samples list the credits, and each row of a batch has the advantage of its agent."""
    paths = await run_orchestrator(make_config(tmp_path, {"agents": True}, max_steps=2))
    for step, (batch, _) in enumerate(batches(paths, 2)):
        credits = {(row["group_id"], row["rollout"]): row["credits"] for row in samples(paths, step)}
        for group in {group for group, _ in credits}:
            for agent, name in enumerate(("first", "second")):
                one, two = (credits[group, rollout][agent] for rollout in range(2))
                assert one["name"] == two["name"] == name
                assert one["advantage"] == -two["advantage"] == (one["reward"] - two["reward"]) / 2 != 0
        trained = Counter[tuple[int, int, float]]()
        for index, end in enumerate(np.cumsum(batch.seq_lens)):
            span = slice(end - batch.seq_lens[index], end)
            (advantage,) = set(batch.advantages[span][batch.loss_mask[span] == 1].tolist())
            trained[batch.sample_group[index], batch.sample_rollout[index], advantage] += 1
        assert trained == Counter((*place, part["advantage"]) for place, parts in credits.items() for part in parts)


async def test_run_server_that_only_fails_ends_it(tmp_path, monkeypatch, engine):
    monkeypatch.setattr(inference_server, "_LONGEST_BACKOFF_SECONDS", 0.001)
    config = make_config(tmp_path, async_level=1, batch_size=2)
    engine.fault = lambda body: web.json_response({"error": {"message": "engine is dead"}}, status=500)
    with pytest.raises(RunError, match=r"in a row were dropped as error/engine; .*returned 500: engine is dead"):
        await run_orchestrator(config, [engine])


async def test_run_failing_server_backs_off_and_another_takes_its_groups(tmp_path, monkeypatch):
    """The other server answers nothing until it has all groups, so the failing one stays the least loaded."""
    for name in ("_FIRST_BACKOFF_SECONDS", "_LONGEST_BACKOFF_SECONDS"):
        monkeypatch.setattr(inference_server, name, 60.0)
    config, has_all = make_config(tmp_path, async_level=2), asyncio.Event()
    async with fake_engine() as good, fake_engine() as bad:

        async def hold(body):
            if len(good.requests) == 18:  # nine groups, as many as the staleness bound admits before version 1
                has_all.set()
            await has_all.wait()

        good.gate = hold
        bad.fault = lambda body: web.Response(text='{"choices": [', content_type="application/json")
        paths = await run_orchestrator(config, [good, bad])
    assert [len(batch.seq_lens) for batch, _ in batches(paths)] == [6] * STEPS
    assert sum(line.get("dropped/error/engine", 0) for line in metrics(paths)) == 0
    examples = {tuple(request["token_ids"]) for request in bad.requests}
    assert len(examples) == 4, "every second group before the first failure, and none after it"
    assert len(bad.requests) <= 4 * 2 * 3, "two rollouts, three attempts; the first failure cancels the other rollout"


async def test_run_lease_of_another_run_is_named_and_of_a_killed_run_waited_for(tmp_path, engine):
    engine.holder = "somebody-else"
    with pytest.raises(RunError, match="409: leased by somebody-else"):
        await run_orchestrator(make_config(tmp_path), [engine])
    assert engine.requests == [], "a run that lives is not waited for"
    engine.lease_left = iter([0.03, 0.02, 0.01, 0.0]).__next__
    await run_orchestrator(make_config(tmp_path, output_dir=tmp_path / "other"), [engine])
    assert (engine.step, engine.holder) == (STEPS, None)


async def test_run_trainer_that_never_publishes_is_named(tmp_path, monkeypatch):
    limit_waits(monkeypatch, {INFERENCE: 60, TRAINER: 0.1})
    with pytest.raises(RunError, match=r"waiting for the trainer to publish version 1") as caught:
        await run_orchestrator(make_config(tmp_path, async_level=0), trainer=no_trainer)
    assert "trainer.log" not in str(caught.value), "no such file: nothing redirects its output"


async def test_mixture_keeps_group_size_and_concurrency_of_each_environment(tmp_path, engine):
    """Groups of 2 and 4 rollouts in batches of 3 groups; `large` has one group in flight at a time."""
    limits = {"rollouts_per_example": 4, "max_concurrent": 4, "max_rollouts_per_minute": 60_000.0}
    large = toy("large").model_copy(update={**limits, "sampling": {"max_tokens": 3}})
    config = make_config(tmp_path, env=[toy("small"), large], async_level=1)
    in_flight, most, overlap = Counter[int](), Counter[int](), asyncio.Event()

    async def gate(body):
        limit = body["sampling_params"]["max_tokens"]
        in_flight[limit] += 1
        most[limit] = max(most[limit], in_flight[limit])
        if in_flight[3] >= 4 and in_flight[6] > 4:
            overlap.set()
        await overlap.wait()
        await asyncio.sleep(0.02)  # for requests that should not be
        in_flight[limit] -= 1

    engine.gate = gate
    paths = await run_orchestrator(config, [engine])
    assert (most[3], most[6] > 4) == (4, True)
    for batch, manifest in batches(paths):
        assert len(manifest["group_ids"]) == 3
        assert set(Counter(batch.sample_group.tolist()).values()) <= {2, 4}
    assert {row["env"] for row in samples(paths, *range(STEPS))} == {"small", "large"}


async def test_mixture_keeps_its_ratio_of_trained_groups(tmp_path, engine):
    """Every group has zero advantages and is kept."""
    large = toy("spread", spread=True).model_copy(update={"weight": 2.0, "sampling": {"max_tokens": 3}})
    config = make_config(tmp_path, env=[toy("flat"), large])
    paths = await run_orchestrator(config, [engine])
    assert Counter(row["env"] for row in samples(paths, *range(STEPS))) == {"flat": STEPS * 2, "spread": STEPS * 4}
    assert {request["sampling_params"]["max_tokens"] for request in engine.requests} == {6, 3}
    rows = metrics(paths)
    assert all(row["dropped/error/flat"] == row["dropped/error/spread"] == 0 for row in rows)
    assert {"reward/flat/mean", "reward/spread/mean"} <= set().union(*rows), "each where a batch holds it"


async def test_zero_advantage_groups_are_replaced(tmp_path):
    config = make_config(
        tmp_path, env=[toy("flat"), toy("spread", spread=True)], filter_zero_advantage=True, oversampling_factor=2.0,
        max_off_policy_steps=3,
    )  # fmt: skip
    paths = await run_orchestrator(config)
    rows = samples(paths, *range(STEPS))
    assert {(row["env"], round(abs(row["advantage"]), 9)) for row in rows} == {("spread", 0.5)}
    last = metrics(paths)[-1]
    assert last["dropped/zero_advantage"] > 0 and last["tokens/dropped"] > 0
    assert last["tokens/unaccounted"] == 0
    assert sum(row["batch/zero_advantage_filler"] for row in metrics(paths)) == 0
    alone = make_config(
        tmp_path, env=[toy("flat")], filter_zero_advantage=True, max_steps=2, output_dir=tmp_path / "alone"
    )
    rows = metrics(await run_orchestrator(alone))
    assert [row["batch/zero_advantage_filler"] for row in rows] == [3, 3], "there is nothing else to fill the batch"
    assert rows[0]["dropped/zero_advantage"] >= 30


@pytest.fixture
def stopped(tmp_path):
    """Coroutine: run with `async_level = 2` until five groups of version 0 are finished, and one batch is shipped."""

    async def run(engine):
        config = make_config(tmp_path, async_level=2)
        paths, let_through = RunPaths(config.output_dir), set()

        async def only_five_examples(body):
            if len(let_through) < 5:
                let_through.add(tuple(body["token_ids"]))
            if tuple(body["token_ids"]) not in let_through:
                await asyncio.Event().wait()

        engine.gate = only_five_examples
        first = asyncio.create_task(run_orchestrator(config, [engine], trainer=no_trainer))
        await until(lambda: len(records(paths, "done")) == 5 and paths.samples(0).exists() and metrics(paths))
        await cancel(first)
        engine.gate = None
        engine.requests.clear()
        return config.model_copy(update={"restart": True}), paths

    return run


@pytest.mark.extended(after=5)
@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, 2),
        ({"async_level": 0}, 0),
        ({"rollouts_per_example": 3}, 0),
        ({"batch_size": 2, "async_level": 1}, 1),  # batch 1 is the last one for groups of version 0, and takes one
        ({"seq_len": 7}, 0),
        ({"async_level": 3}, 2),
        ({"async_level": 0, "max_off_policy_steps": 1}, 2),
        ({"batch_size": 2}, 2),
        ({"batch_size": 24}, 2),
        ({"max_steps": 2}, 2),
        ({"max_steps": 1}, 0),
        ({"enable_return_routed_experts": 1}, 0),  # of the server
    ],
    ids=str,
)
async def test_restart_other_settings_ships_every_position_once(stopped, changes, kept, engine):
    """Only finished groups that do not fit are sampled again."""
    config, paths = await stopped(engine)
    if "enable_return_routed_experts" in changes:
        engine.settings, changes = changes, {}
    config = config.model_copy(update=changes)
    finished = {line["group_id"] for line in records(paths, "done")}
    groups = group_ids(paths, 1)
    await run_orchestrator(config, [engine])
    sampled = len(engine.requests) // config.rollouts_per_example
    for step in range(1, config.max_steps):
        batch, manifest = read_batch(paths.rollouts(step), step)
        groups += manifest["group_ids"]
        assert step - batch.versions[batch.loss_mask == 1].min() <= config.max_staleness
        assert batch.seq_lens.max() <= config.seq_len
        assert len(set(zip(batch.sample_group, batch.sample_rollout, strict=True))) == config.batch_size
    expected = 3 + (config.max_steps - 1) * config.batch_size // config.rollouts_per_example
    assert len(groups) == len(set(groups)) == expected
    assert sampled == len(groups) - 3 - kept, "what fits is not sampled again, and nothing is sampled in vain"
    if config.max_steps == STEPS:
        # One that does not fit is sampled again, and late enough in the order that the run may end before it.
        assert len(finished - set(groups)) <= 2 - kept
        last = metrics(paths)[-1]
        assert last["tokens/unaccounted"] == 0
        assert last.get("dropped/resampled", 0) == 2 - kept
        assert last["tokens/dropped"] == (2 - kept) * 2 * 6
        check_progress(paths)


async def test_restart_other_seed_or_max_steps_below_shipped_raises(stopped, monkeypatch, engine):
    """In between, a restart that succeeds reads the ledger outside the event loop."""
    loop = asyncio.get_running_loop()
    config, paths = await stopped(engine)
    with pytest.raises(ConfigError, match="seed of toy_environment was 42 when the run began and is 43 now"):
        await run_orchestrator(config.model_copy(update={"seed": 43}), [engine], trainer=no_trainer)
    monkeypatch.setattr(orchestrator_module, "read_ledger", needs_loop(read_ledger, loop))
    monkeypatch.setattr(ledger_module, "replay", needs_loop(replay, loop))
    await run_orchestrator(config, [engine])
    assert steps_in(paths.rollouts_dir) == list(range(STEPS))
    message = f"max_steps = 5, but 6 batches were shipped before in {paths.rollouts_dir}"
    with pytest.raises(ConfigError, match=message):
        await run_orchestrator(config.model_copy(update={"max_steps": 5}), [engine])
    assert engine.holder is None


async def test_checkpoints_and_directories_do_not_block_the_event_loop(tmp_path, monkeypatch, engine):
    """Also with an invalid version, behind a symbolic link, and while old files with samples are deleted."""
    loop = asyncio.get_running_loop()
    for owner, name in (
        (ExampleStream, "state"), (DurationHistory, "state"), (weight_versions, "steps_in"),
        (orchestrator_module, "find_rollback"), (weight_versions, "read_manifest"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, needs_loop(getattr(owner, name), loop))
    resolve = Path.resolve
    watched = needs_loop(resolve, loop)
    monkeypatch.setattr(Path, "resolve", lambda path: (watched if path.name.startswith("step_") else resolve)(path))
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    config = make_config(
        tmp_path, output_dir=tmp_path / "link/run", on_invalid_weights="keep_previous", async_level=3,
        num_samples_per_batch=5, num_kept_sample_files=2, kept_sample_interval=3,
    )  # fmt: skip
    engine.refused = {3}
    paths = await run_orchestrator(with_ckpt(config, interval=2), [engine])
    assert engine.step == STEPS
    assert steps_in(paths.rollouts_dir) == list(range(STEPS))
    assert steps_in(paths.checkpoints_dir) == [2, 4, 6]
    assert sorted(file.name for file in paths.samples_dir.iterdir()) == [f"step_{n}.jsonl" for n in (0, 3, 4, 5)]
    assert len(samples(paths, 5)) == 4, "whole groups of 2, at most 5 rollouts"


async def test_groups_start_while_a_batch_is_written(tmp_path, monkeypatch, engine):
    """One group at a time: each group that ends makes capacity for the next."""
    config = make_config(tmp_path, async_level=3, max_concurrent=2)
    whole, loop = OrchestratorLoop._write, asyncio.get_running_loop()

    async def until_three_more_groups_are_started():
        allowed = (1 + 3) * 3 * 2  # by the bound, until the next version
        last = min(len(engine.requests) + 6, allowed)
        await until(lambda: len(engine.requests) >= last)

    def slow(self, step, *rest):
        if step == 0:
            asyncio.run_coroutine_threadsafe(until_three_more_groups_are_started(), loop).result()
        return whole(self, step, *rest)

    monkeypatch.setattr(OrchestratorLoop, "_write", slow)
    paths = await run_orchestrator(config, [engine])
    assert sorted(group_ids(paths)) == list(range(STEPS * 3))


async def test_versions_after_the_last_batch_are_evaluated(tmp_path):
    """The k versions that become current once the last batch is shipped are due like all others."""
    config = make_config(tmp_path, async_level=2)
    paths = RunPaths(config.output_dir)
    tasks = [(EvalTask(EvalEnvConfig(id="fake"), SamplingConfig(), -1, 1), FakePool(2))]

    def evaluated():
        return [line["step"] for line in metrics(paths) if "val/time_s" in line]

    async def after_each_evaluation(paths, steps, stop, delay_seconds):
        for step in range(steps):
            await until(lambda step=step: evaluated() == list(range(step + 1)))
            await play_trainer(paths, step + 1, asyncio.Event(), done=step)

    schedules = [EvalSchedule("val", tasks, 1, True)]
    await run_orchestrator(config, trainer=after_each_evaluation, schedules=schedules)
    assert evaluated() == list(range(STEPS + 1))
    assert metrics(paths)[-1]["val/skipped"] == 0


async def test_same_seed_samples_the_same_examples_in_order(tmp_path):
    """The seeds of the requests differ by rollout and repeat in the other run, too."""
    seen = []
    for run, delay_seconds in (("one", 0.0), ("two", 0.005)):
        values = {"sampling": {"max_tokens": 6, "seed": 7}, "env": [toy("a"), toy("b")]}
        async with fake_engine() as engine:
            engine.gate = random_pauses(delay_seconds)
            paths = await run_orchestrator(
                make_config(tmp_path, async_level=0, output_dir=tmp_path / run, **values), [engine]
            )
            seeds = sorted(tuple(request["sampling_params"]["seed"]) for request in engine.requests)
        rows = samples(paths, *range(STEPS))
        seen.append((seeds, [(row["group_id"], row["env"], row["example"]) for row in rows]))
    assert seen[0] == seen[1]
    assert len(set(seeds)) == STEPS * 6


async def test_invalid_version_with_newer_one_in_time_is_skipped(tmp_path, engine):
    config = make_config(tmp_path, async_level=2, on_invalid_weights="keep_previous")

    async def staging(step):
        engine.refusal = "another hash" if step in (2, 4) else ""

    engine.staging = staging
    paths = await run_orchestrator(config, [engine], trainer_delay_seconds=0.05)
    assert engine.step == STEPS
    check_bound(paths, 2)
    assert not any({2, 4} & set(batch.versions.tolist()) for batch, _ in batches(paths))
    assert metrics(paths)[-1]["tokens/unaccounted"] == 0


@pytest.mark.parametrize(("choice", "words"), [("fail", ""), ("keep_previous", "; without version 3")])
async def test_invalid_version_without_newer_one_ends_the_run(tmp_path, choice, words, engine):
    """Immediately, or as soon as nothing more can be sampled; never after a timeout."""
    config = make_config(tmp_path, async_level=1, on_invalid_weights=choice, wait_timeout_seconds=300)

    async def staging(step):
        engine.refusal = "tensor a has another hash" if step > 1 else ""

    engine.staging = staging
    async with asyncio.timeout(120):
        with pytest.raises(RunError, match=f"/stage_weights returned 400: tensor a has another hash{words}"):
            await run_orchestrator(config, [engine])
    assert engine.step <= 1
    rows = metrics(RunPaths(config.output_dir))
    assert len(rows) == 3 if choice == "keep_previous" else len(rows) <= 3


async def test_rollouts_sampled_before_a_wrong_canary_are_discarded(tmp_path, engine):
    """Servers sample from version 2 until its canary is wrong: no batch holds a token of it."""
    config = make_config(tmp_path, async_level=2, on_invalid_weights="keep_previous")
    in_flight, switched, has_sampled = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def trainer(paths, steps, stop, delay_seconds):
        done = 0
        async for _ in watch_directory(paths.rollouts_dir, stop):
            while done < steps and paths.rollouts(done).exists():
                if done == 1:
                    await in_flight.wait()
                if done == 2:
                    await switched.wait()  # a newer version would overtake it
                done += 1
                publish_version(paths, done)
            if done == steps:
                return

    async def gate(_):
        if engine.step == 1:
            in_flight.set()
            await switched.wait()
        if engine.step == 2:
            has_sampled.set()

    async def switching(step):
        engine.wrong = "the canary is wrong" if step == 2 else ""
        if step == 2:
            switched.set()
            await has_sampled.wait()  # so long the canary takes

    engine.gate, engine.switching = gate, switching
    paths = await run_orchestrator(config, [engine], trainer=trainer)
    assert not any(2 in batch.versions for batch, _ in batches(paths))
    assert metrics(paths)[-1]["groups/retried"] > 0


async def test_ship_all_of_batches_that_are_ready_together_starts_evaluations_between_them():
    waiting, evaluated = [[0], [1], [2]], []
    inference = SimpleNamespace(version=0)

    class Scheduler:
        finished = property(lambda self: not waiting)

        def ready(self):
            return waiting[0]

    async def ship(group_ids):
        waiting.remove(group_ids)
        inference.version += 1  # the weights switch while the batch is written

    orchestrator = SimpleNamespace(
        _wake=asyncio.Event(),
        _can_dispatch=asyncio.Event(),
        _inference=inference,
        _scheduler=Scheduler(),
        _ship=ship,
        _evaluator=SimpleNamespace(on_switch=lambda version, tasks: evaluated.append(version)),
        _dispatcher=SimpleNamespace(admit=lambda tasks: None),
    )
    await OrchestratorLoop._ship_all(orchestrator, None)
    assert evaluated == [0, 1, 2]


async def test_event_loop_lag_blocking_call_is_measured():
    lag, stop = EventLoopLag(), asyncio.Event()
    assert lag.metrics() == {}
    measuring = asyncio.create_task(lag.measure(stop))
    await asyncio.sleep(0)
    time.sleep(0.15)  # the fault under test: something blocks the loop
    stop.set()
    await measuring
    assert lag.metrics()["event_loop_lag/max"] > 0.09
    assert lag.metrics() == {}, "each measurement is returned once"
