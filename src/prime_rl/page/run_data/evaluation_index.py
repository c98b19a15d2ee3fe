"""An index of the rollouts of evaluations, evals/: one line per example, with its rollouts."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from prime_rl.page.run_data.sample_index import IndexedRollout, SampleIndex
from prime_rl.storage.paths import RunPaths

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
            rollout.group_id, rollout.rollout, rollout.env = example.example, number, self._name
        return example.rollouts


def find_evaluations(paths: RunPaths) -> list[str]:
    """Return the folders of evals/ that contain rollouts: `<environment>` or `<environment>/<digest>`."""
    with suppress(OSError):
        folders = {file.parent for file in paths.evals_dir.glob("*/step_*.jsonl")}
        folders |= {file.parent for file in paths.evals_dir.glob(f"*/*/{OFFLINE_FILE}")}
        return sorted(str(folder.relative_to(paths.evals_dir)) for folder in folders)
    return []
