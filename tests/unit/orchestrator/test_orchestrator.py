"""The complete orchestrator over HTTP, with a fake engine and a trainer without a model."""

import asyncio
import itertools
import json
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from aiohttp import web

from prime_rl.configs.checkpoint import CkptConfig
from prime_rl.configs.client import ClientConfig
from prime_rl.configs.environment import EnvConfig, EvalEnvConfig
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.sampling import SamplingConfig
from prime_rl.core.errors import ConfigError, RunError
from prime_rl.evaluation.eval_plan import EvalTask
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.monitors import Monitor
from prime_rl.orchestrator import orchestrator as orchestrator_module
from prime_rl.orchestrator.example_stream import ExampleStream
from prime_rl.orchestrator.inference import weight_versions
from prime_rl.orchestrator.inference.inference_pool import InferencePool
from prime_rl.orchestrator.ledger import ledger as ledger_module
from prime_rl.orchestrator.ledger.ledger import read_ledger, replay
from prime_rl.orchestrator.online_evaluation import EvalSchedule
from prime_rl.orchestrator.orchestrator import EventLoopLag, OrchestratorLoop
from prime_rl.orchestrator.orchestrator_setup import connect, model_access, start_environments
from prime_rl.orchestrator.resume import find_start_point
from prime_rl.orchestrator.run_reports import SampleFiles
from prime_rl.orchestrator.scheduler import DurationHistory
from prime_rl.orchestrator.waits import INFERENCE, TRAINER, ProgressWatchdog
from prime_rl.storage.batch import read_batch
from prime_rl.storage.paths import RunPaths, steps_in
from prime_rl.storage.wait_for import watch_directory
from tests.support.fake_engine import fake_engine, play_trainer, publish_version
from tests.support.loop_turns import needs_loop
from tests.support.tiny_model import make_tokenizer
from tests.unit.evaluation.fakes import FakePool, make_rollout
from tests.unit.orchestrator.ledger_player import make_group

pytestmark = pytest.mark.asyncio(loop_scope="session")

STEPS = 6
SELF_PLAY = Path(__file__).parents[2] / "support/environments/agents/self_play.py"
TOKENIZER = make_tokenizer()


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
        "wait_timeout_seconds": 60,
        "failing_env_seconds": 0,
    }
    return OrchestratorConfig(**(given | values))


async def run_loop(host, config, start_point, schedules=()):
    """Run one `OrchestratorLoop` with the servers and the environments of the configuration."""
    async with AsyncExitStack() as stack:
        environments = await start_environments(config, host, model_access(config), stack)
        servers = [await connect(config, url, stack) for url in config.client.urls]
        monitor = Monitor(config.run_paths, "orchestrator", None)
        stack.callback(monitor.close)
        loop = OrchestratorLoop(config, environments, servers, monitor, start_point=start_point, schedules=schedules)
        await loop.run()


def with_engines(config, engines):
    return config.model_copy(update={"client": ClientConfig(base_url=[engine.url for engine in engines])})


@pytest.fixture
def run_orchestrator(host):
    async def run(config, engines=None, trainer_delay_seconds=0.0, trainer=play_trainer, schedules=()):
        if engines is None:
            async with fake_engine() as engine:
                return await run(config, [engine])
        paths, stop = RunPaths(config.output_dir), asyncio.Event()
        training = asyncio.create_task(trainer(paths, config.max_steps, stop, trainer_delay_seconds))
        config = with_engines(config, engines)
        try:
            await run_loop(host, config, await asyncio.to_thread(find_start_point, config), schedules)
            await training
        finally:
            stop.set()
            training.cancel()
        return paths

    return run


def limit_waits(monkeypatch, timeouts_seconds):
    """Give the waits for each peer their own `wait_timeout_seconds`, so that a test expects one of them to end."""
    wait = ProgressWatchdog.wait

    async def limited(self, wake, progress_token, phase, role, *rest, **place):
        self._timeout_seconds = timeouts_seconds[role]
        await wait(self, wake, progress_token, phase, role, *rest, **place)

    monkeypatch.setattr(ProgressWatchdog, "wait", limited)


