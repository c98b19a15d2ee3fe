"""Headers that name the versions between which an answer was sampled."""

import asyncio

import httpx

from prime_rl.inference.version_header import PolicyVersionHeader, answered_by
from prime_rl.types import PolicyVersion


async def test_names_the_versions_at_both_ends() -> None:
    loaded = PolicyVersion(0, 3)

    async def app(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        nonlocal loaded
        loaded = PolicyVersion(1, 2)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-other", b"kept")]})
        await send({"type": "http.response.body", "body": b"said"})

    transport = httpx.ASGITransport(PolicyVersionHeader(app, lambda: loaded))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        answer = await client.get("/")
    assert answer.text == "said"
    assert answer.headers["x-other"] == "kept"
    assert (answer.headers["x-policy-version"], answer.headers["x-policy-version-end"]) == ("0.3", "1.2")


async def test_a_named_adapter_has_a_version_of_its_own() -> None:
    """However deep in the handler, and for no request but this one."""

    async def app(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        async def sample() -> None:
            if scope["path"] == "/named":
                answered_by(PolicyVersion(0, 5))

        await asyncio.create_task(sample())
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"said"})

    transport = httpx.ASGITransport(PolicyVersionHeader(app, lambda: PolicyVersion(0, 9)))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        named, plain = await asyncio.gather(client.get("/named"), client.get("/plain"))
    assert (named.headers["x-policy-version"], named.headers["x-policy-version-end"]) == ("0.5", "0.5")
    assert (plain.headers["x-policy-version"], plain.headers["x-policy-version-end"]) == ("0.9", "0.9")


async def test_lets_everything_else_through() -> None:
    seen = []

    async def app(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        seen.append((scope, receive, send))

    async def nothing(*_: object) -> dict[str, object]:
        return {}

    scope = {"type": "lifespan"}
    await PolicyVersionHeader(app, lambda: PolicyVersion(0, 0))(scope, nothing, nothing)  # type: ignore[arg-type]
    assert seen == [(scope, nothing, nothing)]
