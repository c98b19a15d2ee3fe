"""A server that fails, lies, resets connections or hangs: asked again a few times, then named; never believed (I7)."""

import asyncio
import base64
import io
import json
from contextlib import asynccontextmanager, suppress

import numpy as np
import pytest
from aiohttp import web

from prime_rl.evaluation.eval_session import lease_servers
from prime_rl.rollouts.clients.inference_client import InferenceClient, InferenceError, InferenceServerLost
from tests.support.fake_engine import fake_engine

SAMPLING = {"temperature": 1.0, "max_tokens": 2}


def answer(ids=(5, 6), logprobs=(-0.5, -0.5), spans=((0, 2),), finish="stop", version="0.0", routes=None) -> str:
    choice = {
        "token_ids": list(ids),
        "logprobs": {"content": [{"logprob": value} for value in logprobs]},
        "weight_versions": [{"version": version, "start": start, "end": end} for start, end in spans],
        "finish_reason": finish,
    }
    if routes is not None:
        file = io.BytesIO()
        np.save(file, routes)
        choice["routed_experts"] = base64.b64encode(file.getvalue()).decode()
    return json.dumps({"choices": [choice]})


def say(text: str, status: int = 200):
    return lambda body: web.Response(text=text, status=status, content_type="application/json")


async def ask(fault, **options):
    """Ask once; returns what came or was raised, and how many requests it took."""
    async with fake_engine() as fake, InferenceClient(fake.url, "m", "", **options) as engine:
        fake.fault = fault
        try:
            return await engine.generate([1, 2, 3], SAMPLING), len(fake.requests)
        except (InferenceError, InferenceServerLost) as error:
            return error, len(fake.requests)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"choices": [', "truncated"),
        ("<html>bad gateway</html>", "malformed"),
        ('{"choices": []}', "index"),
        ('{"answer": 1}', "choices"),
        (answer(ids=(5, 6, 7), logprobs=(-0.5,) * 3, spans=((0, 3),)), "3 tokens, but max_tokens is 2"),
        (answer(ids=()), "0 ids, 2 logprobs"),
        (answer(logprobs=(-0.5,)), "2 ids, 1 logprobs"),
        (answer(logprobs=(-0.5, float("nan"))), "malformed"),
        (answer(logprobs=(-0.5, None)), "float"),
        (answer(logprobs=(-0.5, 0.7)), "invalid log-probability"),
        (answer().replace("-0.5", "-1e999"), "range|invalid log-probability"),
        (answer(ids=(5, -6)), "a negative token id"),
        (answer(ids=(5, 2**40)), "out of bounds"),
        (answer(ids=(5, 128)), "token id 128, but the vocabulary has 128"),
        (answer(spans=((0, 1),)), "1 versions"),
        (answer(version="newest"), "newest"),
        (answer(finish="abort"), "abort"),
        (answer(routes=np.zeros((5, 2, 2), np.uint8)), "routes of 5 tokens, expected 4"),
    ],
)
async def test_generate_invalid_response_is_retried_and_then_raises(text, said):
    error, requests = await ask(say(text), vocabulary=128)
    assert isinstance(error, InferenceError)
    assert error.is_server_fault
    assert "returned an invalid response" in str(error)
    assert any(word in str(error) for word in said.split("|")), str(error)
    assert requests == 3


async def test_generate_returns_the_routes_of_all_tokens_but_the_last():
    routes = np.arange(16, dtype=np.uint16).reshape(4, 2, 2)
    generation, _ = await ask(say(answer(routes=routes)))
    assert np.array_equal(generation.routes.array, routes) and generation.routes_start == 0


async def test_generate_transient_error_is_retried():
    faults = [web.json_response({"error": {"message": "busy"}}, status=status) for status in (500, 503)]
    generation, requests = await ask(lambda body: faults.pop() if faults else say(answer())(body))
    assert (generation.token_ids.tolist(), requests) == ([5, 6], 3)


@pytest.mark.parametrize(
    ("status", "text", "requests", "fault"),
    [
        *((status, '{"error": {"message": "no"}}', 3, True) for status in (500, 429, 300)),
        (400, '{"error": {"message": "no"}}', 1, False),
        *((400, text, 1, False) for text in ('{"error": {"code": 1}}', '{"error": null}', "[]", "null", "")),
    ],
)
async def test_generate_retries_server_faults_only(status, text, requests, fault):
    error, asked = await ask(say(text, status))
    assert (asked, error.status, error.is_server_fault) == (requests, status, fault)
    assert f"returned {status}" in str(error) and ("no" in str(error) or "message" not in text)


