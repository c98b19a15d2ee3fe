"""Copies a policy version from relays, with the versions that it is a delta against."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from prime_rl.relay.relay_client import RelayClient, RelayError
from prime_rl.relay.run_files import ArtifactListing, ArtifactName, RunFiles
from prime_rl.storage.artifact import MANIFEST, ArtifactError
from prime_rl.storage.delta.chain import DeltaBase, base_of
from prime_rl.storage.paths import step_of


async def download_version(
    client: RelayClient,
    files: RunFiles,
    name: ArtifactName,
    digest: str | None = None,
    check: Callable[[ArtifactName], None] = lambda name: None,
) -> list[ArtifactName]:
    """Copy the version `name`, after the bases that are missing here; return it and its bases, the newest first.

    Args:
        client: the relays.
        files: the directory to copy to.
        name: the version.
        digest: hash of its manifest; None takes what the first relay has.
        check: called during each copy; raises to abort.

    Raises:
        RelayError, OSError: as `RelayClient.fetch`.
    """
    chain, missing = list[ArtifactName](), list[tuple[ArtifactName, str]]()
    base: DeltaBase | None = None
    while True:
        directory = files.path(name)
        text = _read_held(files, name, digest, base)
        if text is None:
            listing, _ = await client.listing(name, partial(_is_wanted, digest=digest, base=base))
            text = listing.manifest
            missing.append((name, listing.digest))
        chain.append(name)
        base = _base(directory, text)
        if base is None:
            break
        step = step_of(Path(base.name))
        assert step is not None, base  # `base_of` checks the name
        name, digest = ArtifactName("weights", step), None
    for wanted, expected in reversed(missing):
        await client.fetch(wanted, files.path(wanted), expected, partial(check, wanted))
    return chain


def _read_held(files: RunFiles, name: ArtifactName, digest: str | None, base: DeltaBase | None) -> str | None:
    """Return the manifest of the requested version, if it is here: the one with `digest`, or the `base` of a delta."""
    held = files.manifest_digest(name)
    if held is None or (base is None and held != digest):
        return None
    text = (files.path(name) / MANIFEST).read_text()
    return text if base is None or _is_base(text, base) else None


def _is_wanted(listing: ArtifactListing, digest: str | None, base: DeltaBase | None) -> bool:
    """Whether a relay has the requested version; None accepts any."""
    return digest in (None, listing.digest) and (base is None or _is_base(listing.manifest, base))


def _is_base(manifest: str, base: DeltaBase) -> bool:
    """Whether a version is the base of the delta, and not one that a rollback has abandoned."""
    fields: Any = json.loads(manifest)
    found = (fields.get("branch"), fields.get("step"), fields.get("hash"))
    return found == (base.version.branch, base.version.step, base.hash)


def _base(directory: Path, manifest: str) -> DeltaBase | None:
    try:
        return base_of(directory, json.loads(manifest))
    except (ArtifactError, ValueError) as error:
        raise RelayError(f"the manifest of {directory} is malformed: {error}") from None