def random_pauses(mean_seconds, seed=0):
    """A gate of a fake engine that holds each request for a random time."""
    rng = np.random.default_rng(seed)

    async def gate(_):
        await asyncio.sleep(rng.exponential(mean_seconds))

    return gate


def batches(paths):
    return [read_batch(paths.rollouts(step), step) for step in range(STEPS)]


@pytest.mark.parametrize("async_level", [0, 1, 2])
async def test_run_any_async_level_keeps_the_staleness_bound(
    tmp_path, tokenizer_dir, async_level, run_orchestrator, monkeypatch
):
    """The batches of two servers keep I1, I2 and I3 with random completions and switches."""
    config = make_config(tmp_path, tokenizer_dir, async_level=async_level)
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
    groups = []
    for step, (batch, manifest) in enumerate(batches(paths)):
        sampled = batch.versions[batch.loss_mask == 1]
        assert (sampled >= 0).all()
        assert step - sampled.min() <= async_level
        assert sampled.max() <= step, "no token comes from a version that this batch has yet to make"
        assert len(batch.seq_lens) == 6
        assert manifest.get("base_canaries") == (None if step else canaries), "the trainer compares its base model"
        rows = samples(paths, step)
        rollouts = zip(batch.sample_group.tolist(), batch.sample_rollout.tolist(), strict=True)
        assert {(row["group_id"], row["rollout"]) for row in rows} == set(rollouts)
        assert rows[0]["messages"][0]["content"].startswith("say it")
        assert (batch.advantages == 0).all(), "all rollouts of a group have one reward here"
        groups += manifest["group_ids"]
    assert sorted(groups) == list(range(STEPS * 3)), "every stream position is shipped exactly once"
    rows = metrics(paths)
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert max(row["staleness/max"] for row in rows) <= async_level
    assert all(row["tokens/unaccounted"] == 0 for row in rows)


@pytest.mark.extended
async def test_run_whose_last_version_arrives_long_after_the_end_of_the_trainer_completes(
    tmp_path, tokenizer_dir, run_orchestrator, said
):
    """The last version is always a full one, and a relay copies it over a slow network."""
    config = make_config(tmp_path, tokenizer_dir, heartbeat={"warn_after_seconds": 0.1, "dead_after_seconds": 0.3})

    async def trainer(paths, steps, stop, delay_seconds):
        await play_trainer(paths, steps - 1, stop)
        async for _ in watch_directory(paths.rollouts_dir, asyncio.Event()):
            if paths.rollouts(steps - 1).exists():
                break
        with HeartbeatWriter(paths, TRAINER, TRAINER, settings={"max_steps": STEPS}):
            pass  # no earlier heartbeat: one that is late would end the run
        await asyncio.sleep(2)
        publish_version(paths, steps)

    async with fake_engine() as engine:
        await run_orchestrator(config, [engine], trainer=trainer)
        assert engine.step == STEPS
    assert not [line for line in said() if "has ended" in line]


@pytest.mark.extended
async def test_run_lost_server_returns(tmp_path, tokenizer_dir, monkeypatch, run_orchestrator):
    """Its rollouts are sampled again on another server within the bound; none is lost or shipped twice."""
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

        def take_out(policy, server, *why):
            noticed.set()
            return original(policy, server)

        reborn, noticed, original = [], asyncio.Event(), InferencePool.take_out
        monkeypatch.setattr(InferencePool, "take_out", take_out)
        two.gate = die
        paths = await run_orchestrator(config, [one, two], trainer_delay_seconds=0.4)
        await reborn[0]
    groups = []
    for step, (batch, manifest) in enumerate(batches(paths)):
        assert step - batch.versions[batch.versions >= 0].min() <= 1
        groups += manifest["group_ids"]
    assert sorted(groups) == list(range(STEPS * 3))
    assert metrics(paths)[-1]["groups/retried"] >= 1


