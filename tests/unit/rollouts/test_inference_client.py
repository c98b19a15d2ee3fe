"""A server that fails, lies, resets connections or hangs: asked again a few times, then named; never believed (I7)."""

import asyncio
import json

import pytest
from aiohttp import web

from prime_rl.rollouts.clients.inference_client import InferenceClient, InferenceError, InferenceServerLost
from tests.support.fake_engine import fake_engine

SAMPLING = {"temperature": 1.0, "max_tokens": 2}


def answer(ids=(5, 6), logprobs=(-0.5, -0.5), spans=((0, 2),), finish="stop", version="0.0") -> str:
    choice = {
        "token_ids": list(ids),
        "logprobs": {"content": [{"logprob": value} for value in logprobs]},
        "weight_versions": [{"version": version, "start": start, "end": end} for start, end in spans],
        "finish_reason": finish,
    }
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


async def test_generate_valid_response_returns_it():
    generation, requests = await ask(say(answer()))
    assert (generation.token_ids.tolist(), requests) == ([5, 6], 1)


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
    ],
)
async def test_generate_invalid_response_is_retried_and_then_raises(text, said):
    error, requests = await ask(say(text), vocabulary=128)
    assert isinstance(error, InferenceError)
    assert error.is_server_fault
    assert "returned an invalid response" in str(error)
    assert any(word in str(error) for word in said.split("|")), str(error)
    assert requests == 3


async def test_generate_transient_error_is_retried():
    faults = [web.json_response({"error": {"message": "busy"}}, status=status) for status in (500, 503)]
    generation, requests = await ask(lambda body: faults.pop() if faults else None)
    assert (len(generation.token_ids), requests) == (2, 3)


@pytest.mark.parametrize("text", ['{"error": {"code": 1}}', '{"error": null}', '{"error": []}', "[]", "null", ""])
async def test_generate_refusal_in_another_form_raises_inference_error(text):
    error, _ = await ask(say(text, 400))
    assert (error.status, error.is_server_fault) == (400, False)


@pytest.mark.parametrize(
    ("status", "requests", "fault"), [(500, 3, True), (429, 3, True), (300, 3, True), (400, 1, False)]
)
async def test_generate_retries_server_faults_only(status, requests, fault):
    error, asked = await ask(say('{"error": {"message": "no"}}', status))
    assert (asked, error.is_server_fault) == (requests, fault)
    assert f"returned {status}: no" in str(error)


async def test_generate_repeated_connection_reset_raises_server_lost():
    class Cut(web.Response):
        async def prepare(self, request):
            request.transport.abort()
            return await super().prepare(request)

    error, requests = await ask(lambda body: Cut())
    assert isinstance(error, InferenceServerLost)
    assert requests == 3


async def test_generate_hanging_server_raises_at_the_timeout():
    async with fake_engine() as fake, InferenceClient(fake.url, "m", "run", timeout_s=0.3, probe_s=0.1) as engine:
        stuck = asyncio.Event()
        fake.gate = lambda body: stuck.wait()
        with pytest.raises(
            InferenceError, match=r"did not respond within 0\.3 s \(client\.timeout_seconds\)"
        ) as caught:
            await engine.generate([1], SAMPLING)
        assert caught.value.is_server_fault
        assert len(fake.requests) == 1, "whoever waited so long is not made to wait three times"
        stuck.set()


async def test_probe_requests_have_a_separate_timeout():
    async def hang(reader, writer):
        await reader.read()
        writer.close()

    server = await asyncio.start_server(hang, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with InferenceClient(url, "m", "run", timeout_s=60, probe_s=0.2) as engine:
        for call in (engine.policy, engine.peek_policy, engine.release, engine.metrics):
            with pytest.raises(
                InferenceServerLost, match=r"did not respond within 0\.2 s \(client\.probe_timeout_seconds\)"
            ):
                await call()
    server.close()


@pytest.mark.parametrize("text", ["[]", '{"step": 1}', '{"branch": 0, "step": "x", "hash": "h"}', "nonsense"])
async def test_policy_invalid_response_raises_inference_error(text):
    async def nonsense(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        body = text.encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(nonsense, "127.0.0.1", 0)
    async with InferenceClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "m", "run") as engine:
        with pytest.raises(InferenceError, match="/policy returned an invalid response") as caught:
            await engine.policy()
        assert caught.value.is_server_fault
    server.close()
