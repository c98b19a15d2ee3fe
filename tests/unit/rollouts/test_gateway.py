"""Agents that run elsewhere take rollouts from a `gateway`, use the model through it, and report rewards."""

import asyncio
import gzip
import json
import re
import subprocess
import sys
import urllib.request
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from prime_rl.configs.environment import EnvConfig
from prime_rl.core.errors import ConfigError
from prime_rl.core.ports import listen
from prime_rl.entrypoints.gateway import Gateway, main
from prime_rl.rollouts import agent_function, group_attempts
from prime_rl.rollouts.agent_function import check_gateway
from prime_rl.rollouts.clients.inference_client import InferenceError
from prime_rl.rollouts.group_attempts import EnvironmentFailed
from prime_rl.rollouts.rendering.renderer import Renderer
from prime_rl.rollouts.separate import interception
from prime_rl.rollouts.verifiers.episodes import EpisodeCalls
from prime_rl.rollouts.workers import worker_main
from tests.support.server import free_port
from tests.unit.rollouts.conftest import QUESTIONS, TOKENIZER, encode, served

KEY = "a-key"


@asynccontextmanager
async def gateway(port=0, key=None):
    """Serve in this event loop; yield the address."""
    runner = web.AppRunner(Gateway(key).make_app(), handler_cancellation=True, shutdown_timeout=0.01)
    with listen("127.0.0.1", port, "--port") as listener:
        await runner.setup()
        await web.SockSite(runner, listener).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        await runner.cleanup()


@pytest.fixture
async def url():
    async with gateway() as address:
        yield address


class Elsewhere:
    """An agent's side."""

    def __init__(self, url, session, key=None):
        self.url, self.session = url, session
        self.headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    async def send(self, method, url, body=None, headers=None):
        async with self.session.request(method, url, json=body, headers=headers or self.headers) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if text else None

    async def take(self):
        status, rollout = await self.send("POST", f"{self.url}/rollouts")
        assert status == 200
        return rollout

    async def ask(self, rollout, **changes):
        body = {"model": rollout["model"], "messages": rollout["messages"]} | changes
        headers = {"Authorization": f"Bearer {rollout['api_key']}"}
        return await self.send("POST", f"{rollout['base_url']}/chat/completions", body, headers)

    async def finish(self, group):
        """Take a rollout, ask once and report 1; return the reward of the group."""
        rollout = await self.take()
        await self.ask(rollout)
        await self.report(rollout, reward=1)
        return (await group)[0].reward

    async def report(self, rollout, kind="reward", key=None, **body):
        headers = {"Authorization": f"Bearer {key or rollout['api_key']}"}
        return await self.send("POST", f"{self.url}/rollouts/{rollout['id']}/{kind}", body, headers)


@asynccontextmanager
async def running(url, tmp_path, key=None, warn=None, reply=lambda body: (encode("It is 5."), "stop"), **keys):
    """Yield an agent, and what starts a group of rollouts of the first row."""
    (tmp_path / "rows.csv").write_text(QUESTIONS)
    args = {"data_path": str(tmp_path / "rows.csv"), "grader": "none"}
    config = EnvConfig(**{"id": "dataset", "args": args, "gateway": url, "num_retries": 0} | keys)
    environment = await asyncio.to_thread(worker_main.load, config, Renderer(TOKENIZER), "train", warn=warn)
    connector = aiohttp.TCPConnector(force_close=True)
    async with (
        served(environment, reply) as (_, engine),
        aiohttp.ClientSession(connector=connector) as session,
    ):

        def start(count=1):
            return asyncio.ensure_future(environment.run_group(0, count, engine, {"max_tokens": 50}, 4096))

        yield Elsewhere(url, session, key), start