async def test_two_agents_get_the_advantages_of_their_own_rewards(tmp_path, tokenizer_dir, run_orchestrator):
    """Larger numbers win. Samples list the credits, and each row has the advantage of its agent."""
    numbers = itertools.cycle("3141592653")
    config = make_config(tmp_path, tokenizer_dir, env=[EnvConfig(id=str(SELF_PLAY))], seq_len=256)
    async with fake_engine() as engine:
        engine.reply = lambda body: ([TOKENIZER.convert_tokens_to_ids(next(numbers)), TOKENIZER.eos_token_id], "stop")
        paths = await run_orchestrator(config, [engine])
    seen = set()
    for step, (batch, _) in enumerate(batches(paths)):
        rows = samples(paths, step)
        credits = {(row["group_id"], row["rollout"]): row["credits"] for row in rows}
        for group in {row["group_id"] for row in rows}:
            for agent in range(2):
                one, two = (credits[group, rollout][agent] for rollout in range(2))
                assert one["name"] == two["name"] == ("first", "second")[agent]
                assert one["advantage"] == -two["advantage"] == (one["reward"] - two["reward"]) / 2
        for index, end in enumerate(np.cumsum(batch.seq_lens)):
            span = slice(end - batch.seq_lens[index], end)
            trained = batch.advantages[span][batch.loss_mask[span] == 1]
            is_second = "More than" in TOKENIZER.decode(batch.tokens[span])
            credit = credits[batch.sample_group[index], batch.sample_rollout[index]][is_second]
            assert trained.tolist() == [credit["advantage"]] * 2
            seen.add(credit["advantage"])
    assert seen > {0.5, -0.5}


async def test_multi_turn_rollout_keeps_the_engine_token_ids(tmp_path, tokenizer_dir, run_orchestrator):
    """Three turns become one sample whose unmasked ids are the sampled ones."""
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


@pytest.mark.extended
@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"env_args": {"fail": "setup"}}, RunError, r"error/toy_environment; the last: .*KeyError.*broken environment"),
        ({"env_args": {"fail": "nan"}}, RunError, "error/toy_environment"),
        (
            {"env_args": {"prompt": "a long prompt " * 10}}, ConfigError,
            r"prompt of example 0 of environment 'toy_environment' has \d+ tokens",
        ),
        (
            {"env": [EnvConfig(id="no-such-env")]}, ConfigError,
            r"no-such-env is not installed; .*prime env install no-such-env",
        ),
    ],
    ids=["fails", "non-finite reward", "long prompt", "not installed"],
)  # fmt: skip
async def test_run_unusable_environment_ends_with_its_error(
    tmp_path, tokenizer_dir, run_orchestrator, values, error, message
):
    config = make_config(tmp_path, tokenizer_dir, async_level=0, **values)
    async with fake_engine() as engine:
        with pytest.raises(error, match=message):
            await run_orchestrator(config, [engine])
        assert engine.holder is None, "the lease is given back after a failure too"
    assert not RunPaths(config.output_dir).rollouts(0).exists()


async def test_run_server_that_only_fails_ends_it(tmp_path, tokenizer_dir, run_orchestrator, monkeypatch):
    monkeypatch.setattr("prime_rl.orchestrator.inference.inference_server._LONGEST_BACKOFF_SECONDS", 0.001)
    config = make_config(tmp_path, tokenizer_dir, async_level=1, batch_size=2)
    async with fake_engine() as engine:
        engine.fault = lambda body: web.json_response({"error": {"message": "engine is dead"}}, status=500)
        with pytest.raises(RunError, match=r"in a row were dropped as error/engine; .*returned 500: engine is dead"):
            await run_orchestrator(config, [engine])


@pytest.mark.extended
async def test_run_failing_server_backs_off_and_another_takes_its_groups(
    tmp_path, tokenizer_dir, run_orchestrator, monkeypatch
):
    """The other server answers nothing until it has all groups, so the failing one stays the least loaded."""
    monkeypatch.setattr("prime_rl.orchestrator.inference.inference_server._FIRST_BACKOFF_SECONDS", 60.0)
    monkeypatch.setattr("prime_rl.orchestrator.inference.inference_server._LONGEST_BACKOFF_SECONDS", 60.0)
    config, has_all = make_config(tmp_path, tokenizer_dir, async_level=2), asyncio.Event()
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


