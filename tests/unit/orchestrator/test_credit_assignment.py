"""Advantages of the parts of rollouts: what is compared, what the environment gives, and where they go."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from prime_rl.configs.advantage import ReinforcePPAdvantageConfig
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.core.types import Credit, Group, Rollout, Sample
from prime_rl.orchestrator.algorithms.advantages import (
    advantage_function,
    comparisons,
    has_only_zero_advantages,
    part_advantages,
    uncompared_share,
)
from prime_rl.orchestrator.ledger.ledger_records import decode_group, encode_group
from prime_rl.orchestrator.packing import pack
from prime_rl.orchestrator.run_reports import SampleFiles
from prime_rl.storage.paths import RunPaths


def sample(owners=None, tokens=3):
    """`tokens` sampled tokens after one of the prompt, or one sampled token for each owner."""
    tokens = tokens if owners is None else len(owners)
    sampled = np.arange(tokens + 1) > 0
    return Sample(
        np.zeros(tokens + 1, np.int32),
        sampled,
        np.zeros(tokens + 1, np.float32),
        np.where(sampled, 0, -1).astype(np.int32),
        None if owners is None else np.array([owners[0], *owners], np.int32),
    )


def group(*rollouts):
    """Rollouts as (reward, credits, samples)."""
    played = [Rollout(tuple(samples), reward, {}, False, (), credits=credits) for reward, credits, samples in rollouts]
    return Group(0, tuple(played), "toy", 0, 1.0)


def advantages_of(group, **keys):
    config = OrchestratorConfig(**keys)
    (values,) = part_advantages(advantage_function(config.advantage), [group], config)
    return values.tolist()


def agents(*rewards, contexts=("same", "same")):
    """A rollout of the agents `a` and `b`."""
    credits = tuple(Credit(n, r, context=c) for n, r, c in zip("ab", rewards, contexts, strict=True))
    return sum(rewards) / 2, credits, [sample([0, 0]), sample([1, 1, 1, 1])]


PLAIN = (1.0, (), [sample()]), (0.0, (), [sample()])


@pytest.mark.parametrize(
    ("rollouts", "advantages"),
    [
        (PLAIN, [0.5, -0.5]),
        ((agents(1.0, 0.0), agents(0.0, 4.0)), [0.5, -2.0, -0.5, 2.0]),
        # Of tasks that differ, they are compared by name.
        ((agents(1.0, 0.0, contexts=("x", "y")), agents(0.0, 4.0, contexts=("x", "z"))), [0.5, -2.0, -0.5, 2.0]),
    ],
)
def test_part_advantages_compare_each_agent_with_itself(rollouts, advantages):
    played = group(*rollouts)
    assert advantages_of(played) == advantages
    assert played.part_offsets[-1] == len(advantages)


def test_part_advantages_given_by_the_environment_are_not_compared():
    given = (5.0, (Credit("", 5.0, advantage=-3.0),), [sample()])
    assert advantages_of(group(given, *PLAIN)) == [-3.0, 0.5, -0.5]
    assert advantages_of(group(given)) == [-3.0]
    assert advantages_of(group(given), advantage=ReinforcePPAdvantageConfig()) == [-3.0]


def test_comparison_counts_the_tokens_of_its_parts_and_shapes_rewards():
    config = OrchestratorConfig(zero_truncated_completions=True)
    first, second = comparisons(group(agents(1.0, 0.5), agents(0.0, 4.0)), config)
    assert first.scores.lengths.tolist() == [2, 2] and second.scores.lengths.tolist() == [4, 4]
    assert second.parts.tolist() == [1, 3]
    cut = Rollout((sample([0]),), 1.0, {}, True, (), credits=(Credit("a", 1.0),))
    (comparison,) = comparisons(Group(0, (cut,), "toy", 0, 1.0), config)
    assert comparison.scores.rewards.tolist() == [0.0]


def test_length_penalty_of_a_part_counts_its_own_inputs_and_turns():
    """Of two turns in one sample, each reads the tokens before it; those at the end belong to the last one."""
    sampled = np.array([0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 0], np.bool_)
    zeros = np.zeros(len(sampled), np.int32)
    owners = zeros.copy()
    owners[9] = 1  # only sampled tokens have the turn's index
    turns = Sample(zeros, sampled, zeros.astype(np.float32), sampled - np.int32(1), owners)
    credits = Credit("turn 0", 1.0), Credit("turn 1", 2.0)
    short = (0.0, credits, [sample([0, 1])])  # one token of the prompt, and turns of one token
    config = OrchestratorConfig(reward_shaping={"length_penalty": {}})
    first, second = (one.scores for one in comparisons(group((0.0, credits, [turns]), short), config))
    assert [one.inputs.tolist() for one in (first, second)] == [[3, 1], [5, 0]]
    assert [one.turns.tolist() for one in (first, second)] == [[1, 1], [1, 1]]
    assert first.rewards == pytest.approx([1 - (0.25 + 0.1 + 0.1), 1 - (0.25 / 2 + 0.1 / 3 + 0.1)])
    assert second.rewards == pytest.approx([2 - 2 * (0.25 + 0.1 + 0.1), 2 - 2 * (0.25 + 0.1)])


def test_truncated_agent_is_zeroed_and_masked_without_the_others():
    credits = Credit("a", 1.0, is_truncated=True), Credit("b", 2.0, is_truncated=False)
    cut = Rollout((sample([0]), sample([1, 1])), 1.5, {}, True, (), credits=credits)
    group = Group(0, (cut,), "toy", 0, 1.0)
    found = comparisons(group, OrchestratorConfig(zero_truncated_completions=True))
    assert [one.scores.rewards.tolist() for one in found] == [[0.0], [2.0]]
    batch = pack([group], [np.ones(2)], 64, mask_truncated=True)
    masks = np.split(batch.loss_mask, np.cumsum(batch.seq_lens)[:-1])
    assert sorted(mask.tolist() for mask in masks) == [[0, 0], [0, 1, 1]]


@pytest.mark.parametrize(
    ("rollouts", "is_zero"),
    [
        ([agents(1.0, 0.0), agents(1.0, 0.0)], True),
        ([agents(1.0, 0.0), agents(1.0, 0.5)], False),
        ([agents(0.0, 1.0), agents(1.0, 0.0)], False),  # equal rewards of the rollouts
        ([(1.0, (Credit("", 1.0, advantage=0.0),), [sample()])], True),
        ([(1.0, (Credit("", 1.0, advantage=0.5),), [sample()])], False),
    ],
)
def test_has_only_zero_advantages_looks_at_the_parts(rollouts, is_zero):
    assert has_only_zero_advantages(group(*rollouts), OrchestratorConfig()) == is_zero


def test_pack_gives_each_token_the_advantage_of_its_part():
    turns = (0.0, (Credit("turn 0", 1.0), Credit("turn 1", 2.0)), [sample([0, 0, 1])])
    batch = pack([group(turns, (0.0, (), [sample(tokens=2)]))], [np.array([7.0, 8.0, 9.0])], 64)
    by_rollout = {
        int(rollout): batch.advantages[end - length : end].tolist()
        for rollout, length, end in zip(batch.sample_rollout, batch.seq_lens, np.cumsum(batch.seq_lens), strict=True)
    }
    assert by_rollout == {0: [0, 7, 7, 8], 1: [0, 9, 9]}


def test_pending_group_and_sample_files_keep_credits_example_and_answer(tmp_path):
    before = group(agents(1.0, 0.0), (0.5, (Credit("", 1.0, advantage=0.5),), [sample()]), (0.5, (), [sample()]))
    answered = replace(before.rollouts[2], answer="\x1b[31m42")
    before = replace(before, example=7, rollouts=(*before.rollouts[:2], answered))
    after = decode_group(encode_group(before), Path("group"))
    assert [rollout.credits for rollout in after.rollouts] == [rollout.credits for rollout in before.rollouts]
    assert after.rollouts[0].samples[1].credits.tolist() == [1] * 5
    assert after.rollouts[1].samples[0].credits is None
    SampleFiles(RunPaths(tmp_path)).write(0, [after], [np.array([0.5, -1.5, 0.5, 0.25])])
    first, _, last = map(json.loads, RunPaths(tmp_path).samples(0).read_text().splitlines())
    assert (first["advantage"], last["advantage"]) == (-0.5, 0.25)
    assert first["credits"][1] == {"name": "b", "reward": 0.0, "advantage": -1.5}
    assert "credits" not in last
    assert (last["example"], last["answer"]) == (7, "\x1b[31m42")


@pytest.mark.parametrize(("num", "chosen"), [(None, [0, 1, 2, 3, 4]), (1, [0]), (4, [0, 2]), (100, [0, 1, 2, 3, 4])])
def test_sample_files_choose_evenly_from_the_batch(tmp_path, num, chosen):
    groups = [replace(group(*PLAIN), group_id=group_id) for group_id in range(5)]
    written = SampleFiles(RunPaths(tmp_path), num).write(0, groups, [np.zeros(2)] * 5)
    assert [row["group_id"] for row in written] == [group for group in chosen for _ in range(2)]


def turns(count):
    """A rollout of `count` turns with a reward of 1 and two tokens each."""
    credits = tuple(Credit(f"turn {n}", float(count - n)) for n in range(count))
    return float(count), credits, [sample([n for n in range(count) for _ in range(2)])]


def test_uncompared_share_counts_the_turns_that_one_rollout_reaches():
    survivor = group(turns(1), turns(1), turns(1), turns(5))
    assert advantages_of(survivor) == [-1.0, -1.0, -1.0, 3.0, 0.0, 0.0, 0.0, 0.0]
    assert uncompared_share([survivor]) == 8 / 16
    assert uncompared_share([survivor, group(turns(2), turns(2))]) == 8 / 24
    assert uncompared_share([group((1.0, (), [sample()]))]) == 0.0, "rollouts without parts"
    given = (5.0, (Credit("", 5.0, advantage=-3.0),), [sample()])
    assert uncompared_share([group(given)]) == 0.0
