"""I5 for rollouts whose tokens carry no versions: a switch waits for them, so that one version samples them to the end.

`/v1/chat/completions` and its like cannot say which version sampled which token. So each such request is pinned: while
it is being answered nothing is switched. A rollout of several requests is pinned as a whole by `POST /pin_policy`, and
names its pin with every request (header `X-Policy-Pin`), until it gives it back.

    rollouts   |---pin 1---|    |--pin 2--|          (waits)|---pin 3---
    switch          (staged: waits.........)|in place|

A switch that waits lets no new pin in, so it waits for the longest of those that are there and no longer, and `seconds`
at the most: then it goes on, and the headers of the answers say that two versions may have sampled them. It does not
wait for requests of named adapters (`named_adapters`), which no switch touches.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from typing import Any

Message = MutableMapping[str, Any]
App = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]

HEADER = "x-policy-pin"
_SAMPLING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
"""Routes that sample and cannot tell the version of a token."""

_give_back: ContextVar[Callable[[], None] | None] = ContextVar("give_back", default=None)


def unpin_request() -> None:
    """Let a switch not wait for the request that is being handled: what it is sampled from is not switched."""
    if (give_back := _give_back.get()) is not None:
        give_back()


class Pins:
    """Who may not be switched away from.

    Args:
        seconds: longest time that a switch waits; 0 pins nothing.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._names = set[str]()
        self._none_left = asyncio.Event()
        self._none_left.set()
        self._admits = asyncio.Event()
        self._admits.set()

    def __contains__(self, name: str) -> bool:
        return name in self._names

    async def take(self) -> str:
        """Return the name of a new pin; waits for a switch that waits itself, or is under way."""
        await self._admits.wait()
        name = secrets.token_hex(16)
        self._names.add(name)
        self._none_left.clear()
        return name

    def give_back(self, name: str) -> None:
        """Remove a pin; nothing happens if it is gone already."""
        self._names.discard(name)
        if not self._names:
            self._none_left.set()

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """Be pinned for the length of the block."""
        if not self.seconds:
            yield
            return
        name = await self.take()
        _give_back.set(lambda: self.give_back(name))  # also in tasks that the handler starts
        try:
            yield
        finally:
            self.give_back(name)

    @asynccontextmanager
    async def switch(self) -> AsyncIterator[None]:
        """Enter when nobody is pinned any more, or has been for too long; nobody is while the block lasts."""
        self._admits.clear()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.seconds):
                    await self._none_left.wait()
            self._names.clear()
            self._none_left.set()
            yield
        finally:
            self._admits.set()


class PinnedRequests:
    """ASGI middleware that pins every request that samples and cannot tell the version of a token.

    Args:
        app: what it wraps.
        pins: of the server.
    """

    def __init__(self, app: App, pins: Pins) -> None:
        self._app = app
        self._pins = pins

    async def __call__(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        """Handle one request."""
        if scope["type"] != "http" or scope["path"] not in _SAMPLING or _pin_of(scope) in self._pins:
            await self._app(scope, receive, send)
            return
        async with self._pins.request():
            await self._app(scope, receive, send)


def _pin_of(scope: Message) -> str:
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == HEADER.encode()), "")
