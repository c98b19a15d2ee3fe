"""Pins hold back weight updates until a request, or a rollout of several requests, is complete.

`/v1/chat/completions` and similar routes cannot report which version sampled which token, so one version samples the
whole response (I5). A rollout of several requests is pinned by `POST /pin_policy`; it sends its pin with every request
(header `X-Policy-Pin`) and releases it at the end.

    rollouts   |---pin 1---|    |--pin 2--|          (waits)|---pin 3---
    update          (staged: waits.........)|in place|

A waiting update admits no new pin, so it waits for the longest of the existing pins and at most `seconds`. After that
it proceeds, and the headers of the responses name two versions. It does not wait for a pin that no request has used for
`seconds`: its client may be gone.
"""

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

_MAX_PINS = 2**16  # more than there are concurrent rollouts; the oldest pin is released for a new one


class VersionPins:
    """The pins of one server."""

    def __init__(self, seconds: float) -> None:
        """An update waits at most `seconds`; 0 disables pins."""
        self.seconds = seconds
        self._last_use: dict[str, float] = {}  # by pin, the oldest pin first
        self._active_requests = Counter[str]()  # by pin
        self._no_pins = asyncio.Event()
        self._no_pins.set()
        self._admits_pins = asyncio.Event()
        self._admits_pins.set()

    def __contains__(self, name: str) -> bool:
        return name in self._last_use

    async def acquire(self) -> str:
        """Return the name of a new pin, after the end of any update that is waiting or in progress."""
        await self._admits_pins.wait()
        name = secrets.token_hex(16)
        while len(self._last_use) >= _MAX_PINS:
            self.release(next(iter(self._last_use)))
        self._last_use[name] = time.monotonic()
        self._no_pins.clear()
        return name

    def release(self, name: str) -> None:
        """Remove a pin, if it exists."""
        self._last_use.pop(name, None)
        if not self._last_use:
            self._no_pins.set()

    @asynccontextmanager
    async def request(self, pin: str = "") -> AsyncIterator[Callable[[], None]]:
        """Hold the request's pin, or if it has none a new one, for the length of the block.

        Yields a function that releases the new one early.
        """
        is_own = pin in self
        if not is_own and not self.seconds:
            yield lambda: None
            return
        name = pin if is_own else await self.acquire()
        self._active_requests[name] += 1
        try:
            yield (lambda: None) if is_own else partial(self.release, name)
        finally:
            self._active_requests[name] -= 1
            if not self._active_requests[name]:
                del self._active_requests[name]
            if not is_own:
                self.release(name)
            elif name in self:
                self._last_use[name] = time.monotonic()

    @asynccontextmanager
    async def update(self) -> AsyncIterator[None]:
        """Wait until all pins are released or expired, and admit none for the length of the block."""
        self._admits_pins.clear()
        try:
            deadline = time.monotonic() + self.seconds
            while self._last_use and (remaining := self._longest_wait(deadline)) > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(remaining):
                        await self._no_pins.wait()
            self._last_use.clear()
            self._no_pins.set()
            yield
        finally:
            self._admits_pins.set()

    def _longest_wait(self, deadline: float) -> float:
        """Seconds until all pins have expired, if no request is sent until then."""
        expiry = (deadline if name in self._active_requests else t + self.seconds for name, t in self._last_use.items())
        return min(deadline, max(expiry)) - time.monotonic()
