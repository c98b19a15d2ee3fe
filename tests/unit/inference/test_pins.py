"""Pinned rollouts and switches: the one waits for the others, the others for the one, and nobody for ever."""

import asyncio

import httpx

from prime_rl.inference.pins import HEADER, PinnedRequests, Pins, unpin_request


async def _switch(pins: Pins, events: list[str]) -> None:
    async with pins.switch():
        events.append("switched")


async def _turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_switch_waits_for_those_that_are_pinned_and_new_ones_for_it() -> None:
    pins, events = Pins(60), list[str]()
    first, second = await pins.take(), await pins.take()
    assert first in pins
    switch = asyncio.create_task(_switch(pins, events))
    await _turns()
    late = asyncio.create_task(pins.take())
    await _turns()
    pins.give_back(first)
    await _turns()
    assert not events
    assert not late.done()
    pins.give_back(second)
    await switch
    assert events == ["switched"]
    assert await late in pins
    pins.give_back("never taken")


async def test_a_switch_does_not_wait_longer_than_it_may() -> None:
    pins, events = Pins(0.01), list[str]()
    name = await pins.take()
    await _switch(pins, events)
    assert events == ["switched"]
    assert name not in pins, "it is the old version's"
    pins.give_back(name)
    async with asyncio.timeout(5):
        await _switch(pins, events)


async def test_without_anybody_pinned_a_switch_is_at_once() -> None:
    pins, events = Pins(60), list[str]()
    async with asyncio.timeout(5):
        await _switch(pins, events)
    assert events


class Case:
    """An application that answers when the test says so."""

    def __init__(self, seconds: float = 60) -> None:
        self.pins, self.gate, self.begun = Pins(seconds), asyncio.Event(), asyncio.Event()
        transport = httpx.ASGITransport(PinnedRequests(self._app, self.pins))  # type: ignore[arg-type]
        self.client = httpx.AsyncClient(transport=transport, base_url="http://server")

    async def _app(self, scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        self.begun.set()
        await self.gate.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"said"})

    def post(self, path: str, pin: str = "") -> "asyncio.Task[httpx.Response]":
        return asyncio.create_task(self.client.post(path, headers={HEADER: pin} if pin else {}))


async def test_a_chat_completion_holds_the_switch_until_it_is_answered() -> None:
    case, events = Case(), list[str]()
    answer = case.post("/v1/chat/completions")
    await case.begun.wait()
    switch = asyncio.create_task(_switch(case.pins, events))
    await _turns()
    assert not events
    case.gate.set()
    await asyncio.gather(answer, switch)


async def test_what_tells_its_versions_holds_nothing() -> None:
    for seconds, path in ((60, "/inference/v1/generate"), (60, "/v1/models"), (0, "/v1/chat/completions")):
        case, events = Case(seconds), list[str]()
        answer = case.post(path)
        await case.begun.wait()
        async with asyncio.timeout(5):
            await _switch(case.pins, events)
        case.gate.set()
        await answer


async def test_a_pinned_rollout_goes_on_while_a_switch_waits_for_it() -> None:
    """Its next request must not wait for the switch, which waits for its last one."""
    case, events = Case(), list[str]()
    pin = await case.pins.take()
    switch = asyncio.create_task(_switch(case.pins, events))
    await _turns()
    stranger = case.post("/v1/chat/completions")
    await _turns()
    assert not case.begun.is_set()
    case.gate.set()
    async with asyncio.timeout(5):
        assert (await case.post("/v1/chat/completions", pin)).text == "said"
    assert not events
    assert not stranger.done()
    case.pins.give_back(pin)
    await asyncio.gather(switch, stranger)


async def test_a_request_that_no_switch_touches_holds_nothing() -> None:
    """A named adapter's: which `model` a request names is seen only inside its handler."""
    case, events = Case(), list[str]()
    wait = case.gate.wait

    async def unpin_and_wait() -> bool:
        unpin_request()
        return await wait()

    case.gate.wait = unpin_and_wait  # type: ignore[method-assign, assignment]
    answer = case.post("/v1/chat/completions")
    await case.begun.wait()
    async with asyncio.timeout(5):
        await _switch(case.pins, events)
    case.gate.set()
    assert (await answer).text == "said"
