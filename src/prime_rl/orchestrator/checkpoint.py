"""I3, I7: the orchestrator's part of checkpoint N is its state right after batch N - 1, written before that batch.

The batch is chosen and on the disk under its temporary name; then this part is written, and only then is the batch
renamed into place. So whoever trains on batch N - 1 finds the part, and no token in it is newer than version N - 1:
it is right however many batches are shipped ahead later. The trainer commits the checkpoint.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.errors import ConfigError, RunError
from prime_rl.orchestrator.ledger import Finished
from prime_rl.orchestrator.spool import decode_group, encode_group
from prime_rl.orchestrator.stream import Draw
from prime_rl.run.artifact import fsync, read_manifest
from prime_rl.run.checkpoints import (
    ORCHESTRATOR,
    PART_FORMAT,
    check_hashes,
    clear_unfinished,
    hash_file,
    read_commit,
    seal_part,
)

_STATE = "state.json"
_SETTINGS = ("async_level", "batch_size", "rollouts_per_example")
"""What the deadlines and sizes of the saved groups depend on."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The state of the orchestrator between two batches.

    Attributes:
        step: N: batches below are shipped.
        base: of the ledger that goes on from here (`Ledger.state_after`).
        finished: groups that wait to be shipped, with their deadlines.
        lengths: what is known of the lengths of completions (`LengthHistory.state`).
    """

    step: int
    base: dict[str, Any]
    finished: Sequence[Finished]
    lengths: dict[str, Any]

    @property
    def unfinished(self) -> list[Draw]:
        """Positions that were in flight, ascending: to be issued first."""
        finished = {known.group.group_id for known in self.finished}
        return [draw for draw, deadline in self._open if deadline is not None and draw.group_id not in finished]

    @property
    def waiting(self) -> list[Draw]:
        """Positions that were drawn and not dispatched, ascending."""
        return [draw for draw, deadline in self._open if deadline is None]

    @property
    def _open(self) -> list[tuple[Draw, int | None]]:
        return [(Draw(*item[:3]), item[4]) for item in self.base["positions"]["open"]]


def write_cut(checkpoint: Path, cut: Cut, branch: int, batch_manifest: Path, config: OrchestratorConfig) -> None:
    """Write the part into `checkpoint`, durably.

    Args:
        checkpoint: `checkpoints/step_N`.
        cut: the state.
        branch: of the run.
        batch_manifest: of batch N - 1, under whatever name: the part holds its hash.
        config: of the orchestrator.

    Raises:
        RunError: the disk is full ..., or the checkpoint is complete already.
    """
    try:
        try:
            _write_part(checkpoint, cut, branch, batch_manifest, config)
        except FileNotFoundError:  # a trainer that goes back has just put the unfinished checkpoint aside
            _write_part(checkpoint, cut, branch, batch_manifest, config)
    except OSError as error:
        raise RunError(
            f"cannot save {checkpoint / ORCHESTRATOR}: {error.strerror}; earlier checkpoints are whole"
        ) from error


def _write_part(checkpoint: Path, cut: Cut, branch: int, batch_manifest: Path, config: OrchestratorConfig) -> None:
    temporary = clear_unfinished(checkpoint, ORCHESTRATOR)
    rest = [
        {"group_id": known.group.group_id, "version": known.version, "deadline": known.deadline}
        for known in cut.finished
    ]
    files = {_group_file(known.group.group_id): encode_group(known.group) for known in cut.finished}
    state = {"base": cut.base, "finished": rest, "lengths": cut.lengths}
    files[_STATE] = json.dumps(state).encode()
    for name, data in files.items():
        (temporary / name).write_bytes(data)
        fsync(temporary / name)
    hashes = {name: hash_file(temporary / name) for name in files}
    settings = {key: getattr(config, key) for key in _SETTINGS}
    fields = {"step": cut.step, "branch": branch, "batch": hash_file(batch_manifest), "settings": settings}
    seal_part(temporary, checkpoint / ORCHESTRATOR, fields, hashes)


def read_cut(checkpoint: Path, config: OrchestratorConfig) -> Cut:
    """Read the part of a committed checkpoint, every byte checked.

    Raises:
        ConfigError: a trainer alone has written the checkpoint, or with settings that the saved groups do not suit.
        RunError: it is damaged.
    """
    if ORCHESTRATOR not in read_commit(checkpoint).parts:
        raise ConfigError(
            f"{checkpoint} was written by a trainer without an orchestrator, so the trainer alone can resume from it, "
            "on recorded batches"
        )
    part = checkpoint / ORCHESTRATOR
    check_hashes(part)
    manifest = read_manifest(part, PART_FORMAT)
    _check_settings(checkpoint, manifest["settings"], config)
    state = json.loads((part / _STATE).read_text())
    finished = [
        Finished(decode_group((part / _group_file(f["group_id"])).read_bytes()), f["version"], f["deadline"])
        for f in state["finished"]
    ]
    return Cut(manifest["step"], state["base"], finished, state["lengths"])


def _check_settings(checkpoint: Path, before: Mapping[str, Any], config: OrchestratorConfig) -> None:
    for key in _SETTINGS:
        if (now := getattr(config, key)) != before[key]:
            raise ConfigError(
                f"{key} = {now}, but {checkpoint} was written with {before[key]}, and holds groups of that; resume "
                "with the same"
            )


def _group_file(group_id: int) -> str:
    return f"group_{group_id}.msgpack"
