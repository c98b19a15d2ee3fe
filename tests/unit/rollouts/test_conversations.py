"""Conversations of classic environments against a fake engine: every trained token is one that was sampled, in the very
context that it was sampled in, and tools are called."""

from itertools import pairwise
from pathlib import Path

import pytest

from prime_rl.configs.rollouts.options import RenderingConfig
from prime_rl.configs.shared.blocks import EnvConfig
from prime_rl.rollouts.clients.inference_client import InferenceClient
from prime_rl.rollouts.environments import environment_loader
from prime_rl.rollouts.recorder import Recorder
from prime_rl.rollouts.rendering.renderer import Renderer
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


def prompts(fake):
    return [request["token_ids"] for request in fake.requests]


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
    environment = environment_loader.load(
        EnvConfig(id="nagging_environment", args={"turns": 5}), Renderer(TOKENIZER), "train"
    )
    letters = [says(letter)[0][0] for letter in "user"]  # which is one token, where it is tokenised
    assert len(says("user")[0]) == 2
    replies = [([*letters, *says(str(turn) * 2)[0]], "stop") for turn in range(5)]
    async with fake_engine() as fake, InferenceClient(fake.url, "m", "") as engine:

        def reply(body):
            fake.step = len(fake.requests)  # the weights switch in the middle of every turn
            return replies[len(fake.requests) - 1]

        fake.reply = reply
        (rollout,) = await environment.run_group(3, 1, engine, SAMPLING, 512)
    asked = prompts(fake)
    assert len(asked) == 5 and len(rollout.samples) == 1
    check(rollout, asked, replies)
    for (earlier, later), (ids, _) in zip(pairwise(asked), replies, strict=False):
        assert later[: len(earlier) + len(ids)] == earlier + ids
    (sample,) = rollout.samples
    assert sample.versions[sample.loss_mask].tolist() == [i // 7 + (i % 7 >= 3) for i in range(35)]
    assert (sample.versions[~sample.loss_mask] == -1).all()
    assert "user00" in TOKENIZER.decode(sample.tokens)


async def test_environment_cannot_change_the_trained_tokens(installed):
    config = EnvConfig(id="nagging_environment", args={"turns": 2, "scribble": True})
    environment = environment_loader.load(config, Renderer(TOKENIZER), "train")
    async with fake_engine() as fake, InferenceClient(fake.url, "m", "") as engine:
        fake.reply = lambda body: says("so")
        rollouts = await environment.run_group(3, 2, engine, SAMPLING, 512)
    first, again = min(prompts(fake), key=len), max(prompts(fake), key=len)
    assert again[: len(first) + 3] == first + says("so")[0]
    for rollout in rollouts:
        (sample,) = rollout.samples
        assert sample.tokens.tolist() == again + says("so")[0]


async def test_branching_renders_every_turn_and_makes_one_sample_per_turn(installed):
    renderer = Renderer(TOKENIZER, strategy="branching")
    environment = environment_loader.load(EnvConfig(id="nagging_environment", args={"turns": 3}), renderer, "train")
    async with fake_engine() as fake, InferenceClient(fake.url, "m", "") as engine:
        fake.reply = lambda body: says("so")
        (rollout,) = await environment.run_group(3, 1, engine, SAMPLING, 512)
    assert len(rollout.samples) == 3
    check(rollout, prompts(fake), [says("so")] * 3)


async def test_template_that_drops_reasoning_gives_one_sample_per_turn(installed):
    tokenizer = make_merging_tokenizer(SHAPES["tools"])
    environment = environment_loader.load(
        EnvConfig(id="nagging_environment", args={"turns": 3}), Renderer(tokenizer), "train"
    )
    replies = [says(f"<think>\nhm {i}\n</think>\n\nso", tokenizer) for i in range(3)]
    async with fake_engine() as fake, InferenceClient(fake.url, "m", "") as engine:
        fake.reply = lambda body: replies[len(fake.requests) - 1]
        (rollout,) = await environment.run_group(3, 1, engine, SAMPLING, 512)
    assert len(rollout.samples) == 3
    check(rollout, prompts(fake), replies)
    assert ["hm" in tokenizer.decode(prompt) for prompt in prompts(fake)] == [False] * 3


async def test_conversation_ends_before_the_turn_that_exceeds_seq_len(installed):
    environment = environment_loader.load(
        EnvConfig(id="nagging_environment", args={"turns": 5}), Renderer(TOKENIZER), "train"
    )
    async with fake_engine() as fake, InferenceClient(fake.url, "m", "") as engine:
        fake.reply = lambda body: says("so")
        (rollout,) = await environment.run_group(3, 1, engine, SAMPLING, 50)
    assert len(fake.requests) == 2 and rollout.is_truncated
    check(rollout, prompts(fake), [says("so")] * 2)


def calculator(**config):
    args = {"difficulty": "easy", "num_eval_examples": 0}
    return environment_loader.load(
        EnvConfig(id="calculator", args=args), Renderer(TOKENIZER, RenderingConfig(**config)), "train"
    )


def call(expression, name="calculate"):
    return f'<tool_call>{{"name": "{name}", "arguments": {{"expression": "{expression}"}}}}</tool_call>'


async def test_tool_result_is_not_trained_on():
    environment = calculator()
    question = environment._rows[0]
    expression = question["prompt"][-1]["content"].removeprefix("What is ").removesuffix("?")
    turns = [f"Let me see. {call(expression)} {call('1+', 'calculate')}", f"<answer>{question['answer']}</answer>"]
    async with fake_engine() as fake, InferenceClient(fake.url, "m", "") as engine:
        fake.reply = lambda body: says(turns["<tool_response>" in TOKENIZER.decode(body["token_ids"])])
        rollouts = await environment.run_group(0, 2, engine, SAMPLING, 2048)
    for rollout in rollouts:
        assert rollout.reward == 1.0
        assert rollout.metrics["total_tool_calls"] == 2
        assert rollout.metrics["tool_errors"] == 1
        (sample,) = rollout.samples
        assert sample.tokens[sample.loss_mask].tolist() == says(turns[0])[0] + says(turns[1])[0]
        assert ("tool", question["answer"]) in rollout.text
        assert rollout.text[2][1].startswith("Let me see.\ncalculate({") or "Let me see." in rollout.text[2][1]
    first = TOKENIZER.decode(prompts(fake)[0])
    assert '"name": "calculate"' in first


@pytest.mark.parametrize("text", ["<tool_call>{broken</tool_call>", '<tool_call>{"name": "calculate"}</tool_call>'])
async def test_malformed_tool_call_is_content_and_ends_the_conversation(text):
    environment = calculator()
    async with fake_engine() as fake, InferenceClient(fake.url, "m", "") as engine:
        fake.reply = lambda body: says(text)
        (rollout,) = await environment.run_group(0, 1, engine, SAMPLING, 2048)
    assert len(fake.requests) == 1
    assert rollout.reward == 0.0 and rollout.text[-1] == ("assistant", text)


async def test_unknown_tool_returns_an_error_message_to_the_model():
    environment = calculator()
    turns = [call("1", "guess"), "<answer>0.5</answer>"]
    async with fake_engine() as fake, InferenceClient(fake.url, "m", "") as engine:
        fake.reply = lambda body: says(turns["<tool_response>" in TOKENIZER.decode(body["token_ids"])])
        (rollout,) = await environment.run_group(0, 1, engine, SAMPLING, 2048)
    assert any(role == "tool" and "no such tool" in text for role, text in rollout.text)
    assert len(rollout.samples) == 1


async def test_interleaved_conversations_give_one_sample_each():
    letters = [*(says(letter)[0][0] for letter in "user"), TOKENIZER.eos_token_id]
    async with fake_engine() as fake, InferenceClient(fake.url, "m", "") as engine:
        fake.reply = lambda body: (letters, "stop")
        recorder = Recorder(engine, Renderer(TOKENIZER), 512)
        talks = {name: [{"role": "user", "content": name}] for name in ("one", "two", "three")}
        for _ in range(3):
            for talk in talks.values():
                reply = await recorder.ask(talk, None, SAMPLING)
                talk += [{"role": "assistant", "content": reply.parsed.content}, {"role": "user", "content": "again"}]
    samples = recorder.rollout(dict.fromkeys(recorder.replies, True), [], 0.0, {}, False).samples
    for sample, asked in zip(samples, prompts(fake)[-3:], strict=True):
        assert sample.tokens.tolist() == asked + letters
        assert sample.tokens[sample.loss_mask].tolist() == letters * 3