async def test_generate_repeated_connection_reset_raises_server_lost():
    class Cut(web.Response):
        async def prepare(self, request):
            request.transport.abort()
            return await super().prepare(request)

    error, requests = await ask(lambda body: Cut())
    assert isinstance(error, InferenceServerLost)
    assert requests == 3


async def test_generate_hanging_server_raises_at_the_timeout():
    async with fake_engine() as fake, InferenceClient(fake.url, "m", "run", timeout_seconds=0.3) as engine:
        stuck = asyncio.Event()
        fake.gate = lambda body: stuck.wait()
        with pytest.raises(InferenceError, match=r"not respond within 0\.3 s \(client\.timeout_seconds\)") as caught:
            await engine.generate([1], SAMPLING)
        assert caught.value.is_server_fault
        assert len(fake.requests) == 1, "whoever waited so long is not made to wait three times"
        stuck.set()


@asynccontextmanager
async def raw_server(talk):
    """Yield the address of a server that writes what `talk` does."""

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        with suppress(ConnectionError):
            await talk(writer)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


async def trickle(writer):
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    while True:
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.01)


async def hang(writer):
    await asyncio.Event().wait()


@pytest.mark.parametrize("talk", [hang, trickle])
async def test_probe_requests_have_a_timeout_for_the_whole_response(talk):
    timeout = r"did not respond within 0\.1 s \(client\.probe_timeout_seconds\)"
    async with (
        raw_server(talk) as url,
        InferenceClient(url, "m", "run", timeout_seconds=60, probe_seconds=0.1) as engine,
    ):
        for call in (engine.policy, engine.peek_policy, engine.release, engine.metrics):
            with pytest.raises(InferenceServerLost, match=timeout):
                await call()


async def test_control_requests_reach_a_server_that_restarted_at_the_same_address(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # not used
    async with fake_engine() as fake, InferenceClient(fake.url, "m", "run") as engine:
        await engine.reset()
        assert (await engine.policy()).is_ours
        await fake.die()
        with pytest.raises(InferenceServerLost, match=r"cannot be reached: Connection refused$"):
            await engine.policy()
        await fake.start(int(fake.url.rpartition(":")[2]))
        assert not (await engine.policy()).is_ours
        await fake.die()
        await fake.start(int(fake.url.rpartition(":")[2]))
        assert (await engine.reset()).is_ours, "the idle connection to the earlier server is not used"


@pytest.mark.parametrize("slot", ["alpha", None])
async def test_reset_of_a_server_that_will_not_be_free_raises_at_once(slot):
    """Named adapters do not expire, and a lease that was renewed will be renewed again."""
    async with fake_engine() as fake, InferenceClient(fake.url, "m", "run", slot=slot) as engine:
        if slot is None:
            fake.holder, fake.lease_left = "other", lambda: 30.0
        fake.full_of_adapters = slot is not None
        async with asyncio.timeout(30):
            with pytest.raises(InferenceError, match="in use" if slot else "leased by other"):
                await engine.reset()
        assert fake.num_policy_requests == 0


@pytest.mark.parametrize(("slot", "resets"), [("alpha", 1), (None, 2)])
async def test_leased_servers_serve_the_base_model_afterwards(slot, resets):
    """A slot is freed with its weights, and a second slot could not be waited for."""
    async with fake_engine() as fake:
        async with lease_servers([InferenceClient(fake.url, "m", "run", slot=slot)]):
            assert fake.holder == "run"
        assert (fake.calls, fake.holder) == (["reset"] * resets, None)


DEEP = '{"step": ' + "[" * 9000 + "]" * 9000 + "}"


@pytest.mark.parametrize("text", ["[]", '{"step": 1}', '{"branch": 0, "step": "x", "hash": "h"}', "nonsense", DEEP])
async def test_policy_invalid_response_raises_inference_error(text):
    async def nonsense(writer):
        body = text.encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body)
        await writer.drain()

    async with raw_server(nonsense) as url, InferenceClient(url, "m", "run") as engine:
        with pytest.raises(InferenceError, match="/policy returned an invalid response") as caught:
            await engine.policy()
        assert caught.value.is_server_fault
