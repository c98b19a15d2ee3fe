"""Rollouts over any OpenAI-compatible server: what is sent, what is understood, and what ends a rollout."""

import json
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from prime_rl.configs.environment import EnvConfig
from prime_rl.core.types import Conversation
from prime_rl.evaluation.eval_results import RolloutRow
from prime_rl.rollouts.clients import openai_chat_client
from prime_rl.rollouts.clients.inference_client import InferenceError, InferenceServerLost
from prime_rl.rollouts.clients.openai_chat_client import ChatServer, PromptTooLong
from prime_rl.rollouts.recorder import Recorder
from prime_rl.rollouts.workers import worker_main
from prime_rl.rollouts.workers.protocol import GroupFinished, decode_report, frame
from tests.support.fake_chat import calls, fake_chat, says
from tests.unit.rollouts.conftest import ending_server

TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}
ASK = [{"role": "user", "content": "2 + 2?"}]


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """A busy server is asked again at once."""
    monkeypatch.setattr(openai_chat_client, "_MAX_PAUSE_SECONDS", 0.0)


@asynccontextmanager
async def chat_server():
    async with fake_chat() as fake, ChatServer(f"{fake.url}/v1", "m", "secret") as server:
        yield fake, server


async def test_recorder_sends_and_receives_tool_calls():
    async with chat_server() as (fake, server):
        fake.reply = lambda body: calls("add", call_id="call_9", a=2, b=2) | {"stop_reason": 7}
        recorder = Recorder(server, seed=[3])
        reply = await recorder.ask(ASK, [TOOL], {"temperature": 0.5, "top_p": 1.0, "top_k": -1, "max_tokens": 9})
        assert (reply.parsed.calls[0].name, json.loads(reply.parsed.calls[0].arguments)) == ("add", {"a": 2, "b": 2})
        assert (reply.call_ids, reply.finish_reason) == (("call_9",), "tool_calls")
        fake.reply = lambda body: says("4", "length", reasoning_content="2 and 2") | {"stop_reason": "END"}
        history = [
            *ASK,
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": "I add",
                "tool_calls": [{"id": "call_9", "name": "add", "arguments": '{"a": 2, "b": 2}'}],
            },
            {"role": "tool", "content": "4", "tool_call_id": "call_9"},
        ]
        second = await recorder.ask(history, [TOOL], {"temperature": 0.5})
        assert (second.parsed.content, second.parsed.reasoning, second.is_truncated) == ("4", "2 and 2", True)
        assert (reply.stop, second.stop) == (None, "END")

    first, last = fake.requests
    assert {key: first[key] for key in ("model", "messages", "temperature", "max_tokens")} == {
        "model": "m", "messages": ASK, "temperature": 0.5, "max_tokens": 9,
    }  # fmt: skip
    assert first["tools"] == [TOOL]
    assert not {"top_p", "top_k", "min_p"} & first.keys(), "strict servers refuse keys that they do not know"
    assert first["seed"] != last["seed"]
    call = last["messages"][1]["tool_calls"][0]
    assert json.loads(call["function"]["arguments"]) == {"a": 2, "b": 2}
    assert "reasoning_content" not in last["messages"][1]
    assert fake.keys == ["Bearer secret"] * 2
    assert recorder.rollout(dict.fromkeys(recorder.replies, True), [], 0.0, {}, False).samples == ()
    assert [(reply.completion_tokens, reply.tools) for reply in recorder.replies] == [(3, [TOOL])] * 2


@pytest.mark.parametrize(("answer", "text"), [('"caf\\ud83d"', "caf?"), ('"\\ud83d\\ude00"', "\U0001f600")])
async def test_chat_server_response_with_half_a_surrogate_pair_is_read(answer, text):
    async with chat_server() as (fake, server):
        body = f'{{"choices": [{{"message": {{"content": {answer}}}}}]}}'
        fake.fault = lambda _: web.Response(text=body, content_type="application/json")
        assert (await Recorder(server).ask(ASK, None, {})).parsed.content == text


