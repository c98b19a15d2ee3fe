"""Faults of environments and servers cost their own groups, not the run or other environments."""

import asyncio
import re
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from aiohttp import web

from prime_rl.core.errors import RunError
from prime_rl.orchestrator import dispatcher, waits
from prime_rl.orchestrator.dispatcher import Dispatcher
from prime_rl.orchestrator.waits import INFERENCE, TRAINER
from prime_rl.rollouts.clients.inference_client import InferenceError, InferenceServerLost
from prime_rl.storage.paths import RunPaths
from tests.unit.orchestrator.loop_runs import (
    STEPS,
    batches,
    cancel,
    group_ids,
    json_lines,
    limit_waits,
    make_config,
    metrics,
    no_trainer,
    records,
    run_orchestrator,
    samples,
    toy,
    until,
)


def check_stream(paths, steps=STEPS):
    """Check that each position below the cursor was shipped once, dropped once, or still waits (I3)."""
    shipped = [group for line in records(paths, "shipped") for group in line["group_ids"]]
    dropped = [line["group_id"] for line in records(paths, "dropped")]
    assert len(set(shipped + dropped)) == len(shipped) + len(dropped)
    assert sorted(shipped) == sorted(group_ids(paths, steps))
    drawn = [line["group_id"] for line in records(paths, "drawn")]
    assert drawn == list(range(len(drawn)))


def refuse(message, status):
    return web.json_response({"error": {"message": message}}, status=status)


# --- environments -----------------------------------------------------------------------------------------------


async def test_environment_with_all_groups_filtered_does_not_end_the_run(tmp_path):
    """Its weight is 50 times the other's, so ten batches of drops precede any other group."""
    useless, useful = toy("useless", examples=1), toy("useful", spread=True, examples=1)
    useless = useless.model_copy(update={"weight": 50.0})
    buffer = {"type": "online-difficulty", "min_reward": 0.4, "max_reward": 0.6}
    config = make_config(tmp_path, env=[useless, useful], buffer=buffer, max_steps=3)
    paths = await run_orchestrator(config)
    assert {row["env"] for row in samples(paths, 0, 1, 2)} == {"useful"}
    assert metrics(paths)[-1]["stream/useless/passed_turns"] > 0
    with pytest.raises(RunError, match=r"30 groups in a row were dropped as filter/difficulty"):
        await run_orchestrator(config.model_copy(update={"env": [useless], "output_dir": tmp_path / "alone"}))


async def test_environment_outage_costs_a_few_groups(tmp_path):
    down = tmp_path / "down"
    down.touch()
    config = make_config(tmp_path, {"down": str(down)}, failing_env_seconds=600)
    paths = RunPaths(config.output_dir)

    async def repair():
        await until(lambda: paths.warnings.exists())
        await asyncio.sleep(0.5)
        down.unlink()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(repair())
        await run_orchestrator(config)
    check_stream(paths)
    errors = [line for line in records(paths, "dropped") if line["reason"] == "error/toy_environment"]
    assert 3 <= len(errors) <= 20, "without pauses it is hundreds a second"
    first, *_, last = metrics(paths)
    assert last["failing_seconds/toy_environment"] == 0
    assert first["time/wait_for_pause"] > 0.1 > first["time/wait_for_policy"], "nothing waited for the trainer"


async def test_environment_that_never_worked_warns_and_ends_the_run_early(tmp_path, engine):
    config = make_config(
        tmp_path, {"bad": list(range(12))}, failing_env_seconds=600, failing_at_start_seconds=0.4
    )  # fmt: skip
    with pytest.raises(RunError, match=r"broken reward.*orchestrator\.failing_at_start_seconds"):
        await run_orchestrator(config, [engine])
    assert engine.holder is None, "the lease is given back after a failure too"
    paths = RunPaths(config.output_dir)
    assert not paths.rollouts(0).exists()
    lines = json_lines(paths.warnings)
    first, tenth = (line for line in lines if line["kind"] == "group" and line["count"] <= 10)
    assert (first["env"], first["count"]) == ("toy_environment", 1)
    assert " failed and is dropped: " in first["text"] and first["text"].count("env.reward_errors") == 1
    count = "10 of 10 groups since the start failed and were dropped, the last is group"
    assert f"environment toy_environment: {count}" in tenth["text"]
    assert tenth["text"].endswith(f": {tenth['cause']}") and tenth["cause"].startswith("reward function reward raised")
    assert "reward function reward raised KeyError: 'broken reward'" in first["text"]
    assert "0 s (orchestrator.failing_at_start_seconds)" in first["text"]


