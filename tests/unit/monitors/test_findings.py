"""What the findings say about made-up curves: of healthy runs nothing, of others the problem that was put in."""

import math
import random

import pytest

from prime_rl.monitors.findings import find_problems


def curves(steps, rng, **shapes):
    """Lines of trainer and orchestrator; `shapes` are functions of the progress from 0 to 1, by name of the metric."""
    healthy = {
        "reward/mean": lambda x: 0.3 + 0.5 * x, "metrics/exact_match": lambda x: 0.1 + 0.4 * x,
        "entropy": lambda x: 1.5 - x, "grad_norm": lambda x: 1 + x, "mismatch_kl": lambda x: 0.002,
        "lr": lambda x: 1e-3, "reward/max": lambda x: 1.0, "metrics/turns": lambda x: 5 - 2 * x,
        "batch/zero_advantage_groups": lambda x: 0.2,
    }  # fmt: skip
    rows = []
    for step in range(steps):
        noise = 1 + 0.04 * rng.uniform(-1, 1)
        values = {name: shape(step / (steps - 1)) * noise for name, shape in (healthy | shapes).items()}
        rows.append({"step": step, "time": float(step), **values})
    return rows, rows


HEALTHY = {
    "saturated": {"entropy": lambda x: 1.5 * math.exp(-5 * x), "reward/mean": lambda x: 1 - 0.7 * math.exp(-4 * x)},
    "plain": {},
    "first steps without gradient": {"grad_norm": lambda x: 1.0 if x > 0.2 else 1e-4},
    "fewer errors": {
        f"metrics/{name}": lambda x: 0.6 - 0.5 * x
        for name in ("tool_errors", "timeouts", "grading_failed", "mistakes", "truncated")
    },
}


@pytest.mark.parametrize("shape", HEALTHY)
@pytest.mark.parametrize("steps", [20, 60, 500])
@pytest.mark.parametrize("seed", range(3))
def test_findings_of_a_healthy_run_are_none(shape, steps, seed):
    assert find_problems(*curves(steps, random.Random(seed), **HEALTHY[shape])) == []
    if shape in ("plain", "saturated"):
        assert find_problems(*curves(3, random.Random(seed), **HEALTHY[shape])) == []


PROBLEMS = {
    ".jsonl; the reward may be hacked if a lower metrics/exact_match is worse": {
        "metrics/exact_match": lambda x: 0.5 - 0.4 * x
    },
    "eval/math/reward/mean": {"eval/math/reward/mean": lambda x: 0.6 - 0.3 * x},
    "gradient norm rose": {"grad_norm": lambda x: 1 if x < 0.5 else 100 * x},
    "the reward fell": {"reward/mean": lambda x: 0.8 - 1.5 * abs(x - 0.5)},
    "nats; lower optim.lr (at most 0.0": {"mismatch_kl": lambda x: 5 * x},
    "trainer and sampler disagree": {"mismatch_kl/on_policy": lambda x: 0.5 * x},
    "is expected; set trainer.model.router_replay = true, and compare": {
        "mismatch_kl/on_policy": lambda x: 0.5 * x,
        "moe/max_violation": lambda x: 0.5,
    },
    "(largest: mismatch_kl/on_policy/env/b, 0.": {
        "mismatch_kl/on_policy": lambda x: 0.5 * x,
        "mismatch_kl/on_policy/env/b": lambda x: 0.7 * x,
        "mismatch_kl/on_policy/env/a": lambda x: 0.1 * x,
    },
    "entropy rose": {"entropy": lambda x: 1 + 3 * x},
    "entropy collapsed": {"entropy": lambda x: math.exp(-8 * x), "reward/mean": lambda x: 0.3},
    "learns nothing": {"batch/zero_advantage_groups": lambda x: math.inf, "reward/mean": lambda x: 0.3},
}


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("steps", [12, 20, 60, 500])
def test_findings_of_a_run_with_a_problem_name_it(problem, steps):
    found = find_problems(*curves(steps, random.Random(1), **PROBLEMS[problem]))
    assert any(problem in line for line in found), found


def test_findings_of_a_policy_that_was_destroyed_at_once_name_the_cause_alone():
    trainer, rows = curves(20, random.Random(0), **{"lr": lambda x: 0.02 * (1 - x), "entropy": lambda x: 1e-5})
    for row in rows[3:]:
        row.update({"reward/mean": 0.0, "reward/std": 0.0, "batch/zero_advantage_groups": 1.0})
    [line] = find_problems(trainer, rows)
    assert "the reward fell from 0.3" in line and "lower optim.lr (at most 0.02" in line
    assert line.endswith("and start again: there is no checkpoint of step 3 or before")
    assert find_problems(trainer, rows, checkpoints=[10])[0] == line
    assert find_problems(trainer, rows, checkpoints=[1, 2, 4])[0].endswith(
        "resume from checkpoint 2 (ckpt.resume_step)"
    )


@pytest.mark.parametrize(("start", "also"), [(0, "learns nothing"), (12, None)])
def test_findings_of_unstable_training_include_equal_rewards_that_began_before(start, also):
    trainer, rows = curves(20, random.Random(0), **{"reward/mean": lambda x: 0.3 if x < 0.6 else 0.0})
    for row in rows[start:]:
        row.update({"reward/std": 0.0, "batch/zero_advantage_groups": 1.0})
    found = find_problems(trainer, rows)
    assert "training is unstable" in found[0] and (also in found[1] if also else len(found) == 1), found


def test_findings_of_unstable_training_include_an_entropy_that_was_low_before():
    entropy = {"entropy": lambda x: 2 * math.exp(-12 * x) if x < 0.7 else 6.0, "reward/mean": lambda x: 0.3}
    found = find_problems(*curves(40, random.Random(0), **entropy))
    assert "the entropy rose" in found[0] and "the entropy collapsed" in found[1], found


@pytest.mark.parametrize("batches", [True, False])
def test_findings_name_a_reward_function_that_raises(batches):
    trainer, rows = curves(20, random.Random(0))
    for row in rows:
        failed = {"groups/failed": 5 * row["step"], "dropped/error/math": 5 * row["step"]}
        row.update(failed | {"groups/ended": 10 * row["step"]})
    warning = {"kind": "group", "env": "math", "count": 10, "text": "10 groups failed: KeyError: 'score'"}
    warning["cause"] = "KeyError: 'score'"
    [line] = find_problems(trainer if batches else [], rows if batches else [], [warning])
    count = "50 of 100 groups in the last 10 batches" if batches else "10 groups before the first batch"
    where = "logs/orchestrator.log lists them with their examples; their replies are not recorded"
    what = f"{count} were dropped, for example: KeyError: 'score'; {where}"
    assert line == f"environment math or its reward function fails: {what}"
    recovered = [row | {"groups/failed": 0, "dropped/error/math": 0} for row in rows]
    assert find_problems(trainer, recovered, [warning]) == []
    assert find_problems([], [], [warning | {"count": 1}]) == []


def test_findings_count_failed_groups_since_the_restart_of_the_orchestrator():
    _, rows = curves(20, random.Random(0))
    for row in rows:
        ended = 100 * row["step"] if row["step"] < 15 else 10 * (row["step"] - 14)
        failed = 0 if row["step"] < 15 else ended // 10 + 1
        row.update({"groups/ended": ended, "groups/failed": failed, "dropped/error/math": failed})
    [line] = find_problems([], rows, [{"kind": "group", "env": "math", "count": 1, "cause": "KeyError"}])
    assert "6 of 50 groups since the start of the orchestrator" in line
