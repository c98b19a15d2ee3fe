"""One inference server as the orchestrator sees it: what it samples from, whether it lives, what it is given to do."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from loguru import logger

from prime_rl.errors import RunError
from prime_rl.orchestrator.concurrency import ConcurrencyController, Load, parse_load
from prime_rl.orchestrator.engine import Engine, EngineError, EngineLost, LoadedPolicy
from prime_rl.run.artifact import MANIFEST, WEIGHTS_FORMAT, ArtifactError, read_manifest
from prime_rl.run.paths import step_of
from prime_rl.run.visibility import settled
from prime_rl.types import PolicyVersion

_PROBE_S = 0.25
_BAR_S = 0.05
_LONGEST_BAR_S = 2.0
"""A server that fails is given nothing for so long at first, twice as long after the next failure, and so on."""
_REFUSALS = (400, 422)
"""Status of what is not sampled from: not what was published, and not what the trainer says it is."""


class VersionRefused(RunError):
    """A published version that is not to be sampled from; the message names the file and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Published:
    """A published version.

    Attributes:
        directory: where it is.
        version: which one.
        hash: content hash of its weights.
        is_in_memory: they are in no file, but in the trainer's memory, and only as long as the version is new.
    """

    directory: Path
    version: PolicyVersion
    hash: str
    is_in_memory: bool = False

    @classmethod
    def read(cls, directory: Path, patience_s: float = 0.0) -> "Published":
        """Read the manifest of `directory`, and check the files against it, by size.

        Args:
            directory: what has appeared.
            patience_s: how long it may take to be whole.

        Raises:
            VersionRefused: it has none, or one of another step, or files are missing or of another size.
        """
        try:
            manifest = settled(partial(read_manifest, directory, WEIGHTS_FORMAT), patience_s)
            version = PolicyVersion(int(manifest["branch"]), int(manifest["step"]))
            content = str(manifest["hash"])
        except ArtifactError as error:
            raise VersionRefused(str(error)) from None
        except OSError as error:
            raise VersionRefused(f"{error.filename or directory} cannot be read: {error.strerror}") from None
        except (KeyError, TypeError, ValueError) as error:
            raise VersionRefused(f"{directory / MANIFEST} is malformed: {type(error).__name__}: {error}") from None
        if version.step != step_of(directory):
            raise VersionRefused(f"{directory / MANIFEST} declares step {version.step}")
        return cls(directory, version, content, manifest.get("transfer") is not None)


class Server:
    """One inference server: what it has acknowledged to sample from, and what it is given to do.

    Attributes:
        engine: its admin connection; rollouts have connections of their own, so that a switch never queues behind them.
        version: what it samples from.
        up: it takes rollouts.
        in_flight: rollouts that it is playing.
        controller: how many it should be given.
        loading: step of the version that it is being switched to, if it is.
        rejects: step of the version that it alone refuses, if it does: it stays out until there is a newer one.
        failed_switches: to how many versions in a row it could not be switched by a fault of its own.
        steering: held by whoever switches it.
    """

    def __init__(self, engine: Engine, controller: ConcurrencyController) -> None:
        """Start as down, at version 0; `Policy.start` makes it true."""
        self.engine = engine
        self.controller = controller
        self.version = PolicyVersion(0, 0)
        self.up = False
        self.in_flight = 0
        self.loading: int | None = None
        self.rejects: int | None = None
        self.steering = asyncio.Lock()
        self.failed_switches = 0
        self._faults = 0
        self._barred_until = 0.0
        self._lives = set[asyncio.Timeout]()

    @asynccontextmanager
    async def life(self) -> AsyncIterator[None]:
        """End what runs inside with EngineLost as soon as `died` is called.

        A connection does not always tell: that of a machine that lost its power stays open until its own timeout.
        """
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._lives.add(scope)
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            raise EngineLost(f"inference at {self.engine.url} has died") from None
        finally:
            self._lives.discard(scope)

    def died(self) -> None:
        """End everything that runs inside `life`."""
        now = asyncio.get_running_loop().time()
        lives, self._lives = self._lives, set()
        for scope in lives:
            scope.reschedule(now)

    @property
    def bar_s(self) -> float:
        """Seconds for which it is given nothing yet, because it failed: one that fails at once would get everything."""
        return max(0.0, self._barred_until - time.monotonic())

    def failed(self) -> float:
        """Bar it for a while, longer each time; returns how long, seconds."""
        bar_s = min(_BAR_S * 2.0 ** min(self._faults, 16), _LONGEST_BAR_S)
        self._faults += 1
        self._barred_until = time.monotonic() + bar_s
        return bar_s

    def succeeded(self) -> None:
        """It has played a group to its end: earlier failures are forgotten."""
        self._faults, self._barred_until = 0, 0.0

    def has_room(self, rollouts: int) -> bool:
        """Tell whether it should be given so many more; always, where it has none."""
        return self.in_flight == 0 or self.in_flight + rollouts <= self.controller.limit

    async def until_reachable(self, timeout_s: float) -> None:
        """Ask until the server answers: one that is not up yet sends no event that could be waited for.

        Raises:
            RunError: it did not within `timeout_s` seconds.
        """
        deadline = time.monotonic() + timeout_s
        logger.info("waiting for inference at {}", self.engine.url)
        while True:
            try:
                await self.engine.policy()
                return
            except (EngineLost, EngineError) as error:
                if isinstance(error, EngineError) and not error.is_fault:
                    raise
                if time.monotonic() > deadline:
                    raise RunError(f"{error}; waited {timeout_s:.0f} s for it to start") from None
            await asyncio.sleep(_PROBE_S)

    async def load_figures(self) -> Load | None:
        """Read how busy it is; None where it does not say."""
        try:
            return parse_load(await self.engine.metrics())
        except (EngineLost, EngineError):
            return None  # `Policy.keep` notices a server that died; one without /metrics goes on without

    async def stage(self, published: Published) -> None:
        """Have a version read and checked while sampling goes on.

        Raises:
            VersionRefused: it is not what was published, or not for this model; in the server's words.
            EngineLost, EngineError: the server is gone, or refuses for another reason.
        """
        async with self.life():
            try:
                await self.engine.stage(str(published.directory.resolve()), published.version)
            except EngineError as error:
                raise _refusal(error) from None

    async def load(self, published: Published) -> LoadedPolicy:
        """Switch to a version; whoever calls holds `steering`.

        Raises:
            VersionRefused: as `stage`; or it was loaded, and is not what the trainer says that it is.
            RunError: the server says that it has loaded something else.
            EngineLost, EngineError: it is gone, or refuses for another reason.
        """
        self.loading = published.version.step
        try:
            loaded = await self.engine.load(str(published.directory.resolve()), published.version)
        except EngineError as error:
            raise _refusal(error) from None
        finally:
            self.loading = None
        if loaded.version != published.version or loaded.hash != published.hash:
            raise RunError(
                f"inference at {self.engine.url} loaded {loaded.version} ({loaded.hash}) where {published.directory} "
                f"holds {published.version} ({published.hash})"
            )
        self.version = published.version
        return loaded

    async def switch(self, published: Published) -> LoadedPolicy | None:
        """Switch to a version, as `load`; None if it was taken out meanwhile: it comes back with the newest."""
        async with self.steering:
            if not self.up or self.version.step > published.version.step:
                return None
            async with self.life():
                return await self.load(published)


def _refusal(error: EngineError) -> EngineError | VersionRefused:
    return VersionRefused(str(error)) if error.status in _REFUSALS else error
