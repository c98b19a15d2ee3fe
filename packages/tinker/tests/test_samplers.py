"""Adapters on the inference server: the least recently used one makes room, and a restarted server gets them again."""

import asyncio
from pathlib import Path

import pytest

from prime_rl.core import retries
from prime_rl.storage.artifact import MANIFEST, remove_artifact, replace_file
from prime_rl_tinker.samplers import Samplers, SamplingError

A, B, C = (Path(name) for name in "abc")


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    """Retry at once."""
    sleep = asyncio.sleep
    monkeypatch.setattr(retries.asyncio, "sleep", lambda seconds: sleep(0))


class Engine(Samplers):
    """A double of the inference server with two slots."""

    def __init__(self):
        super().__init__(None, "", "base", capacity=2)
        self.served, self.calls, self.gate, self.waits = {}, [], asyncio.Event(), 0
        self.num_lost, self.num_aborting, self.loading = 0, 0, asyncio.Event()
        self.gate.set()
        self.loading.set()

    async def _wait_for_server(self):
        self.waits += 1

    async def _post(self, path, body):
        if path == "/load_adapter":
            await self.loading.wait()
            if len(self.served) == 2:
                raise SamplingError("2 adapters are served", 409)
            self.served[body["name"]] = body["weight_dir"]
        elif path == "/unload_adapter":
            if self.num_aborting:
                self.num_aborting -= 1
                raise SamplingError("1 requests sample from it", 409)
            if self.served.pop(body["name"], None) is None:
                raise SamplingError("there is no adapter", 400)
        elif self.num_lost:
            self.num_lost -= 1
            self.served.clear()
            raise SamplingError("the server does not answer", 503)
        else:
            await self.gate.wait()
            if body["model"] != "base" and body["model"] not in self.served:
                raise SamplingError("no such model", 404)
            return {"weights": self.served.get(body["model"])}
        self.calls.append(path)
        return {}


async def test_least_recently_used_adapter_makes_room():
    engine = Engine()
    for folder in (A, B, A, C, B, A):
        assert await engine.sample(folder, {}) == {"weights": str(folder)}
    assert engine.calls.count("/load_adapter") == 5  # a, b, c for b, b for a, a for c
    assert await engine.sample(None, {}) == {"weights": None}


async def test_adapter_of_a_folder_that_was_replaced_is_loaded_again(tmp_path):
    engine = Engine()
    folder, new = tmp_path / "name", tmp_path / "new"

    def save():
        new.mkdir()
        replace_file(new / MANIFEST, "{}")
        if folder.exists():
            remove_artifact(folder)
        new.rename(folder)

    for number in range(1, 5):
        save()
        for _ in range(2):
            await engine.sample(folder, {})
        assert engine.calls.count("/load_adapter") == number
    assert len(engine.served) == 2


async def test_request_that_ends_the_server_each_time_is_tried_twice_with_an_adapter_that_the_server_lost():
    engine = Engine()
    await engine.sample(A, {})
    post, answers = engine._post, iter([503, 404, 503, 404])

    async def end(path, body):
        if path == "/load_adapter":
            return await post(path, body)
        raise SamplingError("", next(answers))

    engine._post = end
    with pytest.raises(SamplingError) as raised:
        await engine.sample(A, {})
    assert (raised.value.status, next(answers)) == (503, 404)


async def test_request_waits_while_all_adapters_are_in_use():
    engine = Engine()
    engine.gate.clear()
    busy = [asyncio.ensure_future(engine.sample(folder, {})) for folder in (A, B)]
    waiting = asyncio.ensure_future(engine.sample(C, {}))
    await asyncio.sleep(0)
    while len(engine.served) < 2:
        await asyncio.sleep(0)
    assert set(engine.served.values()) == {"a", "b"}
    engine.gate.set()
    assert [one["weights"] for one in await asyncio.gather(*busy, waiting)] == ["a", "b", "c"]


async def test_adapters_are_loaded_again_after_a_restart_of_the_server():
    engine = Engine()
    for folder in (A, B):
        await engine.sample(folder, {})
    engine.served.clear()
    both = asyncio.gather(engine.sample(A, {}), engine.sample(A, {}), engine.sample(B, {}))
    assert [one["weights"] for one in await both] == ["a", "a", "b"]
    assert len(engine.served) == 2
    assert await engine.sample(C, {}) == {"weights": "c"}


async def test_request_is_repeated_after_the_server_was_lost_but_not_for_ever():
    engine = Engine()
    engine.num_lost = 1
    assert await engine.sample(A, {}) == {"weights": "a"}
    assert engine.waits == 2  # for the server, and without the adapter
    engine.num_lost = 9
    with pytest.raises(SamplingError, match="does not answer"):
        await engine.sample(None, {})
    assert engine.num_lost == 7, "one request does not use up the restarts of the server"


async def test_adapter_of_requests_that_are_being_aborted_makes_room_later():
    engine = Engine()
    for folder in (A, B):
        await engine.sample(folder, {})
    engine.num_aborting = 2
    assert await engine.sample(C, {}) == {"weights": "c"}
    engine.num_aborting = 99
    with pytest.raises(SamplingError, match="2 adapters are served"):
        await engine.sample(A, {})
    engine.num_aborting = 0
    assert await engine.sample(A, {}) == {"weights": "a"}
    assert len(engine.served) == 2


async def test_requests_of_other_adapters_do_not_wait_for_a_load():
    engine = Engine()
    await engine.sample(A, {})
    engine.loading.clear()
    waiting = asyncio.ensure_future(engine.sample(B, {}))
    await asyncio.sleep(0)
    assert await engine.sample(A, {}) == {"weights": "a"}
    assert not waiting.done()
    engine.loading.set()
    assert await waiting == {"weights": "b"}
