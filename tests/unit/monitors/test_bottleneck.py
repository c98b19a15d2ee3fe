"""The bottleneck of simulated runs: a server, a trainer and their staleness bound, with a known slowest part."""

import itertools
import random

import pytest

from prime_rl.monitors.bottleneck import SpeedSettings, find_bottleneck, speed_settings


def simulate(sample=1.0, train=1.0, k=1, publish=0.0, update=0.0, checkpoint=0.0, pause=0.0, steps=14, noise=0.0,
             parts=None, evaluation=None, hold=0.0, stopped=0.0):  # fmt: skip
    """Return the lines of both processes. Batch n is sampled from version n - k or later, one batch after the other.

    Every duration is in seconds; `evaluation` is (steps between two, slowdown of sampling while one runs).
    """
    draw = random.Random(0)
    trainer, orchestrator, published = [], [], {0: 0.0}
    free = trained = shipped_before = held = 0.0
    for step in range(steps):
        needed = max(0, step - k)
        if hold and step:
            published[needed], held = published[needed] + hold, held + hold
        begin = max(free, published[needed])
        seconds = sample * (1 + noise * draw.uniform(-1, 1)) + pause
        if evaluation and step % evaluation[0] == 0 and step:
            seconds *= evaluation[1]
            orchestrator.append({"step": step, "time": begin + seconds, "eval/time_s": seconds})
        ready = begin + seconds
        row = {"step": step, "time": ready, "time/step": ready - shipped_before, "reward/mean": 0.5,
               "time/wait_for_policy": begin - free, "time/weight_update": update,
               "time/weight_update_pause": pause, "time/wait_for_pause": stopped}  # fmt: skip
        orchestrator.append(row | {f"env/math/time/{part}": seconds * share for part, share in (parts or {}).items()})
        if hold:
            orchestrator.append({"step": step, "time": ready, "eval/held_s": held, "eval/time_s": hold})
        free = shipped_before = ready
        start = max(trained, ready)
        end = start + train * (1 + noise * draw.uniform(-1, 1))
        trainer.append({"step": step, "time": end, "time/step": end - trained, "time/wait_for_batch": start - trained,
                        "time/train": end - start, "weight_sync/seconds": publish})  # fmt: skip
        published[step + 1] = end + publish + update
        trained = end + checkpoint
    return trainer, orchestrator


ENGINE, ENV, GRADER = ({"engine": 0.9, "environment": 0.1}, {"engine": 0.2, "environment": 0.8},
                       {"engine": 0.3, "environment": 0.1, "scoring": 0.6})  # fmt: skip
CASES = {
    "inference": [{"sample": s, "k": k, "parts": ENGINE} for s, k in itertools.product((1.5, 3, 20), (1, 2, 4))]
    + [{"sample": 8, "k": 0, "parts": {"engine": 0.95}}],
    "paused environment": [{"sample": s, "stopped": s - 1, "parts": ENGINE} for s in (4, 20)],
    "environment": [{"sample": s, "parts": ENV} for s in (1.5, 5)],
    "grader": [{"sample": s, "k": 2, "parts": GRADER} for s in (1.5, 5)]
    + [{"sample": 8, "k": 0, "parts": {"engine": 0.05, "scoring": 0.95}}],
    "trainer": [{"train": t, "k": k} for t, k in itertools.product((1.5, 3, 20), (1, 2, 4))] + [{"train": 8, "k": 0}],
    "staleness bound": [{"k": 0, "sample": s} for s in (0.5, 1, 3)] + [{"k": 1, "noise": 0.7}],
    "weight update": [{"k": 0, "publish": 2, "update": 1}, {"sample": 1, "pause": 3, "k": 2}],
    "checkpoint": [{"checkpoint": 3.0, "k": 2}, {"checkpoint": 10.0, "k": 1}],
    "evaluation": [{"evaluation": (3, 6.0), "k": 2, "parts": ENGINE, "sample": 0.9}, {"hold": 4.0, "k": 0}],
    None: [{"k": 1}, {"k": 4, "noise": 0.1}],
}


@pytest.mark.parametrize(("cause", "options"), [(cause, one) for cause, all_ in CASES.items() for one in all_])
@pytest.mark.parametrize("unit", [0.01, 60.0])
def test_bottleneck_of_a_simulated_run_is_its_slowest_part(cause, options, unit):
    trainer, orchestrator = simulate(**options)
    for row in (*trainer, *orchestrator):
        row.update({key: value * unit for key, value in row.items() if key.startswith(("time", "weight_sync", "eval"))})
    found = find_bottleneck(trainer, orchestrator)
    assert found.cause == cause, str(found)
    assert ("is the bottleneck" in str(found)) == found.is_large and str(cause or "no bottleneck") in str(found)
    assert ("without GPUs: cores" in str(found)) == (found.is_large and cause in ("inference", "trainer"))


@pytest.mark.parametrize(("sample", "line"), [
    (1.14, "no large bottleneck (inference): the trainer waited 12% and sampling 0% of the last 10 steps, the engine "
     "took 90% of the rollouts' time"),
    (1.4, "inference is the bottleneck: the trainer waited 29% and sampling 0% of the last 10 steps, the engine "
     "took 90% of the rollouts' time; add inference GPUs (without GPUs: cores), or lower max_tokens or "
     "rollouts_per_example"),
])  # fmt: skip
def test_bottleneck_is_a_warning_with_a_remedy_only_if_the_wait_is_large(sample, line):
    found = find_bottleneck(*simulate(sample=sample, parts=ENGINE))
    assert (str(found), found.is_large) == (line, line.startswith("inference"))


