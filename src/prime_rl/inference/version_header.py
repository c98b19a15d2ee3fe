"""I5 for answers without spans: every route tells between which policy versions its tokens were sampled.

`/v1/chat/completions` and its like have no place for `weight_versions`. Their answers carry two headers instead:

    X-Policy-Version: 0.12        what was loaded when the request came
    X-Policy-Version-End: 0.13    what was loaded when the answer was sent

All tokens were sampled by versions between the two, ends included: a version is named as loaded before the first token
is sampled from it. Equal headers mean one version. A streamed answer sends its headers with the first token, so its
second header says nothing of what follows. A request of a named adapter is answered with that adapter's version.
"""

from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from typing import Any

from prime_rl.types import PolicyVersion

Message = MutableMapping[str, Any]
App = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]

START = "x-policy-version"
END = "x-policy-version-end"

_named: ContextVar[list[PolicyVersion] | None] = ContextVar("named", default=None)


def answered_by(version: PolicyVersion) -> None:
    """Note that the request which is being handled is sampled from a named adapter of this version."""
    if (named := _named.get()) is not None:
        named.append(version)


class PolicyVersionHeader:
    """ASGI middleware that adds the headers.

    Args:
        app: what it wraps.
        version: tells which version is loaded now.
    """

    def __init__(self, app: App, version: Callable[[], PolicyVersion]) -> None:
        self._app = app
        self._version = version

    async def __call__(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = self._version()
        named = list[PolicyVersion]()
        _named.set(named)  # shared by all tasks that handle this request

        async def send_with_versions(message: Message) -> None:
            if message["type"] == "http.response.start":
                ends = (min(named), max(named)) if named else (start, self._version())
                versions = zip((START, END), ends, strict=True)
                added = [(name.encode(), str(version).encode()) for name, version in versions]
                message["headers"] = [*message.get("headers", ()), *added]
            await send(message)

        await self._app(scope, receive, send_with_versions)
