"""Rollouts over any OpenAI-compatible server: what is sent, what is understood, and what ends a rollout."""

import json
from pathlib import Path

import pytest
from aiohttp import web

from prime_rl.configs.shared import EnvConfig
from prime_rl.orchestrator.engine import EngineError, EngineLost
from prime_rl.orchestrator.evals.rows import RolloutRow
from prime_rl.orchestrator.workers import adapters, chat
from prime_rl.orchestrator.workers.chat import ChatRecorder, ChatServer
from prime_rl.orchestrator.workers.conversation import Conversation
from prime_rl.orchestrator.workers.protocol import Played
from prime_rl.orchestrator.workers.recorder import PromptTooLong
from prime_rl.orchestrator.workers.recording import Recording
from tests.support.fake_chat import calls, fake_chat, says

TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}
ASK = [{"role": "user", "content": "2 + 2?"}]


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """A busy server is asked again at once."""
    monkeypatch.setattr(chat, "_LONGEST_PAUSE_S", 0.0)


async def test_a_turn_with_a_tool_call_goes_there_and_back():
    async with fake_chat() as fake, ChatServer(f"{fake.url}/v1", "m", "secret") as server:
        fake.reply = lambda body: calls("add", call_id="call_9", a=2, b=2)
        recorder = ChatRecorder(server, seed=[3])
        reply = await recorder.ask(ASK, [TOOL], {"temperature": 0.5, "top_p": 1.0, "top_k": -1, "max_tokens": 9})
        assert (reply.parsed.calls[0].name, json.loads(reply.parsed.calls[0].arguments)) == ("add", {"a": 2, "b": 2})
        assert (reply.call_ids, reply.finish_reason) == (("call_9",), "tool_calls")
        fake.reply = lambda body: says("4", reasoning_content="2 and 2")
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
        assert (second.parsed.content, second.parsed.reasoning, second.finish_reason) == ("4", "2 and 2", "stop")

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
    assert (recorder.samples(), recorder.completion_tokens, recorder.tools) == ((), 6, [TOOL])


async def test_a_cut_completion_is_truncated():
    async with fake_chat() as fake, ChatServer(f"{fake.url}/v1", "m") as server:
        fake.reply = lambda body: says("4", "length")
        recorder = ChatRecorder(server)
        assert (await recorder.ask(ASK, None, {})).is_truncated
        assert recorder.is_truncated
    assert "seed" not in fake.requests[0]


async def test_our_own_server_tells_the_versions():
    """A rollout was sampled between the oldest and the newest version of its turns; it may not be known of one."""

    def answer(*versions):
        names = ("X-Policy-Version", "X-Policy-Version-End")
        body = {"choices": [says("42")], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}
        return web.json_response(body, headers=dict(zip(names, versions, strict=False)))

    async with fake_chat() as fake, ChatServer(f"{fake.url}/v1", "m") as server:
        recorder = ChatRecorder(server)
        assert recorder.versions is None
        for versions in (("0.4", "0.5"), ("0.3", "0.4")):
            fake.fault = lambda _, versions=versions: answer(*versions)
            await recorder.ask(ASK, None, {})
        assert recorder.versions == (3, 5)
        [rollout] = Played.pack(
            1, [Recording(None, keep_messages=True).rollout(recorder, ASK, 1.0, {}, False)]
        ).unpack()
        assert (RolloutRow.of(rollout).min_version, RolloutRow.of(rollout).max_version) == (3, 5)
        for versions in ((), ("latest", "0.4")):
            fake.fault = lambda _, versions=versions: answer(*versions)
            await recorder.ask(ASK, None, {})
            assert recorder.versions is None


