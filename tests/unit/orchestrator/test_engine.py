"""A server that fails, lies, resets connections or hangs: asked again a few times, then named; never believed (I7)."""

import asyncio
import json

import pytest
from aiohttp import web

from prime_rl.orchestrator.engine import Engine, EngineError, EngineLost
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
    async with fake_engine() as fake, Engine(fake.url, "m", "", **options) as engine:
        fake.fault = fault
        try:
            return await engine.generate([1, 2, 3], SAMPLING), len(fake.requests)
        except (EngineError, EngineLost) as error:
            return error, len(fake.requests)


async def test_a_proper_answer_is_taken_as_it_is():
    generation, requests = await ask(say(answer()))
    assert (generation.token_ids.tolist(), requests) == ([5, 6], 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"choices": [', "truncated"),
        ("<html>bad gateway</html>", "malformed"),
        ('{"choices": []}', "index"),
        ('{"answer": 1}', "choices"),
        (answer(ids=(5, 6, 7), logprobs=(-0.5,) * 3, spans=((0, 3),)), "3 tokens, where at most 2 were asked for"),
        (answer(ids=()), "0 ids, 2 logprobs"),
        (answer(logprobs=(-0.5,)), "2 ids, 1 logprobs"),
        (answer(logprobs=(-0.5, float("nan"))), "malformed"),
        (answer(logprobs=(-0.5, None)), "float"),
        (answer(logprobs=(-0.5, 0.7)), "log-probability that is none"),
        (answer().replace("-0.5", "-1e999"), "range|log-probability that is none"),
        (answer(ids=(5, -6)), "an id below 0"),
        (answer(ids=(5, 2**40)), "out of bounds"),
        (answer(ids=(5, 128)), "token 128, where the model knows 128"),
        (answer(spans=((0, 1),)), "1 versions"),
        (answer(version="newest"), "newest"),
        (answer(finish="abort"), "abort"),
    ],
)
async def test_an_answer_that_cannot_be_is_asked_for_again_and_then_a_fault_of_the_server(text, said):
    error, requests = await ask(say(text), vocabulary=128)
    assert isinstance(error, EngineError)
    assert error.is_fault
    assert "answered what is not understood" in str(error)
    assert any(word in str(error) for word in said.split("|")), str(error)
    assert requests == 3


async def test_an_error_that_passes_costs_nothing():
    faults = [web.json_response({"error": {"message": "busy"}}, status=status) for status in (500, 503)]
    generation, requests = await ask(lambda body: faults.pop() if faults else None)
    assert (len(generation.token_ids), requests) == (2, 3)


@pytest.mark.parametrize(("status", "requests", "fault"), [(500, 3, True), (429, 3, True), (400, 1, False)])
async def test_what_is_the_servers_fault_is_tried_again_and_what_is_ours_is_not(status, requests, fault):
    error, asked = await ask(say('{"error": {"message": "no"}}', status))
    assert (asked, error.is_fault) == (requests, fault)
    assert f"answered {status}: no" in str(error)


async def test_a_connection_that_is_reset_again_and_again_is_a_lost_server():
    class Cut(web.Response):
        async def prepare(self, request):
            request.transport.abort()
            return await super().prepare(request)

    error, requests = await ask(lambda body: Cut())
    assert isinstance(error, EngineLost)
    assert requests == 3


async def test_a_server_that_hangs_is_told_at_its_deadline():
    async with fake_engine() as fake, Engine(fake.url, "m", "run", timeout_s=0.3, probe_s=0.1) as engine:
        stuck = asyncio.Event()
        fake.gate = lambda body: stuck.wait()
        with pytest.raises(EngineError, match=r"did not answer within 0\.3 s \(client\.timeout\)") as caught:
            await engine.generate([1], SAMPLING)
        assert caught.value.is_fault
        assert len(fake.requests) == 1, "whoever waited so long is not made to wait three times"
        stuck.set()


async def test_what_samples_is_asked_with_a_deadline_of_its_own():
    async def hang(reader, writer):
        await reader.read()
        writer.close()

    server = await asyncio.start_server(hang, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with Engine(url, "m", "run", timeout_s=60, probe_s=0.2) as engine:
        for call in (engine.policy, engine.look, engine.release, engine.metrics):
            with pytest.raises(EngineLost, match=r"did not answer within 0\.2 s \(client\.probe_timeout\)"):
                await call()
    server.close()


@pytest.mark.parametrize("text", ["[]", '{"step": 1}', '{"branch": 0, "step": "x", "hash": "h"}', "nonsense"])
async def test_nonsense_about_the_policy_is_a_fault_and_no_traceback(text):
    async def nonsense(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        body = text.encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(nonsense, "127.0.0.1", 0)
    async with Engine(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "m", "run") as engine:
        with pytest.raises(EngineError, match="not understood of its policy") as caught:
            await engine.policy()
        assert caught.value.is_fault
    server.close()
