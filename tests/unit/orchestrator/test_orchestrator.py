"""The whole orchestrator over the real HTTP contract, with a fake engine and a trainer without a model."""

import asyncio
import json
from collections import Counter
from contextlib import AsyncExitStack

import numpy as np
import pytest
from aiohttp import web

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.shared import ClientConfig, EnvConfig
from prime_rl.errors import ConfigError, RunError
from prime_rl.monitor import Monitor
from prime_rl.orchestrator.beginning import find_beginning
from prime_rl.orchestrator.orchestrator import Orchestrator
from prime_rl.orchestrator.policy import Policy
from prime_rl.orchestrator.setup import connect, model_access, start_environments
from prime_rl.run.batch import read_batch
from prime_rl.run.paths import RunPaths
from prime_rl.run.wait import changes
from tests.support.fake_engine import fake_engine, play_trainer, publish_version

pytestmark = pytest.mark.asyncio(loop_scope="session")

STEPS = 6


def make_config(tmp_path, tokenizer_dir, env_args=None, **values):
    given = {
        "model": {"name": str(tokenizer_dir)},
        "env": [EnvConfig(id="toy_environment", args=env_args or {})],
        "batch_size": 6,
        "rollouts_per_example": 2,
        "seq_len": 64,
        "sampling": {"max_tokens": 6},
        "max_steps": STEPS,
        "output_dir": tmp_path / "run",
        "wait_timeout_seconds": 20,
    }
    return OrchestratorConfig(**(given | values))


@pytest.fixture
def run_orchestrator(host):
    async def run(config, engines, trainer_delay_s=0.0, trainer=play_trainer):
        paths = RunPaths(config.output_dir)
        stop = asyncio.Event()
        training = asyncio.create_task(trainer(paths, config.max_steps, stop, trainer_delay_s))
        config = config.model_copy(update={"client": ClientConfig(base_url=[fake.url for fake in engines])})
        try:
            async with AsyncExitStack() as stack:
                environments = await start_environments(config, host, model_access(config), paths, stack)
                servers = [await connect(config, url, stack) for url in config.client.urls]
                beginning = await asyncio.to_thread(find_beginning, config)
                monitor = Monitor(paths, "orchestrator", None)
                stack.callback(monitor.close)
                await Orchestrator(config, environments, servers, monitor, beginning=beginning).run()
            await training
        finally:
            stop.set()
            training.cancel()
        return paths

    return run


def batches(paths):
    return [read_batch(paths.rollouts(step), step) for step in range(STEPS)]


