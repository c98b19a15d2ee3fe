"""Indexes of rollouts: where each one is, and what it can be filtered by. The texts stay on disk.

`SampleIndex` is of samples/step_n.jsonl, `EvaluationIndex` of evals/, where a line is an example with its rollouts.
"""

import math
import os
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from prime_rl.core.json_lines import decode_object
from prime_rl.storage.paths import RunPaths

MAX_ROLLOUT_BYTES = 2**26
_ENTRY = np.dtype(
    [
        ("step", "i4"), ("offset", "i8"), ("length", "i4"), ("group_id", "i8"), ("rollout", "i4"), ("env", "i2"),
        ("is_truncated", "?"), ("min_version", "i4"), ("max_version", "i4"), ("reward", "f4"), ("advantage", "f4"),
        ("example", "i8"),
    ]
)  # fmt: skip
_MAX_ENVS = 1000
_PREVIEW_CHARACTERS = 160
_NUM_WATCHED = 2
"""Newest files that may still grow."""
ORDERS = {"step": "step", "reward": "reward", "advantage": "advantage", "staleness": "min_version"}


class IndexedRollout(msgspec.Struct):
    """The fields of a rollout that are indexed. The decoder skips the others, such as the conversation."""

    group_id: int = -1
    rollout: int = 0
    env: str = ""
    reward: float | None = None
    advantage: float | None = None
    is_truncated: bool = False
    min_version: int | None = None
    max_version: int | None = None
    example: int | None = None


class SampleFilter(BaseModel):
    """Conditions on rollouts, and their order, with the names that the URL of the page has; None means any.

    `text` is searched in the conversation, without regard to case.
    """

    step_from: int | None = None
    step_to: int | None = None
    env: str | None = None
    reward_from: float | None = None
    reward_to: float | None = None
    staleness_from: int | None = None
    truncated: bool | None = None
    group: int | None = None
    example: int | None = None
    noted: bool = False
    text: str | None = Field(None, max_length=500)
    order: str = "step"
    ascending: bool = False