async def test_a_group_is_pinned_on_our_own_server_and_names_its_pin():
    async with fake_chat() as fake, ChatServer(f"{fake.url}/v1", "m", "secret") as server:
        fake.pins = []
        async with server.pinned() as one, server.pinned() as other:
            assert fake.pins == ["pin 0", "pin 1"]
            await ChatRecorder(one).ask(ASK, None, {})
            await ChatRecorder(other).ask(ASK, None, {})
        assert fake.pins == []
        await ChatRecorder(server).ask(ASK, None, {})
        assert fake.named == ["pin 0", "pin 1", None]
        with pytest.raises(ZeroDivisionError):
            async with server.pinned():
                raise ZeroDivisionError
        assert fake.pins == [], "given back, however it ends"


async def test_another_server_is_asked_for_a_pin_once():
    async with fake_chat() as fake, ChatServer(f"{fake.url}/v1", "m") as server:
        for _ in range(2):
            async with server.pinned() as same:
                assert same is server
                await ChatRecorder(same).ask(ASK, None, {})
        assert (fake.asked_for_pins, fake.named) == (1, [None, None])
    async with server, server.pinned() as same:
        assert same is server, "it is gone: the rollout will see that"


@pytest.mark.parametrize("status", [429, 503])
async def test_a_busy_server_is_asked_again(status):
    async with fake_chat() as fake, ChatServer(f"{fake.url}/v1", "m") as server:
        fake.fault = lambda body: web.Response(status=status) if len(fake.requests) < 4 else None
        assert (await ChatRecorder(server).ask(ASK, None, {})).parsed.content == "42"
        assert len(fake.requests) == 4
        fake.fault = lambda body: web.json_response({"error": {"message": "come back\nlater"}}, status=status)
        recorder = ChatRecorder(server)
        with pytest.raises(EngineError, match=f"answered {status}: come back later"):
            await recorder.ask(ASK, None, {})
        assert isinstance(recorder.lost, EngineError)


@pytest.mark.parametrize(
    ("status", "body", "error", "words"),
    [
        (401, {"error": {"message": "wrong key"}}, EngineError, "401: wrong key"),
        (404, {"detail": "no such model"}, EngineError, "404"),
        (
            400,
            {"error": {"message": "This model's maximum context length is 9 tokens"}},
            PromptTooLong,
            "context length",
        ),
        (400, {"error": {"message": "bad", "code": "x"}}, EngineError, "400: bad"),
        (200, {"choices": []}, EngineError, "not understood"),
        (200, "nonsense", EngineError, "not understood"),
    ],
)
async def test_what_a_server_refuses(status, body, error, words):
    async with fake_chat() as fake, ChatServer(f"{fake.url}/v1", "m") as server:
        fake.fault = lambda _: web.json_response(body, status=status)
        recorder = ChatRecorder(server)
        with pytest.raises(error, match=words):
            await recorder.ask(ASK, None, {})
        assert len(fake.requests) == 1, "it is not asked again"
        assert (recorder.overlong, recorder.is_truncated) == (error is PromptTooLong,) * 2
        assert (recorder.lost is None) == (error is PromptTooLong)


async def test_a_server_that_is_gone_is_lost():
    async with fake_chat() as fake:
        url = fake.url
    async with ChatServer(f"{url}/v1", "m") as server:
        recorder = ChatRecorder(server)
        with pytest.raises(EngineLost, match="cannot be reached"):
            await recorder.ask(ASK, None, {})
        assert isinstance(recorder.lost, EngineLost)


async def test_a_v1_taskset_is_played_without_a_tokenizer(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "support/packages"))
    environment = adapters.load(EnvConfig(id="toy_taskset"), None, "eval")
    async with fake_chat() as fake, ChatServer(f"{fake.url}/v1", "m") as server:
        fake.reply = lambda body: says("it is 3")
        try:
            rollouts = await environment.run_group(3, 2, server, {"temperature": 1.0}, 8)
        finally:
            await environment.close()
    for rollout in rollouts:
        assert isinstance(rollout, Conversation)
        assert (rollout.reward, rollout.samples, rollout.sampled_tokens) == (2.0, (), 3)
        assert rollout.messages[-1] == {"role": "assistant", "content": "it is 3"}