@pytest.mark.parametrize("async_level", [0, 1, 2])
async def test_bound(tmp_path, tokenizer_dir, async_level, run_orchestrator):
    """I1, I2, I3 in the batches as the trainer reads them, with completions in random order and switches in between."""
    config = make_config(tmp_path, tokenizer_dir, async_level=async_level)
    rng = np.random.default_rng(0)
    async with fake_engine() as engine:

        async def gate(_):
            await asyncio.sleep(rng.exponential(0.02))

        engine.gate = gate
        paths = await run_orchestrator(config, [engine], trainer_delay_s=0.03)
        assert (engine.step, engine.holder) == (STEPS, None), "the last version is loaded and the lease given back"
    groups = []
    for step, (batch, manifest) in enumerate(batches(paths)):
        sampled = batch.versions[batch.loss_mask == 1]
        assert (sampled >= 0).all()
        assert step - sampled.min() <= async_level
        assert sampled.max() <= step, "no token comes from a version that this batch has yet to make"
        assert len(batch.seq_lens) == 6
        groups += manifest["group_ids"]
    assert sorted(groups) == list(range(STEPS * 3)), "every stream position is shipped exactly once"
    rows = [json.loads(line) for line in paths.metrics("orchestrator").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert max(row["staleness/max"] for row in rows) <= async_level
    assert all(row["tokens/wasted"] == 0 for row in rows)


async def test_bound_with_two_servers(tmp_path, tokenizer_dir, run_orchestrator):
    config = make_config(tmp_path, tokenizer_dir, async_level=1)
    async with fake_engine() as one, fake_engine() as two:
        paths = await run_orchestrator(config, [one, two])
        assert one.requests
        assert two.requests
    for step, (batch, _) in enumerate(batches(paths)):
        assert step - batch.versions[batch.versions >= 0].min() <= 1


async def test_a_server_dies_and_comes_back(tmp_path, tokenizer_dir, monkeypatch, run_orchestrator):
    """Its rollouts are played again elsewhere, within the bound; nothing is lost or shipped twice."""
    config = make_config(tmp_path, tokenizer_dir, async_level=1)
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

        def suspect(policy, server, *why):
            noticed.set()
            return original(policy, server)

        reborn, noticed, original = [], asyncio.Event(), Policy.suspect
        monkeypatch.setattr(Policy, "suspect", suspect)
        two.gate = die
        paths = await run_orchestrator(config, [one, two], trainer_delay_s=0.4)
        await reborn[0]
    groups = []
    for step, (batch, manifest) in enumerate(batches(paths)):
        assert step - batch.versions[batch.versions >= 0].min() <= 1
        groups += manifest["group_ids"]
    assert sorted(groups) == list(range(STEPS * 3))
    rows = [json.loads(line) for line in paths.metrics("orchestrator").read_text().splitlines()]
    assert rows[-1]["groups/retried"] >= 1


async def test_advantages_rows_and_samples_say_the_same(tmp_path, tokenizer_dir, run_orchestrator):
    config = make_config(tmp_path, tokenizer_dir, async_level=0, rollouts_per_example=3)
    async with fake_engine() as engine:
        paths = await run_orchestrator(config, [engine])
    batch, _ = read_batch(paths.rollouts(0))
    rows = [json.loads(line) for line in paths.samples(0).read_text().splitlines()]
    assert {(r["group_id"], r["rollout"]) for r in rows} == set(
        zip(batch.sample_group.tolist(), batch.sample_rollout.tolist(), strict=True)
    )
    assert (batch.advantages == 0).all(), "all rollouts of a group have one reward here"
    assert rows[0]["messages"][0]["content"].startswith("say it")


async def test_multi_turn_rollout_keeps_the_engines_ids(tmp_path, tokenizer_dir, run_orchestrator):
    """Three turns become one sample whose masked-in ids are exactly the sampled ones."""
    config = make_config(tmp_path, tokenizer_dir, {"turns": 3}, async_level=0, seq_len=256)
    async with fake_engine() as engine:
        paths = await run_orchestrator(config, [engine])
        prompts = {tuple(request["token_ids"]) for request in engine.requests}
    batch, _ = read_batch(paths.rollouts(0))
    assert batch.loss_mask.sum() == 6 * 3 * 6, "six rollouts, three turns, six tokens a turn"
    start = 0
    for length in batch.seq_lens:
        tokens = tuple(batch.tokens[start : start + length].tolist())
        assert any(tokens[: len(prompt)] == prompt for prompt in prompts)
        start += length


async def test_a_failing_environment_ends_the_run_with_its_exception(tmp_path, tokenizer_dir, run_orchestrator):
    config = make_config(tmp_path, tokenizer_dir, {"fail": "setup"}, async_level=0)
    async with fake_engine() as engine:
        with pytest.raises(RunError, match=r"error/toy_environment; the last: .*KeyError.*broken environment"):
            await run_orchestrator(config, [engine])
        assert engine.holder is None, "the lease is given back after a failure too"


async def test_a_reward_that_is_no_number_is_an_error_and_never_trained_on(tmp_path, tokenizer_dir, run_orchestrator):
    config = make_config(tmp_path, tokenizer_dir, {"fail": "nan"}, async_level=0)
    async with fake_engine() as engine:
        with pytest.raises(RunError, match="error/toy_environment"):
            await run_orchestrator(config, [engine])
    assert not RunPaths(config.output_dir).rollouts(0).exists()


async def test_a_server_that_only_fails_ends_the_run(tmp_path, tokenizer_dir, run_orchestrator, monkeypatch):
    monkeypatch.setattr("prime_rl.orchestrator.server._LONGEST_BAR_S", 0.001)
    config = make_config(tmp_path, tokenizer_dir, async_level=1, batch_size=2)
    async with fake_engine() as engine:
        engine.fault = lambda body: web.json_response({"error": {"message": "engine is dead"}}, status=500)
        with pytest.raises(RunError, match=r"in a row were dropped as error/engine; .*answered 500: engine is dead"):
            await run_orchestrator(config, [engine])


async def test_a_server_that_fails_is_left_alone_and_another_plays_its_groups(
    tmp_path, tokenizer_dir, run_orchestrator
):
    """It answers at once, so the least loaded server would always be this one."""
    config = make_config(tmp_path, tokenizer_dir)
    async with fake_engine() as good, fake_engine() as bad:
        bad.fault = lambda body: web.Response(text='{"choices": [', content_type="application/json")
        paths = await run_orchestrator(config, [good, bad])
    assert [len(batch.seq_lens) for batch, _ in batches(paths)] == [6] * STEPS
    lines = [json.loads(line) for line in paths.metrics("orchestrator").read_text().splitlines()]
    assert sum(line.get("error/engine", 0) for line in lines) == 0
    assert len(bad.requests) < len(good.requests)


async def test_another_runs_lease_is_named(tmp_path, tokenizer_dir, run_orchestrator):
    config = make_config(tmp_path, tokenizer_dir)
    async with fake_engine() as engine:
        engine.holder = "somebody-else"
        with pytest.raises(RunError, match="409: leased by somebody-else"):
            await run_orchestrator(config, [engine])
        assert engine.requests == [], "a run that lives is not waited for"


async def test_the_lease_of_a_run_that_was_killed_is_waited_for(tmp_path, tokenizer_dir, run_orchestrator):
    config = make_config(tmp_path, tokenizer_dir)
    async with fake_engine() as engine:
        engine.holder, engine.lease_left = "killed", iter([0.03, 0.02, 0.01, 0.0]).__next__
        await run_orchestrator(config, [engine])
        assert (engine.step, engine.holder) == (STEPS, None)


async def test_a_trainer_that_never_publishes_is_named_at_the_deadline(tmp_path, tokenizer_dir, run_orchestrator):
    config = make_config(tmp_path, tokenizer_dir, async_level=0, wait_timeout_seconds=0.5)
    async with fake_engine() as engine:
        with pytest.raises(RunError, match=r"waiting for the trainer to publish version 1 \(.*trainer.log\)"):
            await run_orchestrator(config, [engine], trainer_delay_s=60)


async def test_prompt_longer_than_seq_len_is_bad_input(tmp_path, tokenizer_dir, run_orchestrator):
    config = make_config(tmp_path, tokenizer_dir, {"prompt": "a long prompt " * 10})
    async with fake_engine() as engine:
        with pytest.raises(ConfigError, match=r"prompt of example 0 of environment 'toy_environment' has \d+ tokens"):
            await run_orchestrator(config, [engine])


async def test_environment_that_is_not_installed_names_the_command(tmp_path, tokenizer_dir, run_orchestrator):
    config = make_config(tmp_path, tokenizer_dir, env=[EnvConfig(id="no-such-env")])
    async with fake_engine() as engine:
        with pytest.raises(ConfigError, match=r"'no-such-env' .*uv pip install -e environments/no_such_env"):
            await run_orchestrator(config, [engine])


async def test_seeded_requests_differ_by_rollout_and_repeat_by_run(tmp_path, tokenizer_dir, run_orchestrator):
    seen = []
    for run in ("one", "two"):
        values = {"sampling": {"max_tokens": 6, "seed": 7}, "output_dir": tmp_path / run}
        config = make_config(tmp_path, tokenizer_dir, async_level=0, **values)
        async with fake_engine() as engine:
            await run_orchestrator(config, [engine])
            seen.append(sorted(request["sampling_params"]["seed"] for request in engine.requests))
    assert seen[0] == seen[1]
    assert len(set(seen[0])) == STEPS * 6


def toy(name, **args):
    return EnvConfig(id="toy_environment", name=name, args=args)


async def test_a_mixture_keeps_its_ratio_over_what_is_trained_on(tmp_path, tokenizer_dir, run_orchestrator):
    """Every other group of `flat` teaches nothing and is dropped; its share of the batches stays a third."""
    envs = [toy("flat"), toy("spread", spread=True).model_copy(update={"weight": 2.0, "sampling": {"max_tokens": 3}})]
    config = make_config(tmp_path, tokenizer_dir, env=envs)
    async with fake_engine() as engine:
        paths = await run_orchestrator(config, [engine])
    shipped = [row for step in range(STEPS) for row in samples(paths, step)]
    counts = Counter(row["env"] for row in shipped)
    assert counts == {"flat": STEPS * 2, "spread": STEPS * 4}
    assert {request["sampling_params"]["max_tokens"] for request in engine.requests} == {6, 3}
    rows = metrics(paths)
    assert all(row["error/flat"] == row["error/spread"] == 0 for row in rows)
    assert {"reward/flat/mean", "reward/spread/mean"} <= set().union(*rows), "each where a batch holds it"


async def test_groups_that_teach_nothing_are_refilled(tmp_path, tokenizer_dir, run_orchestrator):
    envs = [toy("flat"), toy("spread", spread=True)]
    config = make_config(
        tmp_path, tokenizer_dir, env=envs, filter_zero_advantage=True, oversampling_factor=2.0, max_off_policy_steps=3
    )
    async with fake_engine() as engine:
        paths = await run_orchestrator(config, [engine])
    assert {row["env"] for step in range(STEPS) for row in samples(paths, step)} == {"spread"}
    last = metrics(paths)[-1]
    assert last["dropped/zero_advantage"] > 0
    assert last["tokens/wasted"] == 0
    assert last["tokens/dropped"] > 0
    assert sum(row["batch/filled_degenerate"] for row in metrics(paths)) == 0


async def test_where_nothing_teaches_batches_are_filled_and_the_run_ends(tmp_path, tokenizer_dir, run_orchestrator):
    config = make_config(tmp_path, tokenizer_dir, env=[toy("flat")], filter_zero_advantage=True, max_steps=2)
    async with fake_engine() as engine:
        paths = await run_orchestrator(config, [engine])
    rows = metrics(paths)
    assert [row["batch/filled_degenerate"] for row in rows] == [3, 3]
    assert rows[0]["dropped/zero_advantage"] >= 30


async def test_a_restart_ships_every_position_once(tmp_path, tokenizer_dir, run_orchestrator):
    """The orchestrator alone ends in the middle; what was finished and not shipped is shipped by the next one."""
    config = make_config(tmp_path, tokenizer_dir, async_level=2)
    paths = RunPaths(config.output_dir)
    let_through, never = set(), asyncio.Event()

    async def only_four_examples(body):
        if len(let_through) < 4:
            let_through.add(tuple(body["token_ids"]))
        if tuple(body["token_ids"]) not in let_through:
            await never.wait()

    async with fake_engine() as engine:
        engine.gate = only_four_examples
        first = asyncio.create_task(run_orchestrator(config, [engine], trainer=no_trainer))
        async with asyncio.timeout(60):
            while len(done_groups(paths)) < 4 or not paths.samples(0).exists() or not metrics(paths):
                await asyncio.sleep(0.01)  # another process would look at these files just so
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        engine.gate = None
        before = len(engine.requests)
        await run_orchestrator(config.model_copy(update={"restart": True}), [engine])
        again = len(engine.requests) - before
    groups = [group for _, manifest in batches(paths) for group in manifest["group_ids"]]
    assert sorted(groups) == list(range(STEPS * 3))
    assert again == (STEPS * 3 - 4) * 2, "what was finished is not played again"
    assert [row["step"] for row in metrics(paths)] == list(range(STEPS))


def done_groups(paths):
    lines = paths.ledger(0).read_text().splitlines() if paths.ledger(0).exists() else []
    return [line for line in lines if json.loads(line)["record"] == "done"]


async def no_trainer(paths, steps, stop, delay_s):
    await stop.wait()


def samples(paths, step):
    return [json.loads(line) for line in paths.samples(step).read_text().splitlines()]


def metrics(paths):
    return [json.loads(line) for line in paths.metrics("orchestrator").read_text().splitlines()]


async def test_two_runs_of_one_seed_sample_the_same_examples_in_the_same_order(
    tmp_path, tokenizer_dir, run_orchestrator
):
    seen = []
    for run, delay_s in (("one", 0.0), ("two", 0.01)):
        config = make_config(
            tmp_path, tokenizer_dir, async_level=0, output_dir=tmp_path / run, env=[toy("a"), toy("b")]
        )
        async with fake_engine() as engine:
            rng = np.random.default_rng(len(seen))

            async def gate(_, rng=rng, delay_s=delay_s):
                await asyncio.sleep(delay_s * rng.random())

            engine.gate = gate
            paths = await run_orchestrator(config, [engine])
        rows = [row for step in range(STEPS) for row in samples(paths, step)]
        seen.append([(row["group_id"], row["env"], row["messages"][0]["content"]) for row in rows])
    assert seen[0] == seen[1]


async def test_a_refused_version_is_done_without_where_a_newer_one_comes_in_time(
    tmp_path, tokenizer_dir, run_orchestrator
):
    config = make_config(tmp_path, tokenizer_dir, async_level=2, on_refused_weights="keep")
    async with fake_engine() as engine:

        async def staging(step):
            engine.refusal = "another hash" if step in (2, 4) else ""

        engine.staging = staging
        paths = await run_orchestrator(config, [engine], trainer_delay_s=0.05)
        assert engine.step == STEPS
    for step, (batch, _) in enumerate(batches(paths)):
        assert step - batch.versions[batch.versions >= 0].min() <= 2
        assert not {2, 4} & set(batch.versions.tolist())
    assert metrics(paths)[-1]["tokens/wasted"] == 0


@pytest.mark.parametrize(("choice", "words"), [("end", ""), ("keep", "; without version 3")])
async def test_refused_versions_end_the_run_in_the_servers_words(
    tmp_path, tokenizer_dir, run_orchestrator, choice, words
):
    """At once, or as soon as nothing more can be sampled without one; never by a deadline."""
    config = make_config(tmp_path, tokenizer_dir, async_level=1, on_refused_weights=choice, wait_timeout_seconds=300)
    async with fake_engine() as engine:

        async def staging(step):
            engine.refusal = "tensor a has another hash" if step > 1 else ""

        engine.staging = staging
        async with asyncio.timeout(120):
            with pytest.raises(RunError, match=f"/stage_weights answered 400: tensor a has another hash{words}"):
                await run_orchestrator(config, [engine])
        assert engine.step <= 1
    rows = metrics(RunPaths(config.output_dir))
    assert len(rows) == 3 if choice == "keep" else len(rows) <= 3


async def test_nothing_counts_that_was_sampled_before_the_canary_has_answered(
    tmp_path, tokenizer_dir, run_orchestrator
):
    """Version 2 is sampled from for a while, then its canary is wrong: no batch holds a token of it."""
    config = make_config(tmp_path, tokenizer_dir, async_level=2, on_refused_weights="keep")
    in_flight, switched, sampled = asyncio.Event(), asyncio.Event(), []

    async def trainer(paths, steps, stop, delay_s):
        done = 0
        async for _ in changes(paths.rollouts_dir, stop):
            while done < steps and paths.rollouts(done).exists():
                if done == 1:
                    await in_flight.wait()
                if done == 2:
                    await switched.wait()  # a newer version would overtake it
                done += 1
                publish_version(paths, done)
            if done == steps:
                return

    async with fake_engine() as engine:

        async def gate(_):
            if engine.step == 1:
                in_flight.set()
                await switched.wait()
            sampled.append(engine.step)

        async def switching(step):
            engine.wrong = "the canary is wrong" if step == 2 else ""
            if step == 2:
                switched.set()
                await asyncio.sleep(0.5)  # so long the canary takes

        engine.gate, engine.switching = gate, switching
        paths = await run_orchestrator(config, [engine], trainer=trainer)
    assert 2 in sampled
    assert not any(2 in batch.versions for batch, _ in batches(paths))
    assert metrics(paths)[-1]["groups/retried"] > 0