async def test_run_lease_of_another_run_is_named(tmp_path, tokenizer_dir, run_orchestrator):
    config = make_config(tmp_path, tokenizer_dir)
    async with fake_engine() as engine:
        engine.holder = "somebody-else"
        with pytest.raises(RunError, match="409: leased by somebody-else"):
            await run_orchestrator(config, [engine])
        assert engine.requests == [], "a run that lives is not waited for"


@pytest.mark.extended
async def test_run_lease_of_a_killed_run_is_waited_for(tmp_path, tokenizer_dir, run_orchestrator):
    config = make_config(tmp_path, tokenizer_dir)
    async with fake_engine() as engine:
        engine.holder, engine.lease_left = "killed", iter([0.03, 0.02, 0.01, 0.0]).__next__
        await run_orchestrator(config, [engine])
        assert (engine.step, engine.holder) == (STEPS, None)


async def test_run_trainer_that_never_publishes_is_named(tmp_path, tokenizer_dir, run_orchestrator, monkeypatch):
    limit_waits(monkeypatch, {INFERENCE: 60, TRAINER: 0.2})
    config = make_config(tmp_path, tokenizer_dir, async_level=0)
    async with fake_engine() as engine:
        with pytest.raises(RunError, match=r"waiting for the trainer to publish version 1") as caught:
            await run_orchestrator(config, [engine], trainer_delay_seconds=60)
        assert "trainer.log" not in str(caught.value), "no such file: nothing redirects its output"


def toy(name, **args):
    return EnvConfig(id="toy_environment", name=name, args=args)


@pytest.mark.extended
async def test_mixture_keeps_group_size_and_concurrency_of_each_environment(tmp_path, tokenizer_dir, run_orchestrator):
    """Groups of 2 and 4 rollouts in batches of 3 groups; `large` has one group in flight at a time."""
    limits = {"rollouts_per_example": 4, "max_concurrent": 4, "max_rollouts_per_minute": 60_000.0}
    large = toy("large").model_copy(update={**limits, "sampling": {"max_tokens": 3}})
    config = make_config(tmp_path, tokenizer_dir, env=[toy("small"), large], async_level=1)
    in_flight, most, overlap = Counter[int](), Counter[int](), asyncio.Event()
    async with fake_engine() as engine:

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
    assert {row["env"] for step in range(STEPS) for row in samples(paths, step)} == {"small", "large"}


async def test_mixture_keeps_its_ratio_of_trained_groups(tmp_path, tokenizer_dir, run_orchestrator):
    """Every other group of `flat` has zero advantages and is dropped; its share of the batches stays a third."""
    envs = [toy("flat"), toy("spread", spread=True).model_copy(update={"weight": 2.0, "sampling": {"max_tokens": 3}})]
    config = make_config(tmp_path, tokenizer_dir, env=envs)
    async with fake_engine() as engine:
        paths = await run_orchestrator(config, [engine])
    shipped = [row for step in range(STEPS) for row in samples(paths, step)]
    counts = Counter(row["env"] for row in shipped)
    assert counts == {"flat": STEPS * 2, "spread": STEPS * 4}
    assert {request["sampling_params"]["max_tokens"] for request in engine.requests} == {6, 3}
    rows = metrics(paths)
    assert all(row["dropped/error/flat"] == row["dropped/error/spread"] == 0 for row in rows)
    assert {"reward/flat/mean", "reward/spread/mean"} <= set().union(*rows), "each where a batch holds it"


