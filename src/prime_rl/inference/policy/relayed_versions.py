"""Copies published versions from relays to this node, for a server without the run's shared directory.

The orchestrator names a version by its directory; only the name `step_N` matters here. The copy has the same layout, so
checks, deltas and staging read it as they read the shared directory. It holds the newest requested version and its
bases.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
from loguru import logger

from prime_rl.configs.inference import InferenceConfig
from prime_rl.core.api_key import read_api_key
from prime_rl.core.errors import ConfigError, RunError, translate_error
from prime_rl.core.types import PolicyVersion
from prime_rl.inference.policy.delta_cache import cache_root, make_private
from prime_rl.inference.policy.weight_checks import WeightsRefusedError
from prime_rl.storage.artifact import ArtifactError, remove_artifact
from prime_rl.storage.paths import RunPaths, step_of
from prime_rl.storage.relay.relay_client import PARTIAL, RelayClient, RelayError, download_version
from prime_rl.storage.relay.run_files import ArtifactListing, ArtifactName, RunFiles

_RETRY_SECONDS = 0.25


@asynccontextmanager
async def relayed_versions(config: InferenceConfig) -> "AsyncIterator[RelayedVersions | None]":
    """Yield the copies of a server, inside its `cache_root`; None without `config.relay`.

    Raises:
        ConfigError: the directory cannot be used.
    """
    if config.relay is None:
        yield None
        return
    root = cache_root(config.weights_cache, config.server.port)
    with translate_error((ArtifactError, OSError), lambda error: ConfigError(f"weights_cache: {error}")):
        make_private(root)
    async with RelayClient(config.relay.urls, read_api_key(config.relay.api_key_var)) as client:
        yield RelayedVersions(client, root / "relayed", config.relay.timeout_seconds)


class RelayedVersions:
    """Copies of published versions in `root`."""

    def __init__(self, client: RelayClient, root: Path, timeout_seconds: float) -> None:
        """`timeout_seconds` is the longest time without a byte that was not here before."""
        self._client, self._files, self._timeout_seconds = client, RunFiles(RunPaths(root)), timeout_seconds

    async def copy(self, published: Path, version: PolicyVersion, overtaken: Callable[[], str | None]) -> Path:
        """Copy a version and its bases, and delete others; return its directory on this node.

        Relays that do not have it yet, or do not answer, are asked again until `timeout_seconds`.

        Args:
            published: its directory on the orchestrator's machine.
            version: the expected version.
            overtaken: returns why a newer request makes this one obsolete, if so.

        Raises:
            WeightsRefusedError: it was overtaken, or `published` is not named step_N.
            RunError: no relay sent it in time, or the disk is full.
        """
        step = step_of(published)
        if step is None:
            raise WeightsRefusedError(f"{published} is not named step_N; a server with relays loads published versions")
        name, limit_seconds = ArtifactName("weights", step), self._timeout_seconds
        largest = dict[tuple[ArtifactName, str], int]()
        """Sizes that copies have had. A relay that sends wrong bytes again and again adds nothing."""
        last = "no relay has sent a file"

        def check(artifact: ArtifactName, file: str, size: int) -> None:
            if size > largest.get((artifact, file), 0):
                largest[artifact, file] = size
                limit.reschedule(asyncio.get_running_loop().time() + limit_seconds)
            if (reason := overtaken()) is not None:
                raise WeightsRefusedError(reason)

        chain: list[ArtifactName] | None = None
        try:
            async with asyncio.timeout(limit_seconds) as limit:
                while chain is None:
                    try:
                        digest = await self._digest(name, version)
                        chain = await download_version(self._client, self._files, name, digest, check)
                    except RelayError as error:
                        last = str(error)
                        logger.debug("version {} is not here yet: {}", version, last)
                        if (reason := overtaken()) is not None:
                            raise WeightsRefusedError(reason) from None
                        await asyncio.sleep(_RETRY_SECONDS)
        except TimeoutError:
            raise RunError(f"{last}; nothing new for {limit_seconds:g} s (relay.timeout_seconds)") from None
        await asyncio.to_thread(self._delete_others, set(chain))
        return self._files.path(name)

    async def _digest(self, name: ArtifactName, version: PolicyVersion) -> str:
        """Return the hash of the manifest of a version. A relay may still have the version of an abandoned branch."""

        def is_it(listing: ArtifactListing) -> bool:
            with suppress(ValueError):
                return msgspec.json.decode(listing.manifest, type=_Declared) == _Declared(version.branch, version.step)
            return False

        listing = await self._client.listing(name, is_it)
        return listing.digest

    def _delete_others(self, chain: set[ArtifactName]) -> None:
        for name in self._files.artifacts("weights"):
            if name not in chain:
                remove_artifact(self._files.path(name))
        for partial in self._files.paths.weights_dir.glob(f"{PARTIAL}*"):
            shutil.rmtree(partial, ignore_errors=True)
        self._files.forget()


class _Declared(msgspec.Struct):
    """Version that a manifest states."""

    branch: int
    step: int
