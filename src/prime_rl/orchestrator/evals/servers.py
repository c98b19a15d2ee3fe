"""The servers of an evaluation: which protocol they speak, who samples next, and switching our own between versions.

I7: a server that is gone is asked again for a while, then the evaluation ends with an error that names it.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Self

import aiohttp
import msgspec
from loguru import logger

from prime_rl.api_key import read_api_key
from prime_rl.configs.playing import AnyServerConfig, Api
from prime_rl.errors import RunError
from prime_rl.orchestrator.engine import Engine, EngineError, EngineLost, LoadedPolicy
from prime_rl.run.artifact import WEIGHTS_FORMAT, read_manifest
from prime_rl.types import PolicyVersion

_PATIENCE_S = 60.0
"""How long servers that are gone are asked again, seconds."""
_LEFT_OUT_S = 10.0
_PROBE_S = 0.5
_RENEWAL_S = 2.0


class FixedServers:
    """Servers by address, the least loaded first. One that is lost gets nothing for a while, unless all are lost."""

    def __init__(self, urls: Sequence[str], patience_s: float = _PATIENCE_S, left_out_s: float = _LEFT_OUT_S) -> None:
        """Use `urls`.

        Args:
            urls: addresses.
            patience_s: how long to wait for one of them when all are lost, seconds.
            left_out_s: how long a lost one gets nothing, seconds.
        """
        self._load = dict.fromkeys(urls, 0)
        self._lost: dict[str, float] = {}
        self._patience_s = patience_s
        self._left_out_s = left_out_s

    @asynccontextmanager
    async def one(self, rollouts: int) -> AsyncIterator[str]:
        """Lend the least loaded server; see `player.Servers`."""
        now = time.monotonic()
        able = [url for url in self._load if url not in self._lost or now - self._lost[url] >= self._left_out_s]
        url = min(able or [await self._any()], key=self._load.__getitem__)
        self._load[url] += rollouts
        try:
            yield url
        except EngineLost as error:
            if url not in self._lost:
                logger.warning("{}", error)
            self._lost[url] = time.monotonic()
            raise
        else:
            self._lost.pop(url, None)
        finally:
            self._load[url] -= rollouts

    async def _any(self) -> str:
        """Wait until a server accepts connections; nothing tells that it does but its answer."""
        urls = list(self._load)
        deadline = asyncio.get_running_loop().time() + self._patience_s
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
            while asyncio.get_running_loop().time() < deadline:
                for url in urls:
                    if await _answers(session, url):
                        self._lost.pop(url, None)
                        return url
                await asyncio.sleep(_PROBE_S)
        raise RunError(
            f"no server answers any more ({', '.join(urls)}); the same command goes on where this one has stopped"
        )


async def detect_api(config: AnyServerConfig) -> Api:
    """Tell which protocol the servers are to be asked by.

    Raises:
        RunError: the first one cannot be reached.
    """
    if config.api != "auto":
        return config.api
    url = config.urls[0]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30), headers=_headers(config)) as session:
        try:
            async with session.get(f"{url}/policy") as response:
                ours = response.status == 200 and _is_policy(await response.read())
        except (aiohttp.ClientError, TimeoutError) as error:
            raise RunError(f"the server at {url} cannot be reached: {error or 'no answer within 30 s'}") from None
    logger.info("{} is asked by {}", url, "/inference/v1/generate" if ours else "/v1/chat/completions")
    return "generate" if ours else "chat"


class LeasedServers:
    """Our own servers, leased, to be brought from version to version. Use as an async context manager.

    From the start of the block they serve the base model; at its end they do so again, and are given back.

    Attributes:
        urls: their addresses.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        """Lease `engines`, which are not yet open."""
        self.urls = [engine.url for engine in engines]
        self._engines = engines
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Open, lease and reset.

        Raises:
            EngineLost, EngineError: a server is not there, or another run holds it.
        """
        async with AsyncExitStack() as stack:
            for engine in self._engines:
                await stack.enter_async_context(engine)
                stack.push_async_callback(_give_back, engine)
            await self.load_base()
            renewal = asyncio.create_task(self._renew())
            stack.callback(renewal.cancel)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def load_base(self) -> LoadedPolicy:
        """Go back to the base model, version 0."""
        return (await asyncio.gather(*(engine.reset() for engine in self._engines)))[0]

    async def load(self, directory: Path) -> LoadedPolicy:
        """Switch to the published weights in `directory`.

        Raises:
            RunError: they are not whole, a server refuses them, or says that it has loaded something else.
        """
        manifest = read_manifest(directory, WEIGHTS_FORMAT)
        version = PolicyVersion(manifest["branch"], manifest["step"])
        loaded = await asyncio.gather(*(engine.load(str(directory.resolve()), version) for engine in self._engines))
        for engine, answer in zip(self._engines, loaded, strict=True):
            if answer.hash != manifest["hash"]:
                raise RunError(f"{engine.url} loaded {answer.version} ({answer.hash}) where {directory} was asked for")
        return loaded[0]

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(_RENEWAL_S)
            for engine in self._engines:
                with suppress(EngineLost, EngineError):  # whoever samples notices
                    await engine.policy()


async def _give_back(engine: Engine) -> None:
    with suppress(EngineLost, EngineError):  # one that is gone, or another's, cannot be given back
        await engine.reset()
        await engine.release()


def api_key(config: AnyServerConfig) -> str | None:
    """Return the key of the servers, if one is set."""
    return read_api_key(config.api_key_var)


def _headers(config: AnyServerConfig) -> dict[str, str]:
    key = api_key(config)
    return {"Authorization": f"Bearer {key}"} if key else {}


def _is_policy(body: bytes) -> bool:
    try:
        answer = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return False
    return isinstance(answer, dict) and {"step", "hash"} <= answer.keys()


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url):
            return True
    except (aiohttp.ClientError, TimeoutError):
        return False