def test_the_command_serves_until_it_is_ended():
    command = [sys.executable, "-m", "prime_rl.entrypoints.gateway", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            address = process.stdout.readline().split()[-1]
            assert urllib.request.urlopen(f"{address}/health").read() == b"ok"
        finally:
            process.terminate()
    assert process.returncode == 0


@pytest.mark.extended(after=1)
@pytest.mark.parametrize("interpreter", [None, sys.executable])
async def test_each_rollout_is_taken_once_and_gets_its_tokens_and_its_reward(url, tmp_path, interpreter):
    async with running(url, tmp_path, interpreter=interpreter) as (agent, start):
        group = start(3)
        for reward in (0.0, 0.5, 1.0):
            rollout = await agent.take()
            assert rollout["prompt"] == "What is 2 + 3?" and rollout["task"]["answer"] == "5"
            status, reply = await agent.ask(rollout)
            assert (status, reply["choices"][0]["message"]["content"]) == (200, "It is 5.")
            assert await agent.report(rollout, reward=reward, metrics={"steps": 2}) == (200, {"status": "ok"})
            assert (await agent.report(rollout, reward=reward, metrics={"steps": 2}))[0] == 200, "again"
            assert (await agent.report(rollout, reward=reward + 1))[0] == 409
        rollouts = await group
        assert await agent.send("GET", f"{url}/rollouts") == (200, {"waiting": 0, "taken": 0})
    assert sorted(rollout.reward for rollout in rollouts) == [0.0, 0.5, 1.0]
    for rollout in rollouts:
        (sample,) = rollout.samples
        assert sample.tokens[sample.loss_mask].tolist() == encode("It is 5.")
        assert rollout.metrics["steps"] == 2.0


async def test_a_stream_passes_through_as_events(url, tmp_path):
    async with running(url, tmp_path) as (agent, start):
        group = start()
        rollout = await agent.take()
        headers = {"x-api-key": rollout["api_key"], "anthropic-version": "2023-06-01"}
        body = {"model": "m", "max_tokens": 50, "messages": rollout["messages"], "stream": True}
        async with agent.session.post(f"{rollout['base_url']}/messages", json=body, headers=headers) as answer:
            assert answer.headers["Content-Type"].startswith("text/event-stream")
            lines = (await answer.text()).splitlines()
        await agent.report(rollout, reward=1)
        await group
    events = [line.split()[1] for line in lines if line.startswith("event:")]
    assert (events[0], events[-1]) == ("message_start", "message_stop")


LOOK = {"name": "look", "description": None}
LONG = [{"role": "user", "content": "x" * 5000}]
FULL = {"type": "invalid_request_error", "code": "context_length_exceeded"}
FUNCTION = {"type": "function", "function": LOOK | {"parameters": None}}
ASKED = [
    ("chat/completions", {"n": None, "tools": [FUNCTION]}, 200, {"object": "chat.completion"}),
    ("messages", {"tools": [LOOK | {"input_schema": {"type": "object"}}]}, 200, {"stop_reason": "end_turn"}),
    ("messages", {"stop_sequences": ["x", "5"]}, 200, {"stop_reason": "stop_sequence", "stop_sequence": "5"}),
    ("chat/completions", {"messages": LONG}, 400, FULL),
    ("messages", {"messages": LONG}, 400, FULL),
    ("responses", {"input": LONG}, 400, FULL),
    ("models", {}, 404, {"type": "not_found_error"}),
]


async def test_agents_are_answered_as_by_the_vendors(url, tmp_path):
    async with running(url, tmp_path) as (agent, start):
        group = start()
        rollout = await agent.take()
        headers = {"Authorization": f"Bearer {rollout['api_key']}"}
        for path, body, status, expected in ASKED:
            body = (
                {"model": "m", "max_tokens": 50}
                | ({} if path == "responses" else {"messages": rollout["messages"]})
                | body
            )
            got, answer = await agent.send("POST", f"{rollout['base_url']}/{path}", body, headers)
            assert got == status and (answer if got == 200 else answer["error"]).items() >= expected.items(), answer
            if expected is FULL:  # the phrases by which agents recognise it, and begin a summary
                assert re.search(
                    "model's maximum context length is .*prompt is too long: 5[0-9]+ tokens > 4096 maximum",
                    answer["error"]["message"],
                )
        await agent.report(rollout, reward=1)
        (found,) = await group
    assert found.metrics["num_turns"] == 3


@pytest.mark.parametrize(
    ("path", "kinds"),
    [
        ("chat/completions", ["error"]),
        ("messages", ["error"]),
        ("responses", ["response.created", "response.failed"]),
    ],
)
async def test_a_stream_that_fails_ends_with_the_error_and_is_no_turn(url, tmp_path, monkeypatch, path, kinds):
    async def late(*call, ask=EpisodeCalls.ask):
        await asyncio.sleep(0.05)
        return await ask(*call)

    monkeypatch.setattr(EpisodeCalls, "ask", late)
    monkeypatch.setattr(interception, "_HEADERS_SECONDS", 0.01)
    async with running(url, tmp_path) as (agent, start):
        group = start()
        rollout = await agent.take()
        await agent.ask(rollout)
        headers = {"Authorization": f"Bearer {rollout['api_key']}"}
        events = []
        body = {"model": "m", "max_tokens": 50, "stream": True, ("input" if path == "responses" else "messages"): LONG}
        async with agent.session.post(f"{rollout['base_url']}/{path}", json=body, headers=headers) as answer:
            with suppress(aiohttp.ClientPayloadError):
                async for line in answer.content:
                    events += [json.loads(line[6:])] if line.startswith(b"data: ") else []
        assert [event["type"] for event in events] == kinds
        error = events[-1].get("response", events[-1])["error"]
        assert error["code"] == FULL["code"] and "prompt is too long" in error["message"]
        await agent.report(rollout, reward=1)
        (found,) = await group
    assert found.text == (("user", "What is 2 + 3?"), ("assistant", "It is 5."))


async def test_the_agent_of_the_page_works(url, tmp_path):
    page = (Path(__file__).parents[3] / "docs/agents.md").read_text()
    (program,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "run_one" in block]
    async with running(url, tmp_path) as (_, start):
        names = {}
        exec(program.replace("http://127.0.0.1:8700", url), names)
        group = start()
        await asyncio.to_thread(names["run_one"])
        assert (await group)[0].reward == 1.0


async def test_what_ends_a_rollout_without_a_reward(url, tmp_path):
    async with running(url, tmp_path) as (agent, start):
        group = start()
        rollout = await agent.take()
        await agent.ask(rollout)
        assert (await agent.report(rollout, "failure", message="no disk"))[0] == 200
        with pytest.raises(EnvironmentFailed, match="no disk"):
            await group
        group = start()
        rollout = await agent.take()
        assert (await agent.report(rollout, reward=1))[0] == 200
        with pytest.raises(EnvironmentFailed, match="called no model"):
            await group
        group = start()
        rollout = await agent.take()
        group.cancel()
        await asyncio.wait([group])
        while (await agent.send("GET", f"{url}/rollouts"))[1]["taken"]:
            await asyncio.sleep(0.01)
        assert (await agent.ask(rollout))[0] == 410
        assert (await agent.report(rollout, reward=1))[0] == 410


async def test_a_rollout_whose_agent_left_before_it_got_it_goes_to_the_next(url, tmp_path):
    async with running(url, tmp_path) as (agent, start):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(agent.take(), 0.2)
        assert (await agent.send("POST", f"{url}/rollouts?wait_seconds=0.1"))[0] == 204
        assert await agent.finish(start()) == 1.0


async def test_waits_and_bodies_that_are_malformed_are_refused_and_compressed_ones_are_read(url, tmp_path):
    async with running(url, tmp_path) as (agent, start):
        for seconds in ("nan", "-1", "abc"):
            status, answer = await agent.send("POST", f"{url}/rollouts?wait_seconds={seconds}")
            assert status == 400 and "wait_seconds" in answer["error"]["message"]
        group = start()
        rollout = await agent.take()
        assert rollout["environment"] == "dataset"
        headers = {"Authorization": f"Bearer {rollout['api_key']}", "Content-Encoding": "gzip"}
        body = json.dumps({"model": "m", "messages": rollout["messages"]}).encode()
        for content, expected in ((gzip.compress(body), 200), (b"no gzip", 400)):
            address = f"{rollout['base_url']}/chat/completions"
            async with agent.session.post(address, data=content, headers=headers) as reply:
                assert reply.status == expected
        await agent.report(rollout, reward=1)
        assert (await group)[0].reward == 1.0


async def test_a_gateway_that_starts_again_gets_new_rollouts_which_is_no_retry(tmp_path, monkeypatch):
    monkeypatch.setattr(group_attempts, "RETRY_PAUSE_SECONDS", 0.1)
    port = free_port()
    async with gateway(port) as url, AsyncExitStack() as stack:
        agent, start = await stack.enter_async_context(running(url, tmp_path, num_retries=0))
        group = start()
        await agent.ask(await agent.take())
        stack = stack.pop_all()
    async with stack:
        async with gateway(port):
            await agent.take()
        async with gateway(port):
            assert await agent.finish(group) == 1.0


async def test_keys_are_needed_and_others_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("GATEWAY_API_KEY", KEY)
    async with gateway(key=KEY) as url, running(url, tmp_path, KEY) as (agent, start):
        group = start(2)
        first, second = await agent.take(), await agent.take()
        for method, path in (("POST", "/rollouts"), ("GET", "/rollouts"), ("POST", "/offers")):
            assert (await agent.send(method, url + path, {}, {"Authorization": "Bearer other"}))[0] == 401
        assert (await agent.ask({**first, "api_key": second["api_key"]}))[0] == 401
        assert (await agent.report(first, key=second["api_key"], reward=1))[0] == 401
        status, _ = await agent.send("GET", f"{url}/rollouts", None, agent.headers | {"Origin": "http://a.b"})
        assert status == 403
        for rollout in (first, second):
            assert (await agent.ask(rollout))[0] == 200
            assert (await agent.report(rollout, key=KEY, reward=1))[0] == 200
        await group


REFUSED = [
    ({"reward": "1"}, "reward is not a finite number"),
    ({"reward": True}, "reward is not a finite number"),
    ({"reward": float("nan")}, "reward is not a finite number"),
    ({"reward": 10**400}, "reward is not a finite number"),
    ({"metrics": {"steps": None}}, "steps is not a finite number"),
    ({"metrics": [1]}, "metrics is not an object"),
    ({"metrics": {"agent_reward": 1}}, "without reward, num_turns, agent_reward"),
    ({"score": 1}, "unknown key 'score'"),
]


async def test_a_report_that_is_no_reward_leaves_the_rollout_open(url, tmp_path):
    async with running(url, tmp_path) as (agent, start):
        group = start()
        rollout = await agent.take()
        await agent.ask(rollout)
        for body, message in REFUSED:
            status, answer = await agent.report(rollout, **body)
            assert (status, message in answer["error"]["message"]) == (400, True), body
        await agent.report(rollout, reward=0.5)
        assert (await group)[0].reward == 0.5


def test_a_gateway_that_does_not_answer_is_named_before_the_run():
    with pytest.raises(ConfigError, match="does not answer; start it with `gateway`"):
        check_gateway(EnvConfig(id="dataset", gateway="http://127.0.0.1:1/"))


async def test_a_worker_that_starts_while_the_gateway_does_not_answer_waits_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(agent_function, "_RETRY_SECONDS", 0.01)
    port, warnings = free_port(), asyncio.Queue()
    url = f"http://127.0.0.1:{port}"
    async with running(url, tmp_path, warn=warnings.put_nowait) as (agent, start):
        group = start()
        assert await warnings.get() == f"{url} does not answer; start it with `gateway`; rollouts wait for it"
        async with gateway(port):
            assert await agent.finish(group) == 1.0


async def test_a_server_that_fails_ends_a_rollout_whose_agent_never_reports(url, tmp_path):
    def die(body):
        raise web.HTTPInternalServerError

    async with running(url, tmp_path, reply=die) as (agent, start):
        group = start()
        rollout = await agent.take()
        asked = asyncio.create_task(agent.ask(rollout))
        with pytest.raises(InferenceError):
            await group
        await asyncio.wait([asked])
        assert (await agent.report(rollout, reward=1))[0] == 410


def test_an_open_address_needs_a_key(monkeypatch, capsys):
    monkeypatch.delenv("GATEWAY_API_KEY", raising=False)
    monkeypatch.setattr(sys, "argv", ["gateway", "--host", "0.0.0.0"])
    with pytest.raises(SystemExit) as ended:
        main()
    errors = capsys.readouterr().err
    assert (ended.value.code, errors.count("\n")) == (2, 1) and "needs a key in GATEWAY_API_KEY" in errors