async def test_zero_advantage_groups_are_replaced(tmp_path, tokenizer_dir, run_orchestrator):
    envs = [toy("flat"), toy("spread", spread=True)]
    config = make_config(
        tmp_path, tokenizer_dir, env=envs, filter_zero_advantage=True, oversampling_factor=2.0, max_off_policy_steps=3
    )
    paths = await run_orchestrator(config)
    assert {row["env"] for step in range(STEPS) for row in samples(paths, step)} == {"spread"}
    last = metrics(paths)[-1]
    assert last["dropped/zero_advantage"] > 0
    assert last["tokens/unaccounted"] == 0
    assert last["tokens/dropped"] > 0
    assert sum(row["batch/zero_advantage_filler"] for row in metrics(paths)) == 0


async def test_only_zero_advantage_groups_fill_the_batches(tmp_path, tokenizer_dir, run_orchestrator):
    config = make_config(tmp_path, tokenizer_dir, env=[toy("flat")], filter_zero_advantage=True, max_steps=2)
    paths = await run_orchestrator(config)
    rows = metrics(paths)
    assert [row["batch/zero_advantage_filler"] for row in rows] == [3, 3]
    assert rows[0]["dropped/zero_advantage"] >= 30


def check_progress(paths):
    """The totals of the metrics are those of all batches so far, after any restart or rollback."""
    totals = np.cumsum([(len(b.tokens), len(b.seq_lens), len(m["group_ids"])) for b, m in batches(paths)], axis=0)
    for step, (row, total) in enumerate(zip(metrics(paths), totals.tolist(), strict=True)):
        assert row["progress/step"] == step + 1
        assert [row[f"progress/{name}"] for name in ("tokens", "samples", "problems")] == total


@pytest.fixture
def stopped(tmp_path, tokenizer_dir, run_orchestrator):
    """Coroutine: run with `async_level = 2` until five groups of version 0 are finished, and one batch is shipped."""

    async def run(engine):
        config = make_config(tmp_path, tokenizer_dir, async_level=2)
        paths, let_through = RunPaths(config.output_dir), set()

        async def only_five_examples(body):
            if len(let_through) < 5:
                let_through.add(tuple(body["token_ids"]))
            if tuple(body["token_ids"]) not in let_through:
                await asyncio.Event().wait()

        engine.gate = only_five_examples
        first = asyncio.create_task(run_orchestrator(config, [engine], trainer=no_trainer))
        async with asyncio.timeout(60):
            while len(done_groups(paths)) < 5 or not paths.samples(0).exists() or not metrics(paths):
                await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        engine.gate = None
        engine.requests.clear()
        return config.model_copy(update={"restart": True}), paths

    return run


@pytest.mark.extended(after=1)
@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, 2),
        ({"async_level": 3}, 2),
        ({"async_level": 1}, 2),
        ({"async_level": 0}, 0),
        ({"async_level": 0, "max_off_policy_steps": 1}, 2),
        ({"batch_size": 2}, 2),
        ({"batch_size": 2, "async_level": 1}, 1),  # batch 1 is the last one for groups of version 0, and takes one
        ({"batch_size": 24}, 2),
        ({"rollouts_per_example": 3}, 0),
        ({"seq_len": 20}, 0),
        ({"max_steps": 2}, 2),
        ({"max_steps": 1}, 0),
    ],
    ids=str,
)
async def test_restart_other_settings_ships_every_position_once(stopped, run_orchestrator, changes, kept):
    """Only finished groups that do not fit are sampled again."""
    async with fake_engine() as engine:
        config, paths = await stopped(engine)
        config = config.model_copy(update=changes)
        finished = {json.loads(line)["group_id"] for line in done_groups(paths)}
        first = json.loads((paths.rollouts(0) / "manifest.json").read_text())["group_ids"]
        await run_orchestrator(config, [engine])
        sampled = len(engine.requests) // config.rollouts_per_example
    groups, count = list(first), config.rollouts_per_example
    for step in range(1, config.max_steps):
        batch, manifest = read_batch(paths.rollouts(step), step)
        groups += manifest["group_ids"]
        assert step - batch.versions[batch.loss_mask == 1].min() <= config.max_staleness
        assert batch.seq_lens.max() <= config.seq_len
        assert len(set(zip(batch.sample_group, batch.sample_rollout, strict=True))) == config.batch_size
    assert len(groups) == len(set(groups)) == 3 + (config.max_steps - 1) * config.batch_size // count
    assert sampled == len(groups) - 3 - kept, "what fits is not sampled again, and nothing is sampled in vain"
    if config.max_steps == STEPS:
        # One that does not fit is sampled again, and late enough in the order that the run may end before it.
        assert len(finished - set(groups)) <= 2 - kept
        last = metrics(paths)[-1]
        assert last["tokens/unaccounted"] == 0
        assert last.get("dropped/resampled", 0) == 2 - kept
        assert last["tokens/dropped"] == (2 - kept) * 2 * 6
        assert [row["step"] for row in metrics(paths)] == list(range(STEPS))
        check_progress(paths)