async def test_own_server_reports_versions():
    """A rollout was sampled between the oldest and the newest version of its turns; it may not be known of one."""

    def answer(*versions):
        names = ("X-Policy-Version", "X-Policy-Version-End")
        body = {"choices": [says("42")], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}
        return web.json_response(body, headers=dict(zip(names, versions, strict=False)))

    def rollout(recorder):
        trained = dict.fromkeys(recorder.replies, True)
        made = recorder.rollout(trained, ASK, 1.0, {}, False)
        report = decode_report(bytes(frame(GroupFinished(1, [], [made]))[4:]))
        [received] = report.conversations
        return received

    async with chat_server() as (fake, server):
        recorder = Recorder(server)
        for versions in (("0.4", "0.5"), ("0.3", "0.4")):
            fake.fault = lambda _, versions=versions: answer(*versions)
            await recorder.ask(ASK, None, {})
        row = RolloutRow.of(rollout(recorder))
        assert (rollout(recorder).versions, row.min_version, row.max_version) == ((3, 5), 3, 5)
        for versions in ((), ("latest", "0.4")):
            fake.fault = lambda _, versions=versions: answer(*versions)
            await recorder.ask(ASK, None, {})
            assert rollout(recorder).versions is None


async def test_group_is_pinned_on_our_own_server():
    async with chat_server() as (fake, server):
        fake.pins, fake.lacks_slot = [], True
        async with server.pinned() as same:
            assert same is server
        fake.lacks_slot = False
        async with server.pinned() as one, server.pinned() as other:
            assert len(fake.pins) == 2
            await Recorder(one).ask(ASK, None, {})
            await Recorder(other).ask(ASK, None, {})
        assert fake.pins == []
        await Recorder(server).ask(ASK, None, {})
        assert len({*fake.named}) == 3 and fake.named[-1] is None
        with pytest.raises(ZeroDivisionError):
            async with server.pinned():
                raise ZeroDivisionError
        assert fake.pins == [], "given back, however it ends"


async def test_other_server_gets_one_pin_request():
    async with chat_server() as (fake, server):
        for _ in range(2):
            async with server.pinned() as same:
                assert same is server
                await Recorder(same).ask(ASK, None, {})
        assert (fake.asked_for_pins, fake.named) == (1, [None, None])
    async with server, server.pinned() as same:
        assert same is server, "it is gone: the rollout will see that"


@pytest.mark.parametrize("status", [429, 503])
async def test_busy_server_is_retried(status):
    async with chat_server() as (fake, server):
        fake.fault = lambda body: web.Response(status=status) if len(fake.requests) < 4 else None
        assert (await Recorder(server).ask(ASK, None, {})).parsed.content == "42"
        assert len(fake.requests) == 4
        fake.fault = lambda body: web.json_response({"error": {"message": "come back\nlater"}}, status=status)
        recorder = Recorder(server)
        with pytest.raises(InferenceError, match=f"returned {status}: come back later"):
            await recorder.ask(ASK, None, {})
        assert isinstance(recorder.server_error, InferenceError)


@pytest.mark.parametrize(
    ("status", "body", "error", "words"),
    [
        (401, {"error": {"message": "wrong key"}}, InferenceError, "401: wrong key"),
        (404, {"detail": "no such model"}, InferenceError, "404"),
        (400, {"error": {"message": "This model's maximum context length is 9 tokens"}}, PromptTooLong,
         "context length"),
        (400, {"error": {"message": "bad", "code": "x"}}, InferenceError, "400: bad"),
        (200, {"choices": []}, InferenceError, "invalid response"),
        (200, "nonsense", InferenceError, "invalid response"),
    ],
)  # fmt: skip
async def test_refused_request_raises(status, body, error, words):
    async with chat_server() as (fake, server):
        fake.fault = lambda _: web.json_response(body, status=status)
        recorder = Recorder(server)
        with pytest.raises(error, match=words):
            await recorder.ask(ASK, None, {})
        assert len(fake.requests) == 1, "it is not asked again"
        assert recorder.prompt_too_long == (error is PromptTooLong)
        assert (recorder.server_error is None) == (error is PromptTooLong)


async def test_unreachable_server_raises_server_lost():
    async with ChatServer("http://127.0.0.1:9/v1", "m") as server:
        recorder = Recorder(server)
        with pytest.raises(InferenceServerLost, match="cannot be reached"):
            await recorder.ask(ASK, None, {})
        assert isinstance(recorder.server_error, InferenceServerLost)


async def test_v1_taskset_runs_without_a_tokenizer(installed):
    environment = worker_main.load(EnvConfig(id="toy_taskset"), None, "eval")
    async with chat_server() as (fake, server):
        fake.reply = lambda body: says("it is 3")
        async with ending_server(environment):
            rollouts = await environment.run_group(3, 2, server, {"temperature": 1.0}, 8)
    for rollout in rollouts:
        assert isinstance(rollout, Conversation)
        assert (rollout.reward, rollout.samples, rollout.sampled_tokens) == (2.0, (), 3)
        assert rollout.messages[-1] == {"role": "assistant", "content": "it is 3"}
