# ruff: noqa: F811 (a fixture of another file)
"""Faults of environments and servers cost their own groups, not the run or other environments."""

import asyncio
import json
import re
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from aiohttp import web

from prime_rl.core.errors import RunError
from prime_rl.orchestrator import dispatcher
from prime_rl.orchestrator.dispatcher import Dispatcher
from prime_rl.orchestrator.waits import INFERENCE, TRAINER
from prime_rl.rollouts.clients.inference_client import InferenceError, InferenceServerLost
from prime_rl.storage.paths import RunPaths
from tests.support.fake_engine import fake_engine
from tests.unit.orchestrator.test_orchestrator import (  # noqa: F401
    STEPS,
    batches,
    limit_waits,
    make_config,
    metrics,
    no_trainer,
    run_orchestrator,
    samples,
    toy,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")


def ledger(paths, kind):
    lines = map(json.loads, paths.ledger(0).read_text().splitlines())
    return [line for line in lines if line["record"] == kind]


def check_stream(paths):
    """Check that each position below the cursor was shipped once, dropped once, or still waits (I3)."""
    shipped = [group for line in ledger(paths, "shipped") for group in line["group_ids"]]
    dropped = [line["group_id"] for line in ledger(paths, "dropped")]
    assert len(set(shipped + dropped)) == len(shipped) + len(dropped)
    assert sorted(shipped) == sorted(group for _, manifest in batches(paths) for group in manifest["group_ids"])


@pytest.mark.extended
async def test_saturated_environment_in_a_mixture_costs_only_its_share(tmp_path, tokenizer_dir, run_orchestrator):
    """One of two environments is solved: twice the sampling, no batch of zero advantages, no growth over the run."""
    config = make_config(
        tmp_path, tokenizer_dir, env=[toy("solved"), toy("useful", spread=True)], filter_zero_advantage=True,
        max_steps=30,
    )  # fmt: skip
    paths = await run_orchestrator(config)
    rows = metrics(paths)
    assert len(rows) == 30
    assert {row["env"] for step in range(30) for row in samples(paths, step)} == {"useful"}
    assert all(row["batch/zero_advantage_groups"] == row["batch/zero_advantage_filler"] == 0 for row in rows)
    drops = [row.get("dropped/zero_advantage", 0) for row in rows]
    assert drops[-1] <= 30 * 3 + 9, "one for each that is shipped, and what was under way"
    assert drops[-1] - drops[15] <= 14 * 3 + 9


@pytest.mark.extended
async def test_environment_with_all_groups_filtered_does_not_end_the_run(tmp_path, tokenizer_dir, run_orchestrator):
    """Its weight is 50 times the other's, so ten batches of drops precede any other group."""
    useless, useful = toy("useless", examples=1), toy("useful", spread=True, examples=1)
    useless = useless.model_copy(update={"weight": 50.0})
    buffer = {"type": "online-difficulty", "min_reward": 0.4, "max_reward": 0.6}
    config = make_config(tmp_path, tokenizer_dir, env=[useless, useful], buffer=buffer, max_steps=3)
    async with fake_engine() as engine:
        paths = await run_orchestrator(config, [engine])
        assert {row["env"] for step in range(3) for row in samples(paths, step)} == {"useful"}
        assert metrics(paths)[-1]["stream/useless/passed_turns"] > 0
        alone = config.model_copy(update={"env": [useless], "output_dir": tmp_path / "alone"})
        with pytest.raises(RunError, match=r"30 groups in a row were dropped as filter/difficulty"):
            await run_orchestrator(alone, [engine])


async def test_environment_outage_costs_a_few_groups(tmp_path, tokenizer_dir, run_orchestrator):
    down = tmp_path / "down"
    down.touch()
    config = make_config(tmp_path, tokenizer_dir, {"down": str(down)}, failing_env_seconds=600)
    paths = RunPaths(config.output_dir)

    async def repair():
        """Two seconds after the first failure, independent of the load time of the environment."""
        while not paths.warnings.exists():
            await asyncio.sleep(0.01)
        await asyncio.sleep(2.0)
        down.unlink()

    async with fake_engine() as engine, asyncio.TaskGroup() as tasks:
        tasks.create_task(repair())
        await run_orchestrator(config, [engine])
    check_stream(paths)
    errors = [line for line in ledger(paths, "dropped") if line["reason"] == "error/toy_environment"]
    assert 3 <= len(errors) <= 30, "without pauses it is hundreds a second"
    assert metrics(paths)[-1]["failing_seconds/toy_environment"] == 0


@pytest.mark.extended
async def test_environment_outage_ends_the_run_after_the_timeout(tmp_path, tokenizer_dir, run_orchestrator):
    config = make_config(tmp_path, tokenizer_dir, {"fail": "setup"}, failing_env_seconds=1.5)
    began = asyncio.get_running_loop().time()
    async with fake_engine() as engine:
        with pytest.raises(RunError, match=r"groups in a row were dropped as error/toy_environment; .*KeyError.*fail"):
            await run_orchestrator(config, [engine])
    assert asyncio.get_running_loop().time() - began >= 1.5


@pytest.mark.extended
async def test_environment_that_never_worked_warns_and_ends_the_run_early(tmp_path, tokenizer_dir, run_orchestrator):
    config = make_config(
        tmp_path, tokenizer_dir, {"bad": list(range(12))}, failing_env_seconds=600, failing_at_start_seconds=1.0
    )
    async with fake_engine() as engine:
        with pytest.raises(RunError, match=r"broken reward.*orchestrator\.failing_at_start_seconds"):
            await run_orchestrator(config, [engine])
    lines = [json.loads(line) for line in RunPaths(config.output_dir).warnings.read_text().splitlines()]
    first, tenth = (line for line in lines if line["kind"] == "group" and line["count"] <= 10)
    assert (first["env"], first["count"]) == ("toy_environment", 1)
    assert 'env.reward_errors = "zero" counts a failed reward as 0' in first["text"]
    assert "environment toy_environment: 10 of 10 groups failed, the last is group" in tenth["text"]
    assert "reward function reward raised KeyError: 'broken reward'" in first["text"]
    assert "1 s (orchestrator.failing_at_start_seconds)" in first["text"]


@pytest.mark.extended
async def test_group_that_hangs_is_reported_with_its_key_while_the_batch_waits(
    tmp_path, tokenizer_dir, run_orchestrator, monkeypatch, said
):
    """The grader of one environment hangs, and a turn of the other."""
    monkeypatch.setattr(dispatcher, "_REPORTED_WAIT_SECONDS", 0.2)
    envs = [
        toy("grader", slow=[0]).model_copy(update={"scoring_timeout_seconds": 3.0}),
        toy("turn", stuck=[0]).model_copy(update={"timeout_seconds": 5.0}),
    ]
    config = make_config(tmp_path, tokenizer_dir, env=envs, max_steps=12, async_level=1)
    paths = await run_orchestrator(config)
    lines = [json.loads(line) for line in paths.warnings.read_text().splitlines()]
    waits = [line["text"] for line in lines if line["kind"] == "wait"]
    start = r"batch \d+ waits for group \d+ \(example 0 of "
    scoring = r"grader\): scoring for \d s; env.scoring_timeout_seconds = 3"
    for end in (scoring, r"turn\): running for \d s; env.timeout_seconds = 5"):
        assert any(re.fullmatch(start + end, text) for text in waits)
        assert any(re.search(start + end, line) for line in said())
    failed = [line["text"] for line in lines if line["kind"] == "group"]
    assert any("the scoring of example 0 took longer than 3 s (env.scoring_timeout_seconds)" in text for text in failed)
    last = metrics(paths)[-1]
    assert last["groups/failed"] >= 1 and last["groups/ended"] > last["groups/failed"]
    assert last["env_workers/memory_gib"] > 0.01


@pytest.mark.extended
async def test_broken_environment_of_two_passes_its_turns(tmp_path, tokenizer_dir, run_orchestrator):
    config = make_config(tmp_path, tokenizer_dir, env=[toy("broken", fail="setup"), toy("well")], max_steps=12)
    paths = await run_orchestrator(config)
    check_rows = [row["env"] for step in range(12) for row in samples(paths, step)]
    assert Counter(check_rows) == {"well": 12 * 6}
    last = metrics(paths)[-1]
    assert last["failing_seconds/broken"] > 0
    assert last["failing_seconds/well"] == 0
    assert last["stream/broken/passed_turns"] > 0
    assert last["dropped/error/broken"] <= 24


@pytest.mark.extended
async def test_restart_with_failing_environment_repeats_the_stream(tmp_path, tokenizer_dir, run_orchestrator):
    """Passed turns are replayed for the same environment."""
    config = make_config(tmp_path, tokenizer_dir, env=[toy("broken", fail="setup"), toy("well")])
    reached = asyncio.Event()
    async with fake_engine() as engine:

        async def gate(_):
            if len(engine.requests) > 10:
                reached.set()
                await asyncio.Event().wait()

        engine.gate = gate
        first = asyncio.create_task(run_orchestrator(config, [engine], trainer=no_trainer))
        await asyncio.wait([first, asyncio.ensure_future(reached.wait())], return_when=asyncio.FIRST_COMPLETED)
        assert not first.done(), first
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        engine.gate = None
        before = len(ledger(RunPaths(config.output_dir), "drawn"))
        paths = await run_orchestrator(config.model_copy(update={"restart": True}), [engine])
    check_stream(paths)
    drawn = [line["group_id"] for line in ledger(paths, "drawn")]
    assert drawn == list(range(len(drawn)))
    assert len(drawn) > before


@pytest.mark.extended
async def test_stuck_group_is_dropped_by_name_and_the_run_continues(
    tmp_path, tokenizer_dir, run_orchestrator, monkeypatch
):
    """The deadline comes soon, but groups that are only slow get more time."""
    end_stuck = Dispatcher.end_stuck

    def end_only_stuck(self, timeout_seconds):
        running = {self._ledger.positions.open[group_id].draw.example for group_id in self._running}
        return running != {3} or end_stuck(self, timeout_seconds)

    monkeypatch.setattr(Dispatcher, "end_stuck", end_only_stuck)
    limit_waits(monkeypatch, {INFERENCE: 0.3, TRAINER: 60})
    config = make_config(tmp_path, tokenizer_dir, {"stuck": [3]}, failing_env_seconds=600, async_level=1)
    paths = await run_orchestrator(config)
    check_stream(paths)
    dropped = ledger(paths, "dropped")
    assert 1 <= len(dropped) <= 3
    assert {line["reason"] for line in dropped} == {"error/toy_environment"}
    examples = {line["group_id"]: line["example"] for line in ledger(paths, "drawn")}
    assert {examples[line["group_id"]] for line in dropped} == {3}


@pytest.mark.extended
async def test_wait_for_a_rate_limit_is_named(tmp_path, tokenizer_dir, run_orchestrator, monkeypatch):
    limit_waits(monkeypatch, {INFERENCE: 0.5, TRAINER: 60})
    slow = toy("slow").model_copy(update={"max_rollouts_per_minute": 3.0})
    config = make_config(tmp_path, tokenizer_dir, env=[slow])
    message = r"waiting for the pause that env.max_rollouts_per_minute makes at slow"
    with pytest.raises(RunError, match=message):
        await run_orchestrator(config)


async def test_rejected_prompt_drops_its_group(tmp_path, tokenizer_dir, run_orchestrator):
    config = make_config(tmp_path, tokenizer_dir, failing_env_seconds=600)
    async with fake_engine() as engine:
        refused = []

        def refuse(body):
            refused[:] = refused or [body["token_ids"]]
            if body["token_ids"] == refused[0]:
                return web.json_response({"error": {"message": "min_tokens is above max_tokens"}}, status=400)
            return None

        engine.fault = refuse
        paths = await run_orchestrator(config, [engine])
    check_stream(paths)
    assert {line["reason"] for line in ledger(paths, "dropped")} == {"error/engine"}
    assert metrics(paths)[-1]["dropped/error/engine"] <= 2


@pytest.mark.extended
async def test_server_reporting_impossible_version_counts_as_failed(tmp_path, tokenizer_dir, run_orchestrator):
    """The group is sampled again without a wait."""
    config = make_config(tmp_path, tokenizer_dir, failing_env_seconds=600)
    async with fake_engine() as engine:

        def fault(body):
            if len(engine.requests) != 5:
                return None
            span = {"version": f"{engine.branch}.{engine.step + 7}", "start": 0, "end": 1}
            choice = {"token_ids": [20], "logprobs": {"content": [{"logprob": -0.5}]}, "finish_reason": "stop"}
            return web.json_response({"choices": [choice | {"weight_versions": [span]}]})

        engine.fault = fault
        paths = await run_orchestrator(config, [engine])
    check_stream(paths)
    assert metrics(paths)[-1]["groups/retried"] == 1
    assert ledger(paths, "dropped") == []


@pytest.mark.parametrize(
    ("oldest", "newest", "error"), [(3, 5, None), (2, 5, InferenceServerLost), (3, 6, InferenceError)]
)
async def test_versions_of_a_group_lie_between_its_start_and_the_newest_possible(oldest, newest, error):
    """It started at version 3, and batch 4 is the next."""
    rollout = SimpleNamespace(samples=[SimpleNamespace(versions=np.array([-1, oldest, newest]))])
    dispatcher = SimpleNamespace(_scheduler=SimpleNamespace(next_step=4))
    with pytest.raises(error) if error else nullcontext():
        Dispatcher._check_versions(dispatcher, [rollout], 3, SimpleNamespace(client=SimpleNamespace(url="u")))


async def test_all_requests_rejected_end_the_run(tmp_path, tokenizer_dir, run_orchestrator):
    config = make_config(tmp_path, tokenizer_dir, failing_env_seconds=0.5)
    async with fake_engine() as engine:
        engine.fault = lambda body: web.json_response({"error": {"message": "bad parameters"}}, status=400)
        with pytest.raises(RunError, match=r"dropped as error/engine; the last: .*returned 400: bad parameters"):
            await run_orchestrator(config, [engine])
        assert len(engine.requests) < 60


@pytest.mark.extended
@pytest.mark.parametrize("status", [401, 403, 404])
async def test_wrong_key_or_model_name_ends_the_run(tmp_path, tokenizer_dir, run_orchestrator, status):
    config = make_config(tmp_path, tokenizer_dir, failing_env_seconds=600)
    async with fake_engine() as engine:
        engine.fault = lambda body: web.json_response({"error": {"message": "no such model"}}, status=status)
        with pytest.raises(RunError, match=f"returned {status}: no such model") as failure:
            await run_orchestrator(config, [engine])
    assert "\n" not in str(failure.value)
    assert ledger(RunPaths(config.output_dir), "dropped") == []


@pytest.mark.extended
async def test_run_with_a_slot_names_it_and_makes_a_lost_one_again(tmp_path, tokenizer_dir, run_orchestrator):
    """Its lease may have expired while this process was stopped."""
    model = {"name": str(tokenizer_dir), "lora": {"name": "alpha"}}
    config = make_config(tmp_path, tokenizer_dir, model=model, failing_env_seconds=600)
    async with fake_engine() as engine:

        def fault(body):
            if len(engine.requests) != 5:
                return None
            engine.holder = None
            return web.json_response({"error": {"message": "The model `alpha` does not exist."}}, status=404)

        engine.fault = fault
        paths = await run_orchestrator(config, [engine])
        assert {body["model"] for body in engine.requests} == engine.names == {"alpha"}
        assert engine.calls.count("reset") == 2
    check_stream(paths)
    assert metrics(paths)[-1]["inference/servers_removed"] == 1


def check_account(paths, engine, tokens=6, cancelled=0):
    """Every sampled token is in exactly one counter.

    Up to `cancelled` answers arrived after their requests were cancelled; their tokens are in no counter.
    """
    last = metrics(paths)[-1]
    lost = {name: value for name, value in last.items() if name.startswith("tokens/lost/")}
    accounted = last["tokens/shipped"] + last["tokens/dropped"] + last["tokens/held"] + sum(lost.values())
    assert last["tokens/sampled"] == accounted
    assert 0 <= engine.answered * tokens - accounted <= cancelled * tokens
    assert last["tokens/unaccounted"] == 0
    return last


@pytest.mark.extended
async def test_failed_groups_tokens_are_counted(tmp_path, tokenizer_dir, run_orchestrator):
    config = make_config(
        tmp_path, tokenizer_dir, {"bad": [2, 5], "turns": 2}, failing_env_seconds=600, seq_len=256,
        buffer={"type": "online-difficulty", "min_reward": 0.1, "max_reward": 1.0},
    )  # fmt: skip
    async with fake_engine() as engine:
        paths = await run_orchestrator(config, [engine])
        last = check_account(paths, engine)
    assert last["tokens/lost/failed"] == last["dropped/error/toy_environment"] * 2 * 2 * 6 > 0
    assert last["rollouts/failed"] == last["dropped/error/toy_environment"] * 2
    assert last["tokens/dropped"] > 0


@pytest.mark.extended
async def test_restarted_groups_tokens_are_counted(tmp_path, tokenizer_dir, run_orchestrator):
    """The server fails one of two rollouts of a group: the group starts again."""
    config = make_config(tmp_path, tokenizer_dir, failing_env_seconds=600)
    async with fake_engine() as engine:
        failing = set()

        def fault(body):
            if len(engine.requests) % 7 == 0 or (tuple(body["token_ids"]) in failing and len(engine.requests) < 40):
                failing.add(tuple(body["token_ids"]))
                return web.json_response({"error": {"message": "out of memory"}}, status=500)
            return None

        engine.fault = fault
        paths = await run_orchestrator(config, [engine])
        last = check_account(paths, engine, cancelled=len(failing))
    assert last["groups/retried"] > 0
    assert last["rollouts/replayed"] + last["rollouts/failed"] > 0


@pytest.mark.extended
async def test_rollout_with_lost_sandbox_is_retried_alone(tmp_path, tokenizer_dir, run_orchestrator):
    config = make_config(
        tmp_path, tokenizer_dir, {"turns": 2, "flaky": [0, 3, 4, 7]}, seq_len=256, failing_env_seconds=600
    )
    async with fake_engine() as engine:
        paths = await run_orchestrator(config, [engine])
        last = check_account(paths, engine)
    assert last["rollouts/retried"] == 4
    assert last["tokens/lost/retried"] == 4 * 6
    assert ledger(paths, "dropped") == []


@pytest.mark.extended
async def test_group_with_min_rollouts_is_trained_on(tmp_path, tokenizer_dir, run_orchestrator):
    """Without retries, batches have complete and smaller groups, with the baselines of the finished rollouts."""
    env = toy("toy", turns=2, flaky=[0, 3, 4, 7], spread=True).model_copy(update={"num_retries": 0, "min_rollouts": 2})
    config = make_config(
        tmp_path, tokenizer_dir, env=[env], seq_len=256, rollouts_per_example=3, failing_env_seconds=600,
    )  # fmt: skip
    async with fake_engine() as engine:
        paths = await run_orchestrator(config, [engine])
        last = check_account(paths, engine)
    check_stream(paths)
    sizes = Counter()
    for step, (batch, _) in enumerate(batches(paths)):
        rows = samples(paths, step)
        assert len(batch.seq_lens) == len(rows)
        for group_id in {row["group_id"] for row in rows}:
            group = [row for row in rows if row["group_id"] == group_id]
            sizes[len(group)] += 1
            mean = sum(row["reward"] for row in group) / len(group)
            assert [row["advantage"] for row in group] == pytest.approx([row["reward"] - mean for row in group])
    assert sizes == {2: 4, 3: STEPS * 2 - 4}
    assert (last["rollouts/failed"], last["tokens/lost/failed"]) == (4, 4 * 6)


@pytest.mark.parametrize(("fewest", "message"), [(1, "between 2 and"), (4, "rollouts_per_example = 3")])
async def test_invalid_min_rollouts_raises(tmp_path, tokenizer_dir, fewest, message):
    env = toy("toy").model_copy(update={"min_rollouts": fewest})
    with pytest.raises(ValueError, match=message):
        make_config(tmp_path, tokenizer_dir, env=[env], rollouts_per_example=3)
