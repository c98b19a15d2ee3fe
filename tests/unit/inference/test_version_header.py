"""Headers that name the versions between which an answer was sampled."""

import httpx

from prime_rl.inference.version_header import PolicyVersionHeader
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


async def test_lets_everything_else_through() -> None:
    seen = []

    async def app(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        seen.append((scope, receive, send))

    async def nothing(*_: object) -> dict[str, object]:
        return {}

    scope = {"type": "lifespan"}
    await PolicyVersionHeader(app, lambda: PolicyVersion(0, 0))(scope, nothing, nothing)  # type: ignore[arg-type]
    assert seen == [(scope, nothing, nothing)]