@pytest.mark.extended
async def test_restart_other_seed_or_max_steps_below_shipped_raises(stopped, run_orchestrator, monkeypatch):
    """In between, a restart that succeeds reads the ledger outside the event loop."""
    loop = asyncio.get_running_loop()
    async with fake_engine() as engine:
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


async def test_checkpoints_and_directories_do_not_block_the_event_loop(
    tmp_path, tokenizer_dir, run_orchestrator, monkeypatch
):
    """Also with an invalid version, and behind a symbolic link."""
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
        tmp_path, tokenizer_dir, output_dir=tmp_path / "link/run", on_invalid_weights="keep_previous", async_level=3,
        ckpt=CkptConfig(interval=2),
    )  # fmt: skip
    async with fake_engine() as engine:
        engine.refused = {3}
        paths = await run_orchestrator(config, [engine])
        assert engine.step == STEPS
    assert steps_in(paths.rollouts_dir) == list(range(STEPS))
    assert steps_in(paths.checkpoints_dir) == [2, 4, 6]


async def test_groups_start_while_a_batch_is_written(tmp_path, tokenizer_dir, run_orchestrator, monkeypatch):
    """One group at a time: each group that ends makes capacity for the next."""
    config = make_config(tmp_path, tokenizer_dir, async_level=3, max_concurrent=2)
    whole, loop = OrchestratorLoop._write, asyncio.get_running_loop()

    async def until_three_more_groups_are_started():
        allowed = (1 + 3) * 3 * 2  # by the bound, until the next version
        last = min(len(engine.requests) + 6, allowed)
        async with asyncio.timeout(60):
            while len(engine.requests) < last:
                await asyncio.sleep(0.01)

    def slow(self, step, *rest):
        if step == 0:
            asyncio.run_coroutine_threadsafe(until_three_more_groups_are_started(), loop).result()
        return whole(self, step, *rest)

    monkeypatch.setattr(OrchestratorLoop, "_write", slow)
    async with fake_engine() as engine:
        paths = await run_orchestrator(config, [engine])
    groups = [group for _, manifest in batches(paths) for group in manifest["group_ids"]]
    assert sorted(groups) == list(range(STEPS * 3))


@pytest.mark.extended
async def test_sample_files_limits_rollouts_and_files(tmp_path, tokenizer_dir, run_orchestrator):
    config = make_config(
        tmp_path, tokenizer_dir, num_samples_per_batch=5, num_kept_sample_files=2, kept_sample_interval=3
    )
    paths = await run_orchestrator(config)
    assert sorted(file.name for file in paths.samples_dir.iterdir()) == [f"step_{n}.jsonl" for n in (0, 3, 4, 5)]
    rows = samples(paths, STEPS - 1)
    assert len(rows) == 4, "whole groups of 2, at most 5 rollouts"
    batch, _ = read_batch(paths.rollouts(STEPS - 1))
    assert {row["group_id"] for row in rows} < set(batch.sample_group.tolist())


@pytest.mark.parametrize(("num", "chosen"), [(None, [0, 1, 2, 3, 4]), (1, [0]), (4, [0, 2]), (100, [0, 1, 2, 3, 4])])
async def test_sample_files_choose_evenly_from_the_batch(tmp_path, num, chosen):
    groups = [make_group(group_id) for group_id in range(5)]
    written = SampleFiles(RunPaths(tmp_path), num).write(0, groups, [np.zeros(2)] * 5)
    assert [row["group_id"] for row in written] == [group for group in chosen for _ in range(2)]