async def test_group_that_hangs_is_reported_with_its_key_while_the_batch_waits(tmp_path, monkeypatch, said):
    """The grader of one environment hangs, and a turn of the other."""
    monkeypatch.setattr(dispatcher, "_REPORTED_WAIT_SECONDS", 0.1)
    monkeypatch.setattr(waits, "_CHECK_INTERVAL_SECONDS", 0.02)
    for name, args, keys in (
        ("grader", {"slow": [0]}, {"scoring_timeout_seconds": 3.0}),
        ("turn", {"stuck": [0]}, {"timeout_seconds": 5.0}),
    ):
        monkeypatch.setattr(dispatcher, "_UNKNOWN_DURATION_SECONDS", 60.0 if "slow" in args else 0.1)
        env = toy(name, examples=1, **args).model_copy(update=keys)
        config = make_config(tmp_path, env=[env], output_dir=tmp_path / name)
        warnings = RunPaths(config.output_dir).warnings
        run = asyncio.create_task(run_orchestrator(config))
        await until(lambda file=warnings: json_lines(file))
        await cancel(run)
        (line,) = json_lines(warnings)
        (key, limit), activity = *keys.items(), "scoring" if name == "grader" else "running"
        text = rf"batch 0 waits for group 0 \(example 0 of {name}\): {activity} for \d s; env.{key} = {limit:g}"
        assert (line["kind"], line["env"]) == ("wait", name)
        assert re.fullmatch(text, line["text"]) and any(line["text"] in one for one in said())


async def test_broken_environment_of_two_passes_its_turns_also_after_a_restart(tmp_path, engine):
    """Passed turns are replayed for the same environment."""
    config = make_config(tmp_path, env=[toy("broken", fail="setup"), toy("well")], max_steps=8)
    reached = asyncio.Event()

    async def gate(_):
        if len(engine.requests) > 10:
            reached.set()
            await asyncio.Event().wait()

    engine.gate = gate
    first = asyncio.create_task(run_orchestrator(config, [engine], trainer=no_trainer))
    await asyncio.wait([first, asyncio.ensure_future(reached.wait())], return_when=asyncio.FIRST_COMPLETED)
    assert not first.done(), first
    await cancel(first)
    engine.gate = None
    before = len(records(RunPaths(config.output_dir), "drawn"))
    paths = await run_orchestrator(config.model_copy(update={"restart": True}), [engine])
    check_stream(paths, 8)
    assert len(records(paths, "drawn")) > before
    assert Counter(row["env"] for row in samples(paths, *range(8))) == {"well": 8 * 6}
    last = metrics(paths)[-1]
    assert last["failing_seconds/broken"] > last["failing_seconds/well"] == 0
    assert last["stream/broken/passed_turns"] > 0
    assert last["dropped/error/broken"] <= 24


async def test_stuck_group_is_dropped_by_name_and_the_run_continues(tmp_path, monkeypatch):
    """The deadline comes soon, but groups that are only slow get more time."""
    end_stuck = Dispatcher.end_stuck

    def end_only_stuck(self, timeout_seconds):
        running = {self._ledger.positions.open[group_id].draw.example for group_id in self._running}
        return running != {3} or end_stuck(self, timeout_seconds)

    monkeypatch.setattr(Dispatcher, "end_stuck", end_only_stuck)
    limit_waits(monkeypatch, {INFERENCE: 0.2, TRAINER: 60})
    config = make_config(tmp_path, {"stuck": [3]}, failing_env_seconds=600, async_level=1)
    paths = await run_orchestrator(config)
    check_stream(paths)
    dropped = records(paths, "dropped")
    assert 1 <= len(dropped) <= 3
    assert {line["reason"] for line in dropped} == {"error/toy_environment"}
    examples = {line["group_id"]: line["example"] for line in records(paths, "drawn")}
    assert {examples[line["group_id"]] for line in dropped} == {3}


async def test_wait_for_a_rate_limit_is_named(tmp_path, monkeypatch):
    limit_waits(monkeypatch, {INFERENCE: 0.2, TRAINER: 60})
    slow = toy("slow").model_copy(update={"max_rollouts_per_minute": 3.0})
    with pytest.raises(RunError, match=r"waiting for the pause that env\.max_rollouts_per_minute makes at slow"):
        await run_orchestrator(make_config(tmp_path, env=[slow]))


async def test_group_with_min_rollouts_is_trained_on(tmp_path, engine):
    """Batches have complete and smaller groups, with the baselines of the finished rollouts."""
    env = toy("toy", flaky=[0, 3, 4, 7], spread=True).model_copy(update={"min_rollouts": 2})
    config = make_config(tmp_path, env=[env], batch_size=9, rollouts_per_example=3, async_level=0)
    paths = await run_orchestrator(config, [engine])
    last = check_account(paths, engine)
    check_stream(paths)
    sizes = Counter[int]()
    for step, (batch, _) in enumerate(batches(paths)):
        rows = samples(paths, step)
        assert len(batch.seq_lens) == len(rows)
        for group_id in {row["group_id"] for row in rows}:
            group = [row for row in rows if row["group_id"] == group_id]
            sizes[len(group)] += 1
            mean = sum(row["reward"] for row in group) / len(group)
            assert [row["advantage"] for row in group] == pytest.approx([row["reward"] - mean for row in group])
    assert sizes == {2: last["rollouts/failed"], 3: STEPS * 3 - last["rollouts/failed"]}
    assert last["tokens/lost/failed"] == last["rollouts/failed"] * 6 > 0


