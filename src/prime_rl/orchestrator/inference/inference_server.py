"""One inference server: its version, whether it is up, and its load."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from loguru import logger

from prime_rl.core.daemon_futures import run_in_daemon_thread
from prime_rl.core.errors import ConfigError, RunError, summarize_exception
from prime_rl.core.types import PolicyVersion
from prime_rl.liveness.run_settings import RunSettings
from prime_rl.orchestrator.asyncio_utils import deadline_scope
from prime_rl.orchestrator.inference.concurrency_control import ConcurrencyController, ServerLoad
from prime_rl.orchestrator.inference.server_settings import UnfitServer
from prime_rl.rollouts.clients.inference_client import (
    InferenceClient,
    InferenceError,
    InferenceServerLost,
    LoadedPolicy,
)
from prime_rl.storage.artifact import MANIFEST, WEIGHTS_FORMAT, ArtifactError, read_manifest
from prime_rl.storage.fs_consistency import retry_until_complete
from prime_rl.storage.paths import step_of

_PROBE_S = 0.25
_FIRST_BACKOFF_S = 0.05
_LONGEST_BACKOFF_S = 2.0
"""The back-off doubles with each failure, from the first to the longest."""
_INVALID_WEIGHTS = (400, 422)
"""Status of invalid weights: they differ from what was published, or have a wrong canary."""
SERVER_ERRORS = (InferenceServerLost, InferenceError)
Answer = TypeVar("Answer")


FindProblem = Callable[[str, RunSettings], str | None]
"""Returns why the server at a URL, with some settings, cannot be used: `RequiredSettings.find_problem`."""


def accept_all(url: str, settings: RunSettings) -> None:
    """Accept a server with any settings."""


def may_recover(error: object) -> bool:
    """Return whether a server is lost or failed; it may be restarted."""
    return isinstance(error, InferenceServerLost) or (isinstance(error, InferenceError) and error.is_server_fault)


@contextmanager
def warn_of_failure(what: str) -> Iterator[None]:
    """Log a failed request instead of raising."""
    try:
        yield
    except SERVER_ERRORS as error:
        logger.warning("{}: {}", what, error)


class InvalidWeights(RunError):
    """A published version that must not be sampled from; the message names the file and the defect."""


@dataclass(frozen=True, slots=True)
class PublishedVersion:
    """A published version: the directory of its manifest, and the content hash of its weights.

    If `is_in_memory`, the weights are only in the trainer's memory, and only until a newer version is published.
    """

    directory: Path
    version: PolicyVersion
    hash: str
    is_in_memory: bool = False

    @classmethod
    def read(cls, directory: Path, timeout_s: float = 0.0) -> "PublishedVersion":
        """Read the manifest of `directory` and check the sizes of the files; retry for `timeout_s` seconds.

        Raises InvalidWeights if the manifest or a file is missing or wrong.
        """
        try:
            manifest = retry_until_complete(partial(read_manifest, directory, WEIGHTS_FORMAT), timeout_s)
            version = PolicyVersion(int(manifest["branch"]), int(manifest["step"]))
            content = str(manifest["hash"])
        except ArtifactError as error:
            raise InvalidWeights(str(error)) from None
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise InvalidWeights(f"{directory / MANIFEST} cannot be read: {summarize_exception(error)}") from None
        if version.step != step_of(directory):
            raise InvalidWeights(f"{directory / MANIFEST} declares step {version.step}")
        return cls(directory, version, content, manifest.get("transfer") is not None)


class InferenceServer:
    """One inference server. It starts as down; `InferencePool.start` brings it up.

    Attributes:
        client: the admin connection; rollouts use other connections, so a switch never queues behind them.
        version: the last version that it acknowledged.
        up: it receives rollouts.
        in_flight: rollouts that it samples; limited by `controller`.
        loading: step of the version that it is switching to; `switch_lock` is held meanwhile.
        rejected_step: step of a version that only this server rejects; it stays out until a newer one is published.
        failed_switches: consecutive switches that failed.
        last_load: the last reading of its /metrics, if any.
    """

    def __init__(
        self,
        client: InferenceClient,
        controller: ConcurrencyController,
        find_problem: FindProblem = accept_all,
    ) -> None:
        self.client = client
        self.controller = controller
        self._find_problem = find_problem
        self._settings: RunSettings = {}  # those that fitted
        self._refusal = ""  # that was logged last
        self.version = PolicyVersion(0, 0)
        self.up = False
        self.in_flight = 0
        self.loading: int | None = None
        self.rejected_step: int | None = None
        self.switch_lock = asyncio.Lock()
        self.failed_switches = 0
        self.last_load: ServerLoad | None = None
        self._faults = 0
        self._backoff_until = 0.0
        self._scopes = set[asyncio.Timeout]()

    async def policy(self) -> LoadedPolicy:
        """Return what it samples from, and renew the lease if this run holds it.

        Raises:
            UnfitServer: its settings do not fit those of the run.
            ConfigError: the settings of a trainer that has started since do not fit those of this server.
            InferenceServerLost, InferenceError: as `InferenceClient.policy`.
        """
        loaded = await self.client.policy()
        problem = self._find_problem(self.client.url, loaded.settings)
        if problem is None:
            self._settings, self._refusal = loaded.settings, ""
            return loaded
        raise (ConfigError if self.up and loaded.settings == self._settings else UnfitServer)(problem)

    def log_refusal(self, error: UnfitServer) -> None:
        """Log once why it is not used."""
        if str(error) != self._refusal:
            self._refusal = str(error)
            logger.warning("inference at {} is not used: {}", self.client.url, error)

    @asynccontextmanager
    async def cancel_scope(self) -> AsyncIterator[None]:
        """Raise InferenceServerLost from the block when `cancel_all` is called.

        Connections alone are not enough: that to a machine without power stays open until its own timeout.
        """
        async with deadline_scope(lambda: InferenceServerLost(f"inference at {self.client.url} died")) as scope:
            self._scopes.add(scope)
            try:
                yield
            finally:
                self._scopes.discard(scope)

    def cancel_all(self) -> None:
        """End all blocks inside `cancel_scope`."""
        now = asyncio.get_running_loop().time()
        scopes, self._scopes = self._scopes, set()
        for scope in scopes:
            scope.reschedule(now)

    @property
    def backoff_s(self) -> float:
        """Remaining seconds without new rollouts after a failure; a server that fails fast would otherwise get all."""
        return max(0.0, self._backoff_until - time.monotonic())

    def failed(self) -> float:
        """Start a back-off; return its length in seconds."""
        backoff_s = min(_FIRST_BACKOFF_S * 2.0 ** min(self._faults, 16), _LONGEST_BACKOFF_S)
        self._faults += 1
        self._backoff_until = time.monotonic() + backoff_s
        return backoff_s

    def succeeded(self) -> None:
        """Reset the back-off after a finished group."""
        self._faults, self._backoff_until = 0, 0.0

    def has_capacity(self, rollouts: int) -> bool:
        """Return whether it can take `rollouts` more; an idle server always can."""
        return self.in_flight == 0 or self.in_flight + rollouts <= self.controller.limit

    async def wait_until_reachable(self, timeout_s: float) -> None:
        """Poll until the server answers; raise RunError after `timeout_s` seconds, and otherwise as `policy`."""
        deadline = time.monotonic() + timeout_s
        logger.info("waiting for inference at {}", self.client.url)
        while True:
            try:
                await self.policy()
                return
            except SERVER_ERRORS as error:
                if not may_recover(error):
                    raise
                if time.monotonic() > deadline:
                    raise RunError(f"{error}; waited {timeout_s:.0f} s for it to start") from None
            await asyncio.sleep(_PROBE_S)

    async def stage(self, published: PublishedVersion) -> None:
        """Have the server read and check a version while it samples; raise InvalidWeights, or SERVER_ERRORS.

        Raises ConfigError if the settings of the trainer do not fit those of this server.
        """
        if (problem := self._find_problem(self.client.url, self._settings)) is not None:
            raise ConfigError(problem)
        async with self.cancel_scope():
            await self._request(self.client.stage, published)

    async def load(self, published: PublishedVersion) -> LoadedPolicy:
        """Switch to a version; the caller holds `switch_lock`.

        Raises as `stage`, InvalidWeights also after a wrong canary, and RunError if the server reports another version.
        """
        self.loading = published.version.step
        try:
            loaded = await self._request(self.client.load, published)
        finally:
            self.loading = None
        if loaded.version != published.version or loaded.hash != published.hash:
            raise RunError(
                f"inference at {self.client.url} loaded {loaded.version} ({loaded.hash}) but {published.directory} "
                f"holds {published.version} ({published.hash})"
            )
        self.version = published.version
        return loaded

    async def switch(self, published: PublishedVersion) -> LoadedPolicy | None:
        """Switch to a version, as `load`; None if the server was taken out meanwhile."""
        async with self.switch_lock:
            if not self.up or self.version.step > published.version.step:
                return None
            async with self.cancel_scope():
                return await self.load(published)

    async def _request(
        self, request: Callable[[str, PolicyVersion], Awaitable[Answer]], published: PublishedVersion
    ) -> Answer:
        """Make a request about a version, and turn the server's answer to invalid weights into InvalidWeights."""
        directory = await run_in_daemon_thread(published.directory.resolve)
        try:
            return await request(str(directory), published.version)
        except InferenceError as error:
            raise (InvalidWeights(str(error)) if error.status in _INVALID_WEIGHTS else error) from None
