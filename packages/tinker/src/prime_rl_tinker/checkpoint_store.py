"""Models and their checkpoints on disk, by `tinker://<model>/<weights|sampler_weights>/<name>`."""

import json
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prime_rl.storage.artifact import MANIFEST, remove_artifact, replace_file

_SCHEME = "tinker://"
_KINDS = {"weights": "training", "sampler_weights": "sampler"}
_NAME = re.compile(r"[A-Za-z0-9_][\w.+=-]{0,127}")
_MODEL = re.compile(r"[\w-]+:train:\d+")
NEW, OLD = ".new-", ".old-"
"""Prefixes of a checkpoint that replaces one of its name, and of the one that is replaced."""
SNAPSHOTS = "snapshots"
"""Folder of samplers without a name, which end with their session."""


class UnknownPathError(ValueError):
    """A path is malformed, or names nothing; the message says which."""


@dataclass(frozen=True, slots=True)
class CheckpointPath:
    """A parsed `tinker://` path."""

    model_id: str
    kind: str  # weights, sampler_weights
    name: str

    def __str__(self) -> str:
        return f"{_SCHEME}{self.model_id}/{self.kind}/{self.name}"

    @classmethod
    def parse(cls, path: str) -> "CheckpointPath":
        """Parse a path. Raises UnknownPathError if it is malformed."""
        parts = path.removeprefix(_SCHEME).split("/")
        is_path = path.startswith(_SCHEME) and len(parts) == 3
        if not is_path or parts[1] not in _KINDS or not _MODEL.fullmatch(parts[0]):
            raise UnknownPathError(f"{path!r} is not tinker://<run>/<weights|sampler_weights>/<name>")
        model_id, kind, name = parts
        return cls(model_id, kind, check_name(name))


def check_name(name: str) -> str:
    """Return the name of a checkpoint. Raises UnknownPathError if it could leave its folder."""
    if not _NAME.fullmatch(name):
        raise UnknownPathError(f"name {name!r} of a checkpoint: use up to 128 letters, digits and . _ + = -")
    return name


class CheckpointStore:
    """The folder `<root>/models/<model>` of each model: `model.json`, `weights/<name>`, `sampler_weights/<name>`."""

    def __init__(self, root: Path) -> None:
        self._root = root / "models"

    def recover(self) -> None:
        """Tidy up after a server that was killed, before another one starts: finish what replaced a checkpoint."""
        self.delete_snapshots("*")
        for new in self._root.glob(f"*/weights/{NEW}*/{MANIFEST}"):
            target = new.parent.with_name(new.parent.name.removeprefix(NEW))
            if not target.exists():
                new.parent.rename(target)

    def add_model(self, model_id: str, record: Mapping[str, Any]) -> None:
        """Record the properties of a new model."""
        folder = self._root / model_id
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / "model.json", json.dumps(dict(record)))

    def model(self, model_id: str) -> dict[str, Any]:
        """Return the properties of a model. Raises UnknownPathError if it is unknown."""
        file = self._root / model_id / "model.json"
        if not _MODEL.fullmatch(model_id) or not file.is_file():
            raise UnknownPathError(f"training run {model_id!r} does not exist")
        record: dict[str, Any] = json.loads(file.read_text())
        return record

    def model_ids(self) -> list[str]:
        """Return the known models, the newest first."""
        files = sorted(self._root.glob("*/model.json"), key=lambda file: file.stat().st_mtime, reverse=True)
        return [file.parent.name for file in files]

    def folder(self, path: CheckpointPath) -> Path:
        """Return the folder of a checkpoint, which may not exist."""
        return self._root / path.model_id / path.kind / path.name

    def snapshot(self, model_id: str, number: int) -> Path:
        """Return the folder of a sampler without a name."""
        return self._root / model_id / SNAPSHOTS / str(number)

    def find(self, path: str) -> tuple[CheckpointPath, Path]:
        """Return the checkpoint at `path`. Raises UnknownPathError if it does not exist or has expired."""
        parsed = CheckpointPath.parse(path)
        folder = self.folder(parsed)
        if not (folder / MANIFEST).is_file():
            raise UnknownPathError(f"{path} does not exist")
        if _has_expired(folder):
            raise UnknownPathError(f"{path} has expired")
        return parsed, folder

    def checkpoints(self, model_id: str) -> Iterator[dict[str, Any]]:
        """Yield the SDK's description of each checkpoint of a model, the oldest first."""
        found = [(kind, folder) for kind in _KINDS for folder in (self._root / model_id / kind).glob("[!.]*")]
        for kind, folder in sorted(found, key=lambda one: one[1].stat().st_mtime):
            if (folder / MANIFEST).is_file():
                fields = read_fields(folder)
                yield {
                    "checkpoint_id": f"{kind}/{folder.name}",
                    "checkpoint_type": _KINDS[kind],
                    "time": iso_time(fields["created_at"]),
                    "tinker_path": str(CheckpointPath(model_id, kind, folder.name)),
                    "size_bytes": sum(file.stat().st_size for file in folder.iterdir()),
                    "public": False,
                    "user_metadata": fields.get("user_metadata"),
                    "expires_at": None if fields.get("expires_at") is None else iso_time(fields["expires_at"]),
                }

    def delete(self, path: CheckpointPath) -> None:
        """Delete a checkpoint."""
        remove_artifact(self.folder(path))

    def delete_expired(self) -> None:
        """Delete the checkpoints whose time is over."""
        for kind in _KINDS:
            for file in self._root.glob(f"*/{kind}/[!.]*/{MANIFEST}"):
                if _has_expired(file.parent):
                    remove_artifact(file.parent)

    def delete_snapshots(self, session_id: str) -> None:
        """Delete the samplers without a name of a session; * of all."""
        for folder in self._root.glob(f"{session_id}:*/{SNAPSHOTS}"):
            shutil.rmtree(folder, ignore_errors=True)

    def set_expiry(self, path: CheckpointPath, seconds: float | None) -> None:
        """Let a checkpoint expire in `seconds`; None: never."""
        file = self.folder(path) / MANIFEST
        manifest = json.loads(file.read_text())
        now = time.time()
        manifest["tinker"]["expires_at"] = None if seconds is None else now + seconds
        replace_file(file, json.dumps(manifest))


def read_fields(folder: Path) -> dict[str, Any]:
    """Return what the server recorded with a checkpoint."""
    fields: dict[str, Any] = json.loads((folder / MANIFEST).read_text())["tinker"]
    return fields


def _has_expired(folder: Path) -> bool:
    """Whether a checkpoint's date is over; a client chose it, so the clock on the wall decides."""
    try:
        expires = read_fields(folder).get("expires_at")
    except FileNotFoundError:  # replaced or deleted at this moment
        return False
    now = time.time()
    return expires is not None and expires <= now


def iso_time(seconds: float) -> str:
    """Return Unix seconds as the SDK's timestamp."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()
