"""The checks of a run with faults find nothing in a complete run, and each problem in a broken one."""

import json
import shutil

import numpy as np
import pytest

from prime_rl.storage.artifact import MANIFEST, publish_artifact
from prime_rl.storage.batch import Batch, write_batch
from prime_rl.storage.paths import RunPaths
from tests.chaos import check, letters
from tests.chaos.cases import Plan

PLAN = Plan((), async_level=1)
GROUP, SEED, STEPS, PROMPT = 2, 7, 4, [3, 4, 5]
BATCHES = {0: (0, 1), 1: (2, 4), 2: (3, 5), 3: (6, 7)}
DROPPED = 8
"""Position 8 is dropped in branch 1, which begins before batch 2."""


def batch_of(step, groups, version=None):
    tokens, versions, lengths, pairs = [], [], [], []
    for pair in [(group, rollout) for group in groups for rollout in range(GROUP)]:
        seed = letters.rollout_seed(SEED, *pair)
        own = [max(0, step - 1 if version is None else version)] * (letters.completion_length(PROMPT, seed) + 1)
        sampled = letters.complete(PROMPT, seed, own)
        tokens += [*PROMPT, *sampled]
        versions += [-1] * len(PROMPT) + own
        lengths.append(len(PROMPT) + len(own))
        pairs.append(pair)
    count, mask = len(tokens), np.array(versions) >= 0
    return Batch(
        tokens=np.array(tokens, np.int32),
        loss_mask=mask.astype(np.uint8),
        logprobs=np.where(mask, letters.LOGPROB, 0).astype(np.float32),
        advantages=np.zeros(count, np.float32),
        versions=np.array(versions, np.int32),
        temperature=np.ones(count, np.float32),
        segment_ids=np.repeat(np.arange(len(lengths)), lengths).astype(np.int32),
        row_offsets=np.array([0, count]),
        row_cost=np.ones(1, np.float32),
        seq_lens=np.array(lengths, np.int32),
        sample_group=np.array([group for group, _ in pairs]),
        sample_rollout=np.array([rollout for _, rollout in pairs], np.int32),
    )


def lines(file, records):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


def ship(paths, step, groups, version=None):
    shutil.rmtree(paths.rollouts(step), ignore_errors=True)
    fields = {"branch": int(step >= 2), "step": step, "async_level": 1}
    write_batch(paths.rollouts(step), batch_of(step, groups, version), fields)


def ledgers(paths, base_open=((5, 0, 5, 1, 2),), dropped=(DROPPED,)):
    """Branch 0 drew 0 to 6 and shipped two batches; branch 1 continues from there, with 3 and 5 open."""
    started = {"record": "started", "base": None}
    drawn = [{"record": "drawn", "group_id": g, "env": 0, "example": g} for g in range(7)]
    shipped = [{"record": "shipped", "step": step, "group_ids": list(BATCHES[step])} for step in (0, 1)]
    lines(paths.abandoned(0) / "ledger/branch_0.jsonl", [started, *drawn, *shipped])
    base = {"positions": {"cursor": 6, "next_step": 2, "open": [[3, 0, 3, 0, 2], *map(list, base_open)]}}
    drawn = [{"record": "drawn", "group_id": g, "env": 0, "example": g} for g in (6, 7, 8)]
    ends = [{"record": "dropped", "group_id": g, "reason": "error"} for g in dropped]
    shipped = [{"record": "shipped", "step": step, "group_ids": list(BATCHES[step])} for step in (2, 3)]
    lines(paths.ledger(1), [{"record": "started", "base": base}, *drawn, *ends, *shipped])


@pytest.fixture
def paths(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "STEPS", STEPS)
    paths = RunPaths(tmp_path)
    for step, groups in BATCHES.items():
        ship(paths, step, groups)
    ledgers(paths)
    lines(paths.metrics("trainer"), [{"step": step} for step in range(STEPS)])
    lines(paths.metrics("orchestrator"), [{"step": step, "reward/mean": 0.5} for step in range(STEPS)])
    publish_artifact(paths.weights(STEPS), lambda _: {"hash": "h"})
    part = paths.checkpoint(STEPS) / "trainer"
    part.mkdir(parents=True)
    progress = {"step": STEPS, "tokens": 1, "samples": GROUP * 8, "problems": 8}
    (part / MANIFEST).write_text(json.dumps({"progress": progress}))
    return paths


def run_check(paths):
    return check.check(paths, PLAN, GROUP, SEED)


def test_check_complete_run_has_no_problems(paths):
    result = run_check(paths)
    assert result.problems == []
    assert result.final_reward == 0.5 and result.weights == "h" and len(result.batches) == STEPS


def test_check_position_shipped_twice_is_repeated(paths):
    ship(paths, 3, (6, 1))
    assert any("position 1 was shipped 2 times" in line for line in run_check(paths).repeated)


def test_check_position_dropped_and_shipped_is_repeated(paths):
    ledgers(paths, dropped=(8, 7))
    assert run_check(paths).repeated == ["position 7 was dropped and shipped"]


def test_check_position_that_ends_without_a_reason_is_lost(paths):
    ship(paths, 3, (6, 8))
    ledgers(paths, dropped=())
    assert run_check(paths).lost == []  # 7 was drawn, and may still be open
    ledgers(paths, base_open=())  # 5 had ended when branch 1 began, and was neither shipped nor dropped
    ship(paths, 2, (3, 9))
    assert "position 5 ended before branch 1, neither shipped nor dropped" in run_check(paths).lost


def test_check_shipped_position_missing_in_a_checkpoint_is_lost(paths):
    ledgers(paths, base_open=((5, 0, 5, 1, 2), (4, 0, 4, 0, 1)))
    assert run_check(paths).lost == ["branch 1 lacks 4, which ended before"]


def test_check_missing_batch_is_lost(paths):
    shutil.rmtree(paths.rollouts(3))
    assert "no manifest of batches 3" in run_check(paths).lost


def test_check_flipped_bit_breaks_a_batch(paths):
    file = paths.rollouts(2) / "rows.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert run_check(paths).broken == ["batch 2 differs from its manifest"]


def test_check_tokens_older_than_the_bound_are_reported(paths):
    ship(paths, 3, BATCHES[3], version=1)
    assert run_check(paths).bound_broken


def test_check_wrong_version_tag_is_reported(paths):
    """Tokens of version 0 that are tagged as version 2."""
    batch = batch_of(3, BATCHES[3], version=0)
    batch.versions[batch.versions == 0] = 2
    shutil.rmtree(paths.rollouts(3))
    write_batch(paths.rollouts(3), batch, {"branch": 1, "step": 3, "async_level": 1})
    assert any("differs from what its versions sample" in line for line in run_check(paths).broken)


def test_check_step_trained_twice_is_reported(paths):
    lines(paths.metrics("trainer"), [{"step": step} for step in (0, 1, 1, 2, 3)])
    assert run_check(paths).broken == ["metrics/trainer.jsonl contains 5 steps; missing: none; twice: 1"]


def test_check_trainer_with_other_counters_is_reported(paths):
    file = paths.checkpoint(STEPS) / "trainer" / MANIFEST
    file.write_text(file.read_text().replace('"samples": 16', '"samples": 20'))
    assert any("the trainer has trained on" in line for line in run_check(paths).broken)