class SampleIndex:
    """Indexes the newest files first. Every call works for a limited time, so a large run is indexed over several."""

    def __init__(self, paths: RunPaths) -> None:
        self._directory = paths.samples_dir
        self._decoder = msgspec.json.Decoder(IndexedRollout)
        self._files: dict[int, tuple[int, int]] = {}
        self._indexed: dict[int, tuple[tuple[int, int], NDArray[np.void]]] = {}
        self._listed = -1
        self._all: NDArray[np.void] | None = None
        self.env_names: list[str] = []
        self.num_damaged = 0

    @property
    def steps(self) -> list[int]:
        """Steps with a sample file, ascending."""
        return sorted(self._files)

    def refresh(self, budget_seconds: float) -> bool:
        """Read new and changed files for a limited time, at least one. Return whether all are indexed."""
        end = time.monotonic() + budget_seconds
        self._list_files()
        pending = sorted((step for step, sign in self._files.items() if self._signature(step) != sign), reverse=True)
        for number, step in enumerate(pending):
            if number and time.monotonic() > end:
                return False
            self._indexed[step] = self._files[step], self._read_file(step)
            self._all = None
        return True

    def search(
        self,
        wanted: SampleFilter,
        position: int,
        count: int,
        budget_seconds: float,
        noted: Collection[tuple[int, int, int]] = (),
    ) -> dict[str, Any]:
        """Return `count` rollouts at most, from `position` on in the order of the filter; of equal ones the newest.

        `num_matching` are the rollouts that match the filter without its text. The following rows begin at
        `next_position` (None at the end). `noted` are the steps, groups and rollouts with a note.
        Of `num_files` sample files, `num_indexed` have been read.
        """
        self.refresh(budget_seconds)
        entries = self.entries()
        mask = self._mask(entries, wanted)
        if wanted.noted:
            keys = entries[["step", "group_id", "rollout"]].tolist()
            mask &= np.fromiter((key in noted for key in keys), bool, len(keys))
        chosen = np.flatnonzero(mask)
        key = entries[ORDERS.get(wanted.order, "step")][chosen].astype(np.float64)
        if wanted.order == "staleness":
            key = entries["step"][chosen] - key
        chosen = chosen[np.lexsort((-entries["step"][chosen], key if wanted.ascending else -key))]
        rows: list[dict[str, Any]] = []
        needle = wanted.text.casefold() if wanted.text else None
        end = time.monotonic() + budget_seconds
        while position < len(chosen) and len(rows) < count and (not rows or time.monotonic() < end or needle is None):
            entry = entries[chosen[position]]
            row = self.read(entry)
            position += 1
            if needle is None or (row is not None and needle in conversation_text(row).casefold()):
                place = int(entry["step"]), int(entry["group_id"]), int(entry["rollout"])
                rows.append({**self.describe(entry), "preview": preview(row), "is_noted": place in noted})
            elif time.monotonic() > end:
                break
        more = position if position < len(chosen) else None
        num_indexed = sum(self._signature(step) == sign for step, sign in self._files.items())
        return {
            "rows": rows, "num_matching": len(chosen), "next_position": more,
            "num_files": len(self._files), "num_indexed": num_indexed, "num_damaged": self.num_damaged,
            "envs": sorted(self.env_names), "newest_step": max(self._files, default=None),
        }  # fmt: skip

    def find(self, step: int, group_id: int) -> list[np.void]:
        """The rollouts of a group in batch `step`, by index."""
        self._list_files()
        if step not in self._files:
            return []
        if self._signature(step) != self._files[step]:
            self._indexed[step] = self._files[step], self._read_file(step)
            self._all = None
        entries = self._indexed[step][1]
        found = entries[entries["group_id"] == group_id]
        return list(found[np.argsort(found["rollout"], kind="stable")])

    def read(self, entry: np.void) -> dict[str, Any] | None:
        """Read the line of a rollout; None if it is gone or damaged."""
        with suppress(OSError), self._path(int(entry["step"])).open("rb") as file:
            file.seek(int(entry["offset"]))
            return decode_object(file.read(int(entry["length"])), math.inf)
        return None

    def entries(self) -> NDArray[np.void]:
        """All indexed rollouts, in order of the steps."""
        if self._all is None:
            parts = [self._indexed[step][1] for step in sorted(self._indexed)]
            self._all = np.concatenate(parts) if parts else np.zeros(0, _ENTRY)
        return self._all

    def describe(self, entry: np.void) -> dict[str, Any]:
        """The indexed fields of a rollout for the page."""
        env, version = int(entry["env"]), int(entry["min_version"])
        return {
            "step": int(entry["step"]),
            "group": int(entry["group_id"]),
            "rollout": int(entry["rollout"]),
            "env": self.env_names[env],
            "example": int(entry["example"]) if entry["example"] >= 0 else None,
            "reward": _rounded(entry["reward"]),
            "advantage": _rounded(entry["advantage"]),
            "is_truncated": bool(entry["is_truncated"]),
            "min_version": version if version >= 0 else None,
            "max_version": int(entry["max_version"]) if version >= 0 else None,
            "staleness": int(entry["step"]) - version if version >= 0 else None,
        }

    def _mask(self, entries: NDArray[np.void], wanted: SampleFilter) -> NDArray[np.bool_]:
        mask = np.ones(len(entries), dtype=bool)
        for limit, column, is_lower in (
            (wanted.step_from, entries["step"], True),
            (wanted.step_to, entries["step"], False),
            (wanted.reward_from, entries["reward"], True),
            (wanted.reward_to, entries["reward"], False),
        ):
            if limit is not None:
                mask &= column >= limit - 1e-6 if is_lower else column <= limit + 1e-6
        if wanted.staleness_from is not None:
            mask &= (entries["min_version"] >= 0) & (entries["step"] - entries["min_version"] >= wanted.staleness_from)
        if wanted.truncated is not None:
            mask &= entries["is_truncated"] == wanted.truncated
        for name, number in (("group_id", wanted.group), ("example", wanted.example)):
            if number is not None:
                mask &= entries[name] == number
        if wanted.env is not None:
            known = wanted.env in self.env_names
            mask &= entries["env"] == (self.env_names.index(wanted.env) if known else -1)
        return mask

    def _list_files(self) -> None:
        """List the files when the folder has changed; otherwise look at the newest ones only."""
        try:
            changed = self._directory.stat().st_mtime_ns
        except OSError:
            self._files, self._indexed, self._all = {}, {}, None
            return
        if changed != self._listed:
            self._files = {
                step: sign
                for entry in _scan(self._directory)
                if (sign := _sign(entry)) and (step := self._step(entry.name)) is not None
            }
            for step in self._indexed.keys() - self._files.keys():
                del self._indexed[step]
                self._all = None
            self._listed = changed
        for step in sorted(self._files)[-_NUM_WATCHED:]:
            with suppress(OSError):
                status = self._path(step).stat()
                self._files[step] = status.st_size, status.st_mtime_ns

    def _signature(self, step: int) -> tuple[int, int] | None:
        return self._indexed[step][0] if step in self._indexed else None

    def _read_file(self, step: int) -> NDArray[np.void]:
        found: list[tuple[Any, ...]] = []
        offset = 0
        with suppress(OSError), self._path(step).open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                try:
                    if len(line) > MAX_ROLLOUT_BYTES:
                        raise ValueError
                    rows = self._decode(line)
                    if not all(-(2**63) <= row.group_id < 2**63 and -(2**31) <= row.rollout < 2**31 for row in rows):
                        raise ValueError
                except (msgspec.MsgspecError, ValueError):
                    rows = []
                    self.num_damaged += 1
                entries = (self._entry(step, offset, len(line), row) for row in rows)
                found += [entry for entry in entries if entry is not None]
                offset += len(line)
        return np.array(found, dtype=_ENTRY)

    def _path(self, step: int) -> Path:
        return self._directory / f"step_{step}.jsonl"

    def _step(self, name: str) -> int | None:
        number = name.removeprefix("step_").removesuffix(".jsonl")
        return int(number) if name == f"step_{number}.jsonl" and number.isdecimal() and len(number) < 10 else None

    def _decode(self, line: bytes) -> Sequence[IndexedRollout]:
        """The rollouts of a line. Raises MsgspecError or ValueError if it is damaged."""
        return [self._decoder.decode(line)]

    def _entry(self, step: int, offset: int, length: int, row: IndexedRollout) -> tuple[Any, ...] | None:
        if row.env not in self.env_names:
            if len(self.env_names) == _MAX_ENVS:
                self.num_damaged += 1
                return None
            self.env_names.append(row.env)
        reward, advantage = (np.nan if value is None else value for value in (row.reward, row.advantage))
        low, high = (
            -1 if value is None or not 0 <= value < 2**31 else value for value in (row.min_version, row.max_version)
        )
        env = self.env_names.index(row.env)
        example = row.example if row.example is not None and 0 <= row.example < 2**63 else -1
        ids = step, offset, length, row.group_id, row.rollout, env, row.is_truncated
        return *ids, low, high, reward, advantage, example


