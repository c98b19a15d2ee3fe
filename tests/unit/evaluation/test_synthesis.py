"""`synthesize`: what a model said, tool calls included, becomes what `sft` learns."""

import json
import re

import msgspec
import pytest
from aiohttp import web

from prime_rl.configs.synthesize import SynthesizeConfig
from prime_rl.configs.training.sft_data import SFTDataConfig
from prime_rl.core.errors import ConfigError, RunError
from prime_rl.evaluation.eval_results import ExampleFailure, ExampleRow, RolloutRow
from prime_rl.evaluation.synthesis import Trace, write_samples
from prime_rl.evaluation.synthesis import synthesize as run_synthesize
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


@pytest.mark.extended
@pytest.mark.slow
async def test_sft_learns_synthesized_tool_calls(synthesize):
    from prime_rl.trainer.data.chat_rendering import ExampleEncoder
    from prime_rl.trainer.data.sft_dataset import encode_row
    from prime_rl.trainer.data.training_files import read_rows

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
        (sequence,) = encode_row((where, example), ExampleEncoder(tokenizer, options), options.seq_len)
        text, taught = tokenizer.decode(sequence.tokens), learned(sequence, tokenizer)
        assert f'{{"name": "calculate", "arguments": {json.dumps(call["function"]["arguments"])}}}' in taught
        assert example["messages"][4]["content"] in taught
        result = example["messages"][3]["content"]
        assert f"<tool_response>{result}</tool_response>" in text
        assert "tool_response" not in taught, "what the tool says is not learned"
        assert '"name": "calculate", "description"' in text, "the model sees the tools that it had"


@pytest.mark.extended
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
async def test_own_server_returns_conversations_and_raises_without_a_remaining_one(synthesize):
    async with fake_engine() as engine:
        engine.reply = lambda body: ([75, 104, 2], "stop")
        path = await synthesize(engine.url, REVERSE)
        with pytest.raises(RunError, match="no sample is left; all were filtered out"):
            await synthesize(engine.url, REVERSE, min_reward=1.0)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 8
    assert [message["role"] for message in lines[0]["messages"]] == ["user", "assistant"]
    assert "tools" not in lines[0]


def test_write_samples_filters_by_reward_and_truncation(tmp_path):
    def rollout(example, reward, truncated=False):
        return Trace("a", example, reward, truncated, [{"role": "assistant", "content": str(reward)}])

    traces = [rollout(0, 1.0), rollout(0, 0.4), ("a", "failed example"), rollout(2, 0.9, True), rollout(2, 0.5)]
    path = tmp_path / "samples.jsonl"
    counts = write_samples(path, traces, min_reward=0.5)
    assert [json.loads(line)["reward"] for line in path.read_text().splitlines()] == [1.0, 0.5]
    assert counts == {"a": {"kept": 2, "truncated": 1, "reward too low": 1, "failed example": 1}}
    write_samples(path, traces, keep_truncated=True)
    assert [json.loads(line)["reward"] for line in path.read_text().splitlines()] == [1.0, 0.4, 0.9, 0.5]
    assert write_samples(path, traces, min_reward=2.0, keep_truncated=True)["a"]["kept"] == 0
    assert len(path.read_text().splitlines()) == 4 and [*tmp_path.iterdir()] == [path], "the earlier samples stay"


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {"a": [1, {"b": "\u00e9"}]}}}


def says_row(example, prompt, reply, reward, **fields):
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": reply}]
    return {"env": "a", "example": example, "reward": reward, "is_truncated": False, "messages": messages, **fields}


def write_rows(folder, step, *rows):
    folder.mkdir(parents=True, exist_ok=True)
    text = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / f"step_{step}.jsonl").write_text("\n".join(text) + "\n")