@pytest.mark.extended
async def test_restart_evaluates_each_version_once(tmp_path, tokenizer_dir, run_orchestrator):
    """A restart resets the servers, but their version is never reported as 0."""
    config = make_config(tmp_path, tokenizer_dir, async_level=1)
    paths, hold = RunPaths(config.output_dir), asyncio.Event()
    held = asyncio.Event()

    def validation(example, url):
        return [make_rollout(1.0, (engine.step, engine.step))]

    def schedule():
        tasks = [(EvalTask(EvalEnvConfig(id="fake"), SamplingConfig(), -1, 1), FakePool(2, behave=validation))]
        return [EvalSchedule("val", tasks, interval=4, base=True)]

    async def stop_after_two_batches(body):
        if paths.rollouts(1).exists():
            held.set()
            await hold.wait()

    async with fake_engine() as engine:
        engine.gate = stop_after_two_batches
        first = asyncio.create_task(run_orchestrator(config, [engine], trainer=two_steps, schedules=schedule()))
        async with asyncio.timeout(60):
            await held.wait()
            while engine.step < 2 or not any("val/time_s" in line for line in metrics(paths)):
                await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        engine.gate, before = None, (paths.evals_dir / "val_fake/step_0.jsonl").read_bytes()
        engine.calls.clear()
        restarted = config.model_copy(update={"restart": True})
        await run_orchestrator(restarted, [engine], trainer=other_steps, schedules=schedule())
        first, second = engine.calls[:2]
        assert first == "reset" and second in ("update 2", "update 3"), "the newest version, from the start"
    lines = [line for line in metrics(paths) if "val/time_s" in line]
    assert [line["step"] for line in lines] == [0, 4, STEPS]
    assert all(line["val/fake/version/min"] >= line["step"] for line in lines)
    assert (paths.evals_dir / "val_fake/step_0.jsonl").read_bytes() == before


async def test_versions_after_the_last_batch_are_evaluated(tmp_path, tokenizer_dir, run_orchestrator):
    """The k versions that become current once the last batch is shipped are due like all others."""
    config = make_config(tmp_path, tokenizer_dir, async_level=2)
    paths = RunPaths(config.output_dir)
    tasks = [(EvalTask(EvalEnvConfig(id="fake"), SamplingConfig(), -1, 1), FakePool(2))]

    def evaluated():
        return [line["step"] for line in metrics(paths) if "val/time_s" in line]

    async def after_each_evaluation(paths, steps, stop, delay_seconds):
        for step in range(steps):
            async with asyncio.timeout(60):
                while not paths.metrics("orchestrator").exists() or evaluated() != list(range(step + 1)):
                    await asyncio.sleep(0.01)
            await play_trainer(paths, step + 1, asyncio.Event(), done=step)

    async with fake_engine() as engine:
        await run_orchestrator(
            config, [engine], trainer=after_each_evaluation, schedules=[EvalSchedule("val", tasks, 1, True)]
        )
    assert evaluated() == list(range(STEPS + 1))
    assert metrics(paths)[-1]["val/skipped"] == 0


async def two_steps(paths, steps, stop, delay_seconds):
    await play_trainer(paths, 2, asyncio.Event())
    await stop.wait()


async def other_steps(paths, steps, stop, delay_seconds):
    """Publish version 5 when 4 is evaluated: otherwise the servers may skip 4, and 5 is evaluated instead."""
    await play_trainer(paths, 4, asyncio.Event(), done=2)
    async with asyncio.timeout(60):
        while not (paths.evals_dir / "val_fake/step_4.jsonl").exists():
            await asyncio.sleep(0.01)
    await play_trainer(paths, steps, stop, done=4)