def conversation_text(row: dict[str, Any]) -> str:
    """The contents of the messages of a rollout, joined; model output: untrusted."""
    return "\n".join(content for content in _contents(row))


def preview(row: dict[str, Any] | None) -> str:
    """The beginning of the last message."""
    contents = list(_contents(row)) if row is not None else []
    return " ".join(contents[-1][: 2 * _PREVIEW_CHARACTERS].split())[:_PREVIEW_CHARACTERS] if contents else ""


def _contents(row: dict[str, Any]) -> Iterator[str]:
    messages = row.get("messages")
    for message in messages if isinstance(messages, list) else []:
        if isinstance(message, dict):
            content = message.get("content")
            yield content if isinstance(content, str) else str(content or "")


def _rounded(value: Any) -> float | None:
    return float(f"{float(value):.5g}") if np.isfinite(value) else None


def _scan(directory: Path) -> Iterator[os.DirEntry[str]]:
    with suppress(OSError), os.scandir(directory) as entries:
        yield from entries


def _sign(entry: os.DirEntry[str]) -> tuple[int, int] | None:
    with suppress(OSError):
        status = entry.stat()
        return status.st_size, status.st_mtime_ns
    return None


OFFLINE_FILE = "rollouts.jsonl"
"""Written by the command `eval` into evals/<environment>/<digest>/; online evaluations write step_<version>.jsonl."""


class _Example(msgspec.Struct):
    """The fields of a line that are indexed."""

    example: int
    rollouts: list[IndexedRollout] = []


class EvaluationIndex(SampleIndex):
    """The rollouts of one environment: the step is the version (0 for `eval`), the group is the example.

    Args:
        name: the folder in evals/, from `find_evaluations`.
    """

    def __init__(self, paths: RunPaths, name: str) -> None:
        super().__init__(paths)
        self._name, self._directory = name, paths.evals_dir / name
        self._examples = msgspec.json.Decoder(_Example)

    def read(self, entry: np.void) -> dict[str, Any] | None:
        """Read one rollout of the line of its example; None if it is gone or damaged."""
        row = super().read(entry)
        rollouts = row.get("rollouts") if row is not None else None
        index = int(entry["rollout"])
        found = rollouts[index] if isinstance(rollouts, list) and index < len(rollouts) else None
        return found if isinstance(found, dict) else None

    def describe(self, entry: np.void) -> dict[str, Any]:
        """The indexed fields of a rollout for the page. An evaluation has no staleness."""
        return {**super().describe(entry), "staleness": None}

    def _path(self, step: int) -> Path:
        offline = self._directory / OFFLINE_FILE
        return offline if offline.exists() else super()._path(step)

    def _step(self, name: str) -> int | None:
        return 0 if name == OFFLINE_FILE else super()._step(name)

    def _decode(self, line: bytes) -> Sequence[IndexedRollout]:
        example = self._examples.decode(line)
        for number, rollout in enumerate(example.rollouts):
            rollout.group_id = rollout.example = example.example
            rollout.rollout, rollout.env = number, self._name
        return example.rollouts


def find_evaluations(paths: RunPaths) -> list[str]:
    """Return the folders of evals/ that contain rollouts: `<environment>` or `<environment>/<digest>`."""
    with suppress(OSError):
        folders = {file.parent for file in paths.evals_dir.glob("*/step_*.jsonl")}
        folders |= {file.parent for file in paths.evals_dir.glob(f"*/*/{OFFLINE_FILE}")}
        return sorted(str(folder.relative_to(paths.evals_dir)) for folder in folders)
    return []