def settings_of(max_concurrent, adaptive, **inference):
    orchestrator = {"max_concurrent": max_concurrent, "concurrency": {"adaptive": adaptive}}
    return speed_settings({"orchestrator": orchestrator, "inference": inference})


FIXED, ADAPTIVE, CONSTANT = settings_of(8, True), settings_of("None", True), settings_of(None, False)


@pytest.mark.parametrize(("values", "settings", "remedy"), [
    ({}, FIXED, "set a higher orchestrator.max_concurrent"), ({"kv_usage/max": 0.7}, FIXED, "max_concurrent"),
    ({}, CONSTANT, "set a higher orchestrator.concurrency.initial"),
    ({}, ADAPTIVE, "set a higher orchestrator.concurrency.max"),
    ({"growth": 1}, ADAPTIVE, "set a higher orchestrator.concurrency.initial"),
    ({"kv_usage/max": 0.7}, ADAPTIVE, None), ({"in_flight": 7}, FIXED, None), ({"requests_waiting": 3}, FIXED, None),
])  # fmt: skip
def test_bottleneck_of_a_run_at_its_limit_of_rollouts_is_the_limit(values, settings, remedy):
    trainer, orchestrator = simulate(sample=3, parts=ENGINE)
    for row in orchestrator:
        limit = 8 + values.get("growth", 0) * row["step"]
        of_row = {"in_flight": limit, "concurrency_limit": limit, "requests_waiting": 0} | values
        row.update({f"inference/{name}": value for name, value in of_row.items()})
    found = find_bottleneck(trainer, orchestrator, settings=settings)
    assert found.cause == ("concurrency limit" if remedy else "inference")
    assert str(found).endswith(remedy or "rollouts_per_example"), str(found)
    assert (f"its limit of {limit} rollouts" in str(found)) == bool(remedy)


@pytest.mark.parametrize(("values", "is_found"), [
    ({}, True), ({"requests_running": 5}, False), ({"requests_waiting": 0}, False), ({"kv_usage/max": 0.7}, False),
])  # fmt: skip
def test_bottleneck_of_engines_at_their_limit_of_requests_is_the_limit(values, is_found):
    trainer, orchestrator = simulate(sample=3, parts=ENGINE)
    for row in orchestrator:
        of_row = {"requests_running": 6, "requests_waiting": row["step"], "kv_usage/max": 0.01} | values
        row.update({f"inference/{name}": value for name, value in of_row.items()})
    settings = settings_of("None", True, vllm={"max_num_seqs": 2}, parallel={"dp": 3})
    found = find_bottleneck(trainer, orchestrator, settings=settings)
    assert found.cause == ("request limit" if is_found else "inference")
    evidence = (
        "ran 6 requests, its limit, up to 13 waited, and the KV cache was 1% full; set a higher inference.vllm.max_"
    )
    assert (evidence in str(found)) == is_found, str(found)


def test_bottleneck_of_weight_updates_advises_adapters_only_without_them():
    lines = simulate(k=0, publish=2, update=1)
    whole, adapter = (find_bottleneck(*lines, settings=SpeedSettings(publishes_adapters=one)) for one in (False, True))
    assert str(whole).endswith('faster disk or network, or publish adapters (trainer.model.lora.publish = "adapter")')
    assert str(adapter).endswith("faster disk or network")


def test_bottleneck_of_a_run_that_waits_for_its_turn_is_the_other_runs():
    trainer, orchestrator = simulate(k=0)
    shares = {"time/wait_for_batch": 0.15, "time/wait_for_turn": 0.55, "time/train": 0.3}
    for row, shipped in zip(trainer, orchestrator, strict=True):
        row.update({name: share * row["time/step"] for name, share in shares.items()})
        shipped["time/wait_for_policy"] = 0.6 * shipped["time/step"]
    found = find_bottleneck(trainer, orchestrator)
    assert found.cause == "other runs" and "other runs took 55%" in str(found)


def test_bottleneck_needs_steps_of_this_start():
    trainer, orchestrator = simulate(sample=3)
    assert find_bottleneck(trainer[:3], orchestrator[:3]) is None
    assert find_bottleneck(trainer, orchestrator, since=trainer[-2]["time"]) is None
    assert find_bottleneck([], []) is None


def test_bottleneck_of_fine_tuning_is_its_data():
    rows = [{"step": n, "time": 2.0 * n, "time/step": 2.0, "time/load_data": 1.0, "time/train": 1.0} for n in range(6)]
    assert find_bottleneck(rows, []).cause == "data"
    assert find_bottleneck([{**row, "time/load_data": 0.01} for row in rows], []) is None


def test_bottleneck_after_a_restart_counts_only_what_the_new_process_held():
    trainer, orchestrator = simulate(hold=0.05, k=0)
    old = {"step": -1, "time": -1e3, "eval/held_s": 500.0}  # the total of the process before
    for rows in (orchestrator, [old, *orchestrator]):
        assert find_bottleneck(trainer, rows).cause == "staleness bound"
