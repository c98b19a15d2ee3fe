"""`synthesize`: what a model said, tool calls included, becomes what `sft` learns."""

import json
import re

import pytest
from aiohttp import web

from prime_rl.configs.sft import SFTDataConfig
from prime_rl.core.errors import RunError
from prime_rl.evaluation.eval_results import ExampleFailure, ExampleRow, RolloutRow
from prime_rl.evaluation.synthesis import write_samples
from tests.support.fake_chat import calls, fake_chat, says
from tests.support.fake_engine import fake_engine
from tests.support.tiny_model import make_tokenizer
from tests.unit.evaluation.conftest import REVERSE

CALCULATOR = {"id": "calculator", "args": {"num_train_examples": 3, "num_eval_examples": 1}}


def learned(sequence, tokenizer):
    return tokenizer.decode(sequence.tokens[sequence.loss_mask])


def solve(body):
    """Call the tool, then answer with what it said."""
    *_, last = body["messages"]
    if last["role"] == "tool":
        return says(f"<answer>{last['content']}</answer>")
    expression = re.search(r"[-0-9(][-+*/(). 0-9]*[0-9)]", last["content"]).group()
    return calls("calculate", expression=expression)


@pytest.mark.slow
async def test_sft_learns_synthesized_tool_calls(synthesize):
    from prime_rl.trainer.data.local_files import read_rows
    from prime_rl.trainer.data.sft_dataset import encode_row

    async with fake_chat() as server:
        server.reply = solve
        path = await synthesize(server.url, CALCULATOR, rollouts_per_example=2, min_reward=1.0)
    options = SFTDataConfig(name=[str(path)], seq_len=4096)
    rows = list(read_rows(path))
    examples = [example for _, example in rows]
    assert len(examples) == 6
    assert {(example["env"], example["reward"]) for example in examples} == {("calculator", 1.0)}
    tokenizer = make_tokenizer()
    for where, example in rows:
        roles = [message["role"] for message in example["messages"]]
        assert roles == ["system", "user", "assistant", "tool", "assistant"]
        call = example["messages"][2]["tool_calls"][0]
        assert call["id"] == example["messages"][3]["tool_call_id"] == "call_abc"
        (sequence,) = encode_row((where, example), tokenizer, options)
        text, taught = tokenizer.decode(sequence.tokens), learned(sequence, tokenizer)
        assert f'{{"name": "calculate", "arguments": {json.dumps(call["function"]["arguments"])}}}' in taught
        assert example["messages"][4]["content"] in taught
        result = example["messages"][3]["content"]
        assert f"<tool_response>{result}</tool_response>" in text
        assert "tool_response" not in taught, "what the tool says is not learned"
        assert '"name": "calculate", "description"' in text, "the model sees the tools that it had"


@pytest.mark.slow
async def test_failed_groups_are_dropped_and_an_interrupted_synthesis_resumes(synthesize):
    async with fake_chat() as server:
        server.reply = lambda body: says(body["messages"][-1]["content"][::-1])
        env = {**REVERSE, "args": {"words": 3}}
        path = await synthesize(server.url, env, rollouts_per_example=2, num_examples=2)
        before = [json.loads(line) for line in path.read_text().splitlines()]
        asked = {body["messages"][-1]["content"] for body in server.requests}
        server.requests.clear()

        server.fault = lambda body: (
            None if body["messages"][-1]["content"] in asked else web.json_response({"error": "no"}, status=422)
        )
        await synthesize(server.url, env, rollouts_per_example=2)
        assert len(server.requests) <= 2, "only the third word is asked for"
        assert [json.loads(line) for line in path.read_text().splitlines()] == before, "its group failed: no sample"

        server.fault = None
        await synthesize(server.url, env, rollouts_per_example=2)
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert sorted(line["example"] for line in lines) == [0, 0, 1, 1, 2, 2]


@pytest.mark.slow
async def test_own_server_returns_conversations(synthesize):
    async with fake_engine() as engine:
        engine.reply = lambda body: ([75, 104, 2], "stop")
        path = await synthesize(engine.url, REVERSE)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 8
    assert [message["role"] for message in lines[0]["messages"]] == ["user", "assistant"]
    assert "tools" not in lines[0]


@pytest.mark.slow
async def test_no_remaining_sample_raises(synthesize):
    async with fake_chat() as server:
        with pytest.raises(RunError, match="no sample is left; all were filtered out"):
            await synthesize(server.url, REVERSE, min_reward=1.0)


def test_write_samples_filters_by_reward_and_truncation(tmp_path):
    def rollout(reward, truncated=False):
        return RolloutRow(reward, {}, truncated, 3, [{"role": "assistant", "content": str(reward)}])

    rows = [
        ExampleRow(0, [rollout(1.0), rollout(0.4)]),
        ExampleRow(1, failure=ExampleFailure("environment", "KeyError")),
        ExampleRow(2, [rollout(0.9, truncated=True), rollout(0.5)]),
    ]
    path = tmp_path / "samples.jsonl"
    counts = write_samples(path, {"a": rows}, min_reward=0.5, keep_truncated=False)
    assert [json.loads(line)["reward"] for line in path.read_text().splitlines()] == [1.0, 0.5]
    assert counts == {"a": {"kept": 2, "truncated": 1, "low": 1}}
    write_samples(path, {"a": rows}, min_reward=None, keep_truncated=True)
    assert [json.loads(line)["reward"] for line in path.read_text().splitlines()] == [1.0, 0.4, 0.9, 0.5]