def selected(tmp_path, *argv):
    path = run_synthesize(SynthesizeConfig.load([*argv, "--output-dir", str(tmp_path / "out")]))
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_from_keeps_the_best_finished_rollouts_with_exact_messages_and_tools(tmp_path, said):
    turns = [
        {"role": "user", "content": "1+?"}, {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "tool_call_id": "call00000"}, {"role": "assistant", "content": "2"},
        {"role": "user", "content": "sure?"}, {"role": "assistant", "content": "yes", "reasoning_content": "1 + 1"},
    ]  # fmt: skip
    tool_row = says_row(7, "", "", 1.0) | {"messages": turns, "tools": TOOLS}
    run = tmp_path / "run"
    write_rows(
        run / "samples", 10, says_row(0, "p", "later", 0.95), says_row(0, "p", "later", 0.95), "{damaged",
        says_row(1, "p", "later", 1.0), says_row(2, "q", "x", float("nan")), {"env": "a", "reward": "high"},
        says_row(5, "p", "x", 1.0) | {"messages": [{"role": ["user"], "content": "a"}]},
    )  # fmt: skip
    write_rows(
        run / "samples", 9, says_row(0, "p", "good", 0.95), says_row(0, "p", "best", 1.5, is_truncated=True),
        says_row(0, "p", "bad", 0.5), tool_row, says_row(3, "p", "agents", 1.0) | {"messages": [
            {"role": "user (one)", "content": "a"}, {"role": "assistant (two)", "content": "b"}]},
        says_row(4, "p", "old", 1.0) | {"messages": [
            {"role": "user", "content": "a"}, {"role": "assistant", "content": 'add({"a": 1})'},
            {"role": "tool", "content": "2"}, {"role": "assistant", "content": "2"}]},
    )  # fmt: skip
    write_rows(run / "evals/held_out", 9, {"example": 0, "rollouts": []})
    samples = selected(tmp_path, "--from", str(run), "--min-reward", "0.9")
    assert [(sample["example"], sample["messages"][-1]["content"]) for sample in samples] == [(0, "later"), (7, "yes")]
    assert samples[1]["messages"] == turns and samples[1]["tools"] == TOOLS and "tools" not in samples[0]
    (counts,) = [line for line in said() if line.startswith("a: ")]
    assert counts.startswith("a: 11 read, 2 kept; not kept: 2 duplicate, ")
    reasons = ("truncated", "reward too low", "several agents", "calls not recorded", "not among the best")
    assert all(f"1 {reason}" in counts for reason in reasons) and "2 damaged line" in counts
    assert any("step_10.jsonl: 2 read, 0 kept; not kept: 2 damaged line" in line for line in said())
    both = selected(tmp_path, "--from", str(run), "--min-reward", "0.9", "--max-per-example", "2")
    assert [sample["messages"][-1]["content"] for sample in both if sample["example"] == 0] == ["later", "good"]


def test_from_reads_several_runs_and_evaluations(tmp_path):
    long = "x" * 5 * 2**20
    for run, reward in (("run_a", 0.5), ("run_b", 0.75)):
        write_rows(
            tmp_path / "several" / run / "samples", 0, says_row(0, "p", run, reward), says_row(1, run, long, 1.0)
        )
    samples = selected(tmp_path, "--from", str(tmp_path / "several"))
    assert sorted(sample["messages"][-1]["content"] for sample in samples) == ["run_b", long, long]

    evaluation = tmp_path / "eval" / "evals" / "gsm8k" / "0123456789ab"
    evaluation.mkdir(parents=True)
    rollout = RolloutRow(1.0, {}, False, 3, says_row(0, "p", "evaluated", 1.0)["messages"])
    rows = [ExampleRow(0, failure=ExampleFailure("environment", "KeyError")), ExampleRow(0, [rollout])]
    (evaluation / "rollouts.jsonl").write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    for source in (tmp_path / "eval", evaluation):
        (sample,) = selected(tmp_path, "--from", str(source))
        assert (sample["env"], sample["messages"][1]["content"]) == ("gsm8k", "evaluated")
    paths = f"{tmp_path / 'several'},{tmp_path / 'eval'}"
    assert len(selected(tmp_path, "--from", paths)) == 4


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("missing", r"from = .*missing does not exist; name the output_dir"),
        ("empty", r"from = .*empty has no samples/step_N.jsonl of a run"),
        ("low", r"all were filtered out \(1 reward too low\); lower min_reward"),
    ],
)
def test_from_nothing_to_write_is_one_line(tmp_path, folder, message):
    (tmp_path / "empty").mkdir()
    write_rows(tmp_path / "low/samples", 0, says_row(0, "p", "x", 0.5))
    with pytest.raises((ConfigError, RunError), match=message):
        selected(tmp_path, "--from", str(tmp_path / folder), "--min-reward", "0.9")
    assert not (tmp_path / "out/synthesis/samples.jsonl").exists()
