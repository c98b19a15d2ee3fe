"""Conversations of classic environments against a fake engine: every trained token is one that was sampled, in the very
context that it was sampled in, and tools are called."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from prime_rl.configs.environment import EnvConfig
from prime_rl.core.types import Group
from prime_rl.orchestrator.ledger.ledger_records import decode_group, encode_group
from prime_rl.orchestrator.run_reports import SampleFiles
from prime_rl.rollouts.clients.inference_client import InferenceClient
from prime_rl.rollouts.recorder import Recorder
from prime_rl.rollouts.rendering.renderer import Renderer
from prime_rl.rollouts.workers import worker_main
from prime_rl.storage.paths import RunPaths
from tests.support.chat_templates import SHAPES, make_merging_tokenizer
from tests.support.fake_engine import fake_engine
from tests.support.tiny_model import make_tokenizer

TOKENIZER = make_tokenizer()
SAMPLING = {"temperature": 1.0}


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "support/packages"))


def says(text, tokenizer=TOKENIZER):
    return [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id], "stop"


def nagging(renderer=None, **args):
    config = EnvConfig(id="nagging_environment", args=args)
    return worker_main.load(config, renderer or Renderer(TOKENIZER), "train")


async def play(environment, reply, seq_len=512, count=1, example=3):
    """Rollouts of an example, and the prompts that the engine got; `reply` gets the engine and a request."""
    async with fake_engine() as fake, InferenceClient(fake.url, "m", "") as engine:
        fake.reply = lambda body: reply(fake, body)
        rollouts = await environment.run_group(example, count, engine, SAMPLING, seq_len)
    return rollouts, [request["token_ids"] for request in fake.requests]


def check(rollout, asked, replies):
    """The samples hold every reply once, behind exactly the ids that the engine was given."""
    sampled = [ids for ids, _ in replies]
    ends = {tuple(prompt + ids): len(ids) for prompt, ids in zip(asked, sampled, strict=True)}
    for sample in rollout.samples:
        length = ends[tuple(sample.tokens.tolist())]  # a sample ends with what the engine saw and said last
        assert sample.loss_mask[-length:].all()
    trained = [token for sample in rollout.samples for token in sample.tokens[sample.loss_mask].tolist()]
    assert sorted(trained) == sorted(token for ids in sampled for token in ids)


async def test_five_turns_are_one_sample_and_nothing_is_tokenised_again(installed):
    letters = [says(letter)[0][0] for letter in "user"]  # which is one token, where it is tokenised
    assert len(says("user")[0]) == 2
    replies = [([*letters, *says(str(turn) * 2)[0]], "stop") for turn in range(5)]

    def reply(fake, body):
        fake.step = len(fake.requests)  # the weights switch in the middle of every turn
        return replies[len(fake.requests) - 1]

    (rollout,), asked = await play(nagging(turns=5), reply)
    assert len(asked) == 5 and len(rollout.samples) == 1
    check(rollout, asked, replies)
    for (earlier, later), (ids, _) in zip(pairwise(asked), replies, strict=False):
        assert later[: len(earlier) + len(ids)] == earlier + ids
    (sample,) = rollout.samples
    assert sample.versions[sample.loss_mask].tolist() == [i // 7 + (i % 7 >= 3) for i in range(35)]
    assert (sample.versions[~sample.loss_mask] == -1).all()
    assert "user00" in TOKENIZER.decode(sample.tokens)


async def test_environment_cannot_change_the_trained_tokens(installed):
    rollouts, asked = await play(nagging(turns=2, scribble=True), lambda *_: says("so"), count=2)
    first, again = min(asked, key=len), max(asked, key=len)
    assert again[: len(first) + 3] == first + says("so")[0]
    for rollout in rollouts:
        (sample,) = rollout.samples
        assert sample.tokens.tolist() == again + says("so")[0]


async def test_branching_renders_every_turn_and_makes_one_sample_per_turn(installed):
    renderer = Renderer(TOKENIZER, strategy="branching")
    (rollout,), asked = await play(nagging(renderer, turns=3), lambda *_: says("so"))
    assert len(rollout.samples) == 3
    check(rollout, asked, [says("so")] * 3)


async def test_template_that_drops_reasoning_gives_one_sample_per_turn(installed):
    tokenizer = make_merging_tokenizer(SHAPES["tools"])
    replies = [says(f"<think>\nhm {i}\n</think>\n\nso", tokenizer) for i in range(3)]
    environment = nagging(Renderer(tokenizer), turns=3)
    (rollout,), asked = await play(environment, lambda fake, _: replies[len(fake.requests) - 1])
    assert len(rollout.samples) == 3
    check(rollout, asked, replies)
    assert ["hm" in tokenizer.decode(prompt) for prompt in asked] == [False] * 3


async def test_conversation_ends_before_the_turn_that_exceeds_seq_len(installed):
    (rollout,), asked = await play(nagging(turns=5), lambda *_: says("so"), seq_len=50)
    assert len(asked) == 2 and rollout.is_truncated
    check(rollout, asked, [says("so")] * 2)


@pytest.fixture
def calculator():
    args = {"difficulty": "easy", "num_eval_examples": 0}
    return worker_main.load(EnvConfig(id="calculator", args=args), Renderer(TOKENIZER), "train")


def call(expression, name="calculate"):
    return f'<tool_call>{{"name": "{name}", "arguments": {{"expression": "{expression}"}}}}</tool_call>'


def answers(first, then):
    """Say `then` after the results of tools."""
    return lambda _, body: says(then if "<tool_response>" in TOKENIZER.decode(body["token_ids"]) else first)


async def test_tool_result_is_not_trained_on_and_calls_are_kept(calculator, tmp_path):
    question = calculator._rows[0]
    expression = question["prompt"][-1]["content"].removeprefix("What is ").removesuffix("?")
    turns = f"Let me see. {call(expression)} {call('1+', 'calculate')}", f"<answer>{question['answer']}</answer>"
    rollouts, asked = await play(calculator, answers(*turns), 2048, 2, 0)
    for rollout in rollouts:
        assert rollout.reward == 1.0
        assert (rollout.metrics["total_tool_calls"], rollout.metrics["tool_errors"]) == (2, 1)
        (sample,) = rollout.samples
        assert sample.tokens[sample.loss_mask].tolist() == says(turns[0])[0] + says(turns[1])[0]
        assert ("tool", question["answer"]) in rollout.text
        assert "Let me see." in rollout.text[2][1]
        # What `synthesize --from` reads in samples/: exact calls and tools, also after the group was on disk.
        group = decode_group(encode_group(Group(0, (rollout,), "calculator", 0, 1.0)), Path())
        (row,) = SampleFiles(RunPaths(tmp_path)).write(0, [group], [np.zeros(1)])
        first, second = row["messages"][2]["tool_calls"]
        assert first["function"] == {"name": "calculate", "arguments": {"expression": expression}}
        assert [message["tool_call_id"] for message in row["messages"][3:5]] == [first["id"], second["id"]]
        assert row["tools"][0]["function"]["name"] == "calculate"
    assert '"name": "calculate"' in TOKENIZER.decode(asked[0])


@pytest.mark.parametrize("text", ["<tool_call>{broken</tool_call>", '<tool_call>{"name": "calculate"}</tool_call>'])
async def test_malformed_tool_call_is_content_and_ends_the_conversation(calculator, text):
    (rollout,), asked = await play(calculator, lambda *_: says(text), 2048, 1, 0)
    assert len(asked) == 1
    assert rollout.reward == 0.0 and rollout.text[-1] == ("assistant", text)


async def test_unknown_tool_returns_an_error_message_to_the_model(calculator):
    (rollout,), _ = await play(calculator, answers(call("1", "guess"), "<answer>0.5</answer>"), 2048, 1, 0)
    assert any(role == "tool" and "no such tool" in text for role, text in rollout.text)
    assert len(rollout.samples) == 1


async def test_interleaved_conversations_give_one_sample_each():
    letters = [*(says(letter)[0][0] for letter in "user"), TOKENIZER.eos_token_id]
    async with fake_engine() as fake, InferenceClient(fake.url, "m", "") as engine:
        fake.reply = lambda body: (letters, "length" if len(fake.requests) == 9 else "stop")
        recorder = Recorder(engine, Renderer(TOKENIZER), 512)
        talks = {name: [{"role": "user", "content": name}] for name in ("one", "two", "three")}
        for _ in range(3):
            for talk in talks.values():
                reply = await recorder.ask(talk, None, SAMPLING)
                talk += [{"role": "assistant", "content": reply.parsed.content}, {"role": "user", "content": "again"}]
    earlier, rollout = (
        recorder.rollout(dict.fromkeys(replies, True), [], 0.0, {}, False)
        for replies in (recorder.replies[:-1], recorder.replies)
    )
    assert (earlier.is_truncated, rollout.is_truncated) == (False, True)
    for sample, request in zip(rollout.samples, fake.requests[-3:], strict=True):
        assert sample.tokens.tolist() == request["token_ids"] + letters
        assert sample.tokens[sample.loss_mask].tolist() == letters * 3
