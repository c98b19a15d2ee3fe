"""Environments of all kinds, written against verifiers alone: tokens, masks, rewards and advantages.

The expected values are computed by hand. `«...»` encloses what is trained; `…` replaces what is not compared.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from prime_rl.configs.environment import EnvConfig
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.core.types import Group
from prime_rl.orchestrator.algorithms.advantages import advantage_function, has_only_zero_advantages, part_advantages
from prime_rl.orchestrator.packing import pack
from prime_rl.rollouts.environment_backend import EnvironmentBackend
from prime_rl.rollouts.group_attempts import EnvironmentFailed, UnsupportedEnvironment
from prime_rl.rollouts.workers import worker_main
from tests.unit.rollouts.conftest import TOKENIZER, served

KINDS = Path(__file__).parents[2] / "support/environments"
VERSION = 5
USER, SAY, END = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>"
CALL = '<tool_call>\n{"name": "%s", "arguments": {"word": "abc"}}\n</tool_call>'


def turn(asked: str, said: str, first: bool = True) -> str:
    """A turn with a trained reply."""
    return f"{'' if first else chr(10)}{USER}{asked}{SAY}«{said}{END}»"


@dataclass
class Kind:
    """An environment and what must come of a group of two rollouts.

    Attributes:
        file: below tests/support/environments.
        replies: of the model by the last message; the n-th rollout with the same prompt gets the n-th.
        samples: of each rollout.
        rewards: of each rollout.
        metrics: of the first rollout, those to compare.
        advantages: of the trained spans of each rollout, in order; None: as the rewards give.
    """

    file: str
    replies: Mapping[str, Sequence[str]]
    samples: Sequence[Sequence[str]]
    rewards: Sequence[float]
    metrics: Mapping[str, float] = field(default_factory=dict)
    advantages: Sequence[Sequence[float]] | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, Any] = field(default_factory=dict)
    example: int = 0


TOOL_RESULT = "<tool_response>%s</tool_response>"
WALK = {"Walk.": ["1", "3"], "on": ["2"]}
WALKS = [[turn("Walk.", said) + turn("on", "2", first=False)] for said in ("1", "3")]
SYSTEM = "<|im_start|>system\nBe brief.<|im_end|>\n"
SECOND = {"More than 4?": ["9"], "More than 8?": ["6"]}

KINDS_AND_RESULTS = [
    Kind("classic/single_turn.py", {"Reverse abc.": ["<answer>cba</answer>", "cba"]},
        [[SYSTEM + turn("Reverse abc.", said)] for said in ("<answer>cba</answer>", "cba")], [1.0, 0.5],
        {"correct": 1.0, "short": 0.0}),
    Kind("classic/multi_turn.py", {"Guess.": ["5", "7"], "higher": ["7"]},
        [[turn("Guess.", "5") + turn("higher", "7", first=False)], [turn("Guess.", "7")]], [0.5, 1.0],
        {"num_turns": 2.0}),
    Kind("classic/tools.py", {"Shout abc.": [CALL % "shout"], TOOL_RESULT % "ABC": ["ABC", "abc"]},
        [[f"…{turn('Shout abc.', CALL % 'shout')}{turn(TOOL_RESULT % 'ABC', said, first=False)}"]
         for said in ("ABC", "abc")], [1.0, 0.0], {"shout_calls": 1.0}),
    Kind("classic/stateful_tools.py", {"Remember abc.": [CALL % "remember", "no"], TOOL_RESULT % "1": ["ok"]},
        [[f"…{turn('Remember abc.', CALL % 'remember')}{turn(TOOL_RESULT % '1', 'ok', first=False)}"],
         [f"…{turn('Remember abc.', 'no')}"]], [1.0, 0.0]),
    Kind("classic/group_of_environments.py", {"Go on.": ["abc", "a"]}, [[turn("Go on.", s)] for s in ("abc", "a")],
        [3, 1]),
    Kind("classic/group_of_environments.py", {"Stop.": ["abc"]}, [[turn("Stop.", "abc")]] * 2, [-1, -1], example=1),
    Kind("classic/own_client.py", {"Talk.": ["abc", "de"], "Ask.": ["why"], "why": ["so"]},
        [[turn("Talk.", said) + turn("why", "so", first=False)] for said in ("abc", "de")], [5.0, 4.0]),
    Kind("classic/judge.py", {"Reverse abc.": ["cba", "no"], "Good? cba": ["0.5"], "Good? no": ["0.25"]},
        [[turn("Reverse abc.", said)] for said in ("cba", "no")], [1.05, 0.025], {"other": 1.0, "policy": 0.5}),
    Kind("classic/odd_rewards.py", {"Speak.": ["aa", "b"]}, [[turn("Speak.", said)] for said in ("aa", "b")],
        [512.0, 500.0], {"Counter": 2.0, "at_least": 1.0, "at_least_2": 0.0, "half": 0.5}),
    Kind("classic/group_rewards.py", {"Speak.": ["abc", "a"]}, [[turn("Speak.", s)] for s in ("abc", "a")], [1, 0]),
    # Rewards 1 and 3 of the first turn, 2 of the second, 10 at the end: the second turns earn the same.
    Kind("classic/step_rewards.py", WALK, WALKS, [13, 15], {"end": 10}, [[-1, 0], [1, 0]], {}, {"step_rewards": "add"}),
    Kind("classic/step_rewards.py", WALK, WALKS, [13, 15], {"end": 13}, [[-1, 0], [1, 0]], {"sums": True},
        {"step_rewards": "included"}),
    # Only the second rollout has a reward of a step; its turns are compared with those of the first.
    Kind("classic/step_rewards.py", WALK, WALKS, [10, 13], {}, [[-1.5, 0], [1.5, 0]], {"sets": "some rewards"},
        {"step_rewards": "add"}),
    Kind("classic/step_rewards.py", WALK, WALKS, [13, 15], {}, [[-1, -1], [1, 1]], {"sums": True}),
    Kind("classic/step_rewards.py", WALK, WALKS, [10, 10], {}, [[-2, -2], [-2, -2]], {"sets": "state"}),
    # Only the second turns have an advantage; the first ones are compared as rollouts.
    Kind("classic/step_rewards.py", WALK, WALKS, [10, 10], {}, [[0, 2], [0, 2]], {"sets": "advantage"}),
    Kind("agents/arithmetic.py", {"1 + 1?": ["2", "3"]}, [[turn("1 + 1?", said)] for said in "23"], [2, 0],
        {"right": 1}),
    # The first agent says 4 and 8, the second 9 and 6. Each agent is compared with itself.
    Kind("agents/self_play.py", {"A number?": ["4", "8"], **SECOND},
        [[turn("A number?", "4"), turn("More than 4?", "9")], [turn("A number?", "8"), turn("More than 8?", "6")]],
        [0.5, 0.5], {"first/reward": 0.0, "second/reward": 1.0, "second/won": 1.0, "first/num_turns": 1.0},
        [[-0.5, 0.5], [0.5, -0.5]]),
    # The second agent runs in one of two episodes; the first is compared with itself in both.
    Kind("agents/challenge.py", {"Bet?": ["no", "yes"], "Call?": ["ok"]},
        [[turn("Bet?", "no")], [turn("Bet?", "yes"), turn("Call?", "ok")]], [0.5, 0.5],
        {"better/reward": 0.5, "better/kept": 0.5}, [[0.25], [-0.25, 0]]),
    # Each proposal has two attempts, which are compared with each other; proposals are compared across the group.
    Kind("agents/proposer_solver.py",
        {"Propose.": ["a", "b"], "Solve a": ["x", "y"], "Solve b": ["z"],
         **{f"Good? {said}": [score] for said, score in (("x", "1"), ("y", "0"), ("z", "0"))}},
        [[turn("Propose.", "a"), turn("Solve a", "x"), turn("Solve a", "y")],
         [turn("Propose.", "b"), turn("Solve b", "z"), turn("Solve b", "z")]], [2 / 3, 0.0],
        {"proposer/reward": 1.0, "solver/reward": 0.5, "solver/good": 0.5}, [[0.5, 0.5, -0.5], [-0.5, 0, 0]]),
]  # fmt: skip


def scripted(replies: Mapping[str, Sequence[str]]):
    """Answer each request by its last message."""
    seen: Counter[str] = Counter()

    def reply(body):
        prompt = TOKENIZER.decode(body["token_ids"])
        asked = prompt.removesuffix(SAY).rpartition("<|im_start|>")[2].partition("\n")[2]
        said = replies[asked][seen[prompt] % len(replies[asked])]
        seen[prompt] += 1
        return [*TOKENIZER(said, add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id], "stop"

    return reply


def marked(tokens: Sequence[int], mask: Sequence[bool]) -> str:
    """The text with the trained spans in `«»`."""
    text, trained = "", False
    for token, is_trained in [*zip(tokens, mask, strict=True), (None, False)]:
        text += "»" if trained and not is_trained else "«" if is_trained and not trained else ""
        trained = bool(is_trained)
        text += "" if token is None else TOKENIZER.decode([token])
    return text


def span_advantages(batch, group: Group) -> list[list[float]]:
    """The advantages of the trained spans of each rollout, in order of its samples."""
    ends = np.cumsum(batch.seq_lens)
    found: dict[tuple[int, bytes], list[float]] = {}
    for end, length, rollout in zip(ends, batch.seq_lens, batch.sample_rollout, strict=True):
        row = slice(end - length, end)
        values, mask = batch.advantages[row], batch.loss_mask[row].astype(bool)
        starts = np.flatnonzero(mask & ~np.concatenate([[False], mask[:-1]]))
        for start in starts:
            stop = start + int(np.argmin(np.append(mask[start:], False)))
            assert len(set(values[start:stop].tolist())) == 1  # a turn has one advantage
        found.setdefault((int(rollout), batch.tokens[row].tobytes()), []).append(values[starts].tolist())
    return [
        [value for sample in rollout.samples for value in found[index, sample.tokens.astype(np.int32).tobytes()].pop(0)]
        for index, rollout in enumerate(group.rollouts)
    ]


@pytest.fixture
def load_kind(renderer):
    def loaded(file, args=None, **keys):
        config = EnvConfig(id=str(KINDS / file), args=dict(args or {}), **keys)
        return worker_main.load(config, renderer, "train", warn=lambda text: None)

    return loaded


async def play(environment, replies, example=0):
    """Return a group of two rollouts."""
    async with served(environment, scripted(replies)) as (fake, engine):
        fake.step = VERSION
        return await environment.run_group(example, 2, engine, {"max_tokens": 200, "temperature": 1.0}, 4000)


@pytest.mark.parametrize("kind", KINDS_AND_RESULTS, ids=lambda kind: Path(kind.file).stem)
async def test_environment_gives_the_right_tokens_rewards_and_advantages(load_kind, kind):
    rollouts = await play(load_kind(kind.file, kind.args, **kind.keys), kind.replies, kind.example)
    order = [[marked(sample.tokens, sample.loss_mask) for sample in rollout.samples] for rollout in rollouts]
    rollouts = [rollouts[index] for index in sorted(range(2), key=lambda index: rank(order[index], kind.samples))]
    for rollout, samples in zip(rollouts, kind.samples, strict=True):
        for sample, expected in zip(rollout.samples, samples, strict=True):
            found = marked(sample.tokens, sample.loss_mask)
            assert found.endswith(expected[1:]) if expected.startswith("…") else found == expected
            assert sample.versions.tolist() == np.where(sample.loss_mask, VERSION, -1).tolist()
            assert sample.logprobs.tolist() == np.where(sample.loss_mask, -0.5, 0.0).tolist()
    assert [rollout.reward for rollout in rollouts] == pytest.approx(list(kind.rewards))
    assert {name: rollouts[0].metrics[name] for name in kind.metrics} == pytest.approx(dict(kind.metrics))
    group, config = Group(0, tuple(rollouts), "kind", 0, 1.0), OrchestratorConfig()
    advantages = part_advantages(advantage_function(config.advantage), [group], config)
    mean = np.mean(kind.rewards)
    expected = kind.advantages or [
        [reward - mean] * sum(text.count("«") for text in samples)
        for reward, samples in zip(kind.rewards, kind.samples, strict=True)
    ]
    for found, values in zip(span_advantages(pack([group], advantages, 4000), group), expected, strict=True):
        assert found == pytest.approx(values, abs=1e-6)
    assert has_only_zero_advantages(group, config) == (not np.any([value for values in expected for value in values]))


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({}, None),
        ({"answer": None}, None),
        ({"answer": ""}, None),
        ({"answer": 0}, "0"),
        ({"answer": ["a", "b"]}, "['a', 'b']"),
        ({"answer": "é" * 2_000}, "é" * 2_000),
        ({"answer": "é" * 2_001}, "é" * 2_000 + "… (2,001 characters)"),
        (SimpleNamespace(answer="x"), "x"),
        (SimpleNamespace(prompt="x"), None),
    ],
)
async def test_answer_of_an_example_is_short_text_or_none(row, answer):
    assert EnvironmentBackend.answer(SimpleNamespace(_row=lambda example: row), 0) == answer


def rank(samples: Sequence[str], expected: Sequence[Sequence[str]]) -> int:
    """The index of the expected rollout with these samples."""
    return next(i for i, texts in enumerate(expected) if samples[0].endswith(texts[0].removeprefix("…")))


@pytest.mark.parametrize(
    ("file", "args", "message"),
    [
        ("classic/refused.py", {"does": "picture later"}, "image_url"),
        ("classic/refused.py", {"does": "stream"}, "stream is not supported"),
        ("classic/step_rewards.py", {"rubric_sets": "reward", "sets": None}, "rubric sets `reward` of single"),
        ("classic/step_rewards.py", {"rubric_sets": "advantage", "sets": None}, "rubric sets `advantage` of"),
    ],
)
async def test_unsupported_environment_is_refused_in_its_first_group(load_kind, file, args, message):
    with pytest.raises((EnvironmentFailed, UnsupportedEnvironment), match=message) as raised:
        await play(load_kind(file, args), {"say it": ["a"], **WALK})
    assert "\n" not in str(raised.value)