def done_groups(paths):
    lines = complete_lines(paths.ledger(0)) if paths.ledger(0).exists() else []
    return [line for line in lines if json.loads(line)["record"] == "done"]


def complete_lines(file):
    """Return the lines of a file, which may be in the middle of a write."""
    return file.read_text().rpartition("\n")[0].splitlines()


async def no_trainer(paths, steps, stop, delay_seconds):
    await stop.wait()


def samples(paths, step):
    return [json.loads(line) for line in paths.samples(step).read_text().splitlines()]


def metrics(paths):
    return [json.loads(line) for line in complete_lines(paths.metrics("orchestrator"))]


@pytest.mark.extended
async def test_same_seed_samples_the_same_examples_in_order(tmp_path, tokenizer_dir, run_orchestrator):
    """The seeds of the requests differ by rollout and repeat in the other run, too."""
    seen = []
    for run, delay_seconds in (("one", 0.0), ("two", 0.005)):
        values = {"sampling": {"max_tokens": 6, "seed": 7}, "env": [toy("a"), toy("b")]}
        config = make_config(tmp_path, tokenizer_dir, async_level=0, output_dir=tmp_path / run, **values)
        async with fake_engine() as engine:
            engine.gate = random_pauses(delay_seconds, len(seen))
            paths = await run_orchestrator(config, [engine])
            seeds = sorted(request["sampling_params"]["seed"] for request in engine.requests)
        rows = [row for step in range(STEPS) for row in samples(paths, step)]
        seen.append((seeds, [(row["group_id"], row["env"], row["messages"][0]["content"]) for row in rows]))
    assert seen[0] == seen[1]
    assert len(set(seeds)) == STEPS * 6


async def test_invalid_version_with_newer_one_in_time_is_skipped(tmp_path, tokenizer_dir, run_orchestrator):
    config = make_config(tmp_path, tokenizer_dir, async_level=2, on_invalid_weights="keep_previous")
    async with fake_engine() as engine:

        async def staging(step):
            engine.refusal = "another hash" if step in (2, 4) else ""

        engine.staging = staging
        paths = await run_orchestrator(config, [engine], trainer_delay_seconds=0.05)
        assert engine.step == STEPS
    for step, (batch, _) in enumerate(batches(paths)):
        assert step - batch.versions[batch.versions >= 0].min() <= 2
        assert not {2, 4} & set(batch.versions.tolist())
    assert metrics(paths)[-1]["tokens/unaccounted"] == 0


@pytest.mark.parametrize(("choice", "words"), [("fail", ""), ("keep_previous", "; without version 3")])
async def test_invalid_version_without_newer_one_ends_the_run(tmp_path, tokenizer_dir, run_orchestrator, choice, words):
    """Immediately, or as soon as nothing more can be sampled; never after a timeout."""
    config = make_config(tmp_path, tokenizer_dir, async_level=1, on_invalid_weights=choice, wait_timeout_seconds=300)
    async with fake_engine() as engine:

        async def staging(step):
            engine.refusal = "tensor a has another hash" if step > 1 else ""

        engine.staging = staging
        async with asyncio.timeout(120):
            with pytest.raises(RunError, match=f"/stage_weights returned 400: tensor a has another hash{words}"):
                await run_orchestrator(config, [engine])
        assert engine.step <= 1
    rows = metrics(RunPaths(config.output_dir))
    assert len(rows) == 3 if choice == "keep_previous" else len(rows) <= 3


async def test_rollouts_sampled_before_a_wrong_canary_are_discarded(tmp_path, tokenizer_dir, run_orchestrator):
    """Servers sample from version 2 until its canary is wrong: no batch holds a token of it."""
    config = make_config(tmp_path, tokenizer_dir, async_level=2, on_invalid_weights="keep_previous")
    in_flight, switched, sampled = asyncio.Event(), asyncio.Event(), []

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
    time.sleep(0.2)  # the fault under test: something blocks the loop
    stop.set()
    await measuring
    assert lag.metrics()["event_loop_lag/max"] > 0.1
    assert lag.metrics() == {}, "each measurement is returned once"