@pytest.mark.parametrize(("fewest", "message"), [(1, "between 2 and"), (4, "rollouts_per_example = 3")])
async def test_invalid_min_rollouts_raises(tmp_path, fewest, message):
    env = toy("toy").model_copy(update={"min_rollouts": fewest})
    with pytest.raises(ValueError, match=message):
        make_config(tmp_path, env=[env], rollouts_per_example=3)


# --- servers ----------------------------------------------------------------------------------------------------


async def test_rejected_prompt_drops_its_group(tmp_path, engine):
    refused = []

    def fault(body):
        refused[:] = refused or [body["token_ids"]]
        return refuse("min_tokens is above max_tokens", 400) if body["token_ids"] == refused[0] else None

    engine.fault = fault
    paths = await run_orchestrator(make_config(tmp_path, failing_env_seconds=600), [engine])
    check_stream(paths)
    assert {line["reason"] for line in records(paths, "dropped")} == {"error/engine"}
    assert metrics(paths)[-1]["dropped/error/engine"] <= 2


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (400, "dropped as error/engine; the last: .*returned 400: no such model"),
        (401, "returned 401: no such model"),
        (403, "returned 403: no such model"),
        (404, "returned 404: no such model"),
    ],
)
async def test_refusal_of_all_requests_ends_the_run(tmp_path, status, message, engine):
    """After a while; at once if the key or the name of the model is wrong."""
    config = make_config(tmp_path, failing_env_seconds=0.3 if status == 400 else 600)
    engine.fault = lambda body: refuse("no such model", status)
    with pytest.raises(RunError, match=message) as failure:
        await run_orchestrator(config, [engine])
    assert len(engine.requests) < 60
    assert "\n" not in str(failure.value)
    assert bool(records(RunPaths(config.output_dir), "dropped")) == (status == 400)


@pytest.mark.parametrize(
    ("oldest", "newest", "error"), [(3, 5, None), (2, 5, InferenceServerLost), (3, 6, InferenceError)]
)
async def test_versions_of_a_group_lie_between_its_start_and_the_newest_possible(oldest, newest, error):
    """It started at version 3, and batch 4 is the next."""
    rollout = SimpleNamespace(samples=[SimpleNamespace(versions=np.array([-1, oldest, newest]))])
    dispatcher = SimpleNamespace(_scheduler=SimpleNamespace(next_step=4))
    with pytest.raises(error) if error else nullcontext():
        Dispatcher._check_versions(dispatcher, [rollout], 3, SimpleNamespace(client=SimpleNamespace(url="u")))


async def test_run_with_a_slot_names_it_and_makes_a_lost_one_again(tmp_path, engine):
    """Its lease may have expired while this process was stopped."""
    config = make_config(
        tmp_path, model={"name": "no-model", "lora": {"name": "alpha"}}, failing_env_seconds=600
    )  # fmt: skip

    def fault(body):
        if len(engine.requests) != 5:
            return None
        engine.holder = None
        return refuse("The model `alpha` does not exist.", 404)

    engine.fault = fault
    paths = await run_orchestrator(config, [engine])
    assert {body["model"] for body in engine.requests} == engine.names == {"alpha"}
    assert engine.calls.count("reset") == 2
    check_stream(paths)
    assert metrics(paths)[-1]["inference/servers_removed"] == 1


# --- the account of the tokens ----------------------------------------------------------------------------------


def check_account(paths, engine, cancelled=0):
    """Check that each of the 6 tokens of an answer is in exactly one counter.

    Up to `cancelled` answers arrived after their requests were cancelled; their tokens are in no counter.
    """
    last = metrics(paths)[-1]
    lost = {name: value for name, value in last.items() if name.startswith("tokens/lost/")}
    accounted = last["tokens/shipped"] + last["tokens/dropped"] + last["tokens/held"] + sum(lost.values())
    assert last["tokens/sampled"] == accounted
    assert 0 <= engine.answered * 6 - accounted <= cancelled * 6
    assert last["tokens/unaccounted"] == 0
    return last


async def test_tokens_of_failed_and_filtered_groups_are_counted(tmp_path, engine):
    buffer = {"type": "online-difficulty", "min_reward": 0.1, "max_reward": 1.0}
    config = make_config(tmp_path, {"bad": [2, 5]}, failing_env_seconds=600, async_level=0, buffer=buffer)
    paths = await run_orchestrator(config, [engine])
    last = check_account(paths, engine)
    assert last["tokens/lost/failed"] == last["dropped/error/toy_environment"] * 2 * 6 > 0
    assert last["rollouts/failed"] == last["dropped/error/toy_environment"] * 2
    assert last["tokens/dropped"] > 0


async def test_tokens_of_restarted_groups_are_counted(tmp_path, engine):
    """A server restarted unnoticed: what it sampled from its base model is discarded, and sampled again."""

    async def restart(_):
        if engine.step == 2 and not has_restarted:
            has_restarted.append(engine.step)
            engine.step = 0

    has_restarted, engine.gate = [], restart
    paths = await run_orchestrator(make_config(tmp_path, async_level=0), [engine])
    last = check_account(paths, engine)
    assert last["groups/retried"] > 0
    assert last["rollouts/replayed"] > 0
