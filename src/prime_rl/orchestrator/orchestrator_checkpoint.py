"""The orchestrator's part of checkpoint N: its state right after batch N - 1, written before that batch ships.

Batch N - 1 is on disk under a temporary name; then this part is written; then the batch is renamed. A trainer that
reads the batch therefore finds the part. The trainer commits the checkpoint. The part is a base of the ledger of the
next branch (`Ledger.start`) together with the pending groups, in the ledger's own encodings.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loguru import logger

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.core.errors import ConfigError, RunError
from prime_rl.core.types import Group
from prime_rl.orchestrator.ledger.pending_groups import decode_group, encode_group
from prime_rl.storage.artifact import read_manifest
from prime_rl.storage.checkpoint_artifacts import (
    ORCHESTRATOR,
    PART_FORMAT,
    check_hashes,
    hash_file,
    prepare_part,
    read_commit,
    seal_part,
)

_STATE, _GROUP = "state.json", "group_"
_SETTINGS = ("async_level", "batch_size", "rollouts_per_example")
"""Deadlines and sizes of the saved groups depend on these; groups that do not fit changed values are sampled again."""


@dataclass(frozen=True, slots=True)
class OrchestratorState:
    """The state of the orchestrator before batch `step`.

    Attributes:
        base: of the ledger that continues from here (`LedgerSnapshot.state_after`).
        finished: groups that wait to be shipped.
        lengths: `LengthHistory.state`.
    """

    step: int
    base: dict[str, Any]
    finished: Sequence[Group]
    lengths: dict[str, Any]


def write_checkpoint_part(
    checkpoint: Path, state: OrchestratorState, branch: int, batch_manifest: Path, config: OrchestratorConfig
) -> None:
    """Write the part durably into `checkpoint`, with the hash of the manifest of batch N - 1.

    Raises RunError if the disk is full, or the checkpoint is complete already.
    """
    try:
        with suppress(FileNotFoundError):  # a trainer rollback archived the incomplete checkpoint meanwhile: try again
            _write_part(checkpoint, state, branch, batch_manifest, config)
            return
        _write_part(checkpoint, state, branch, batch_manifest, config)
    except OSError as error:
        raise RunError(
            f"cannot save {checkpoint / ORCHESTRATOR}: {error.strerror}; earlier checkpoints are complete"
        ) from error


def _write_part(
    checkpoint: Path, state: OrchestratorState, branch: int, batch_manifest: Path, config: OrchestratorConfig
) -> None:
    temporary = prepare_part(checkpoint, ORCHESTRATOR)
    files = {f"{_GROUP}{group.group_id}.msgpack": encode_group(group) for group in state.finished}
    files[_STATE] = json.dumps({"base": state.base, "lengths": state.lengths}).encode()
    for name, data in files.items():
        (temporary / name).write_bytes(data)
    hashes = {name: hash_file(temporary / name) for name in files}
    settings = {key: getattr(config, key) for key in _SETTINGS} | {"environments": config.identities}
    fields = {"step": state.step, "branch": branch, "batch": hash_file(batch_manifest), "settings": settings}
    seal_part(temporary, checkpoint / ORCHESTRATOR, fields, hashes)


def read_checkpoint_part(checkpoint: Path, config: OrchestratorConfig) -> OrchestratorState:
    """Read the part of a committed checkpoint, if it has one, and check its hashes. Raises ConfigError, RunError."""
    if ORCHESTRATOR not in read_commit(checkpoint, only=ORCHESTRATOR).parts:
        raise ConfigError(
            f"{checkpoint} was written by a trainer without an orchestrator; only a trainer on recorded batches can "
            "resume from it"
        )
    part = checkpoint / ORCHESTRATOR
    check_hashes(part)
    manifest = read_manifest(part, PART_FORMAT)
    for key in _SETTINGS:
        if (now := getattr(config, key)) != (before := manifest["settings"][key]):
            logger.info("{} = {}, but {} when {} was written", key, now, before, checkpoint)
    for label, before in manifest["settings"].get("environments", {}).items():
        if (now := config.identities.get(label, before)) != before:
            logger.warning("environment {!r} is {}, but {} when {} was written", label, now, before, checkpoint)
    state = json.loads((part / _STATE).read_text())
    files = [part / name for name in sorted(manifest["files"]) if name.startswith(_GROUP)]
    finished = [decode_group(file.read_bytes(), file) for file in files]
    return OrchestratorState(manifest["step"], state["base"], finished, state["lengths"])
