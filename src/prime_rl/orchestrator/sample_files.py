"""Writes the rollouts of each batch as text, for people and the page: samples/step_n.jsonl."""

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prime_rl.core.os_errors import wrap_os_errors
from prime_rl.core.types import Group
from prime_rl.storage.paths import RunPaths


class SampleFiles:
    """Writes `samples/step_n.jsonl`, one row per rollout.

    Args:
        paths: of the run.
        num_rollouts: rollouts per batch at most, in complete groups, at least one group; None keeps all.
        num_files: number of newest files to keep; None keeps all.
        identities: of the environments, by name.
    """

    def __init__(
        self,
        paths: RunPaths,
        num_rollouts: int | None = None,
        num_files: int | None = None,
        identities: Mapping[str, str | None] = MappingProxyType({}),
    ) -> None:
        self._identities = identities
        self._paths, self._num_rollouts, self._num_files = paths, num_rollouts, num_files
        self._oldest = 0

    def write(
        self, step: int, groups: Sequence[Group], advantages: Sequence[NDArray[np.float64]]
    ) -> list[dict[str, Any]]:
        """Write a part of batch `step`, delete old files, and return the rows. Blocks. Raises SystemResourceError.

        The text of a row is untrusted model output: escape it before showing it.
        """
        path, sizes, chosen = self._paths.samples(step), [len(g.rollouts) for g in groups], list(range(len(groups)))
        if self._num_rollouts is not None and self._num_rollouts < sum(sizes):  # groups at equal distances in the batch
            count = max(1, self._num_rollouts // max(sizes))
            chosen = [index * len(sizes) // count for index in range(count)]
        rows: list[dict[str, Any]] = [
            {
                "group_id": groups[i].group_id,
                "rollout": index,
                "env": groups[i].env,
                "identity": self._identities.get(groups[i].env),
                "reward": rollout.reward,
                **_credit(groups[i], index, advantages[i]),
                "metrics": rollout.metrics,
                "is_truncated": rollout.is_truncated,
                "min_version": min(int(s.versions[s.versions >= 0].min()) for s in rollout.samples),
                "max_version": max(int(s.versions.max()) for s in rollout.samples),
                "messages": [{"role": role, "content": content} for role, content in rollout.text],
            }
            for i in chosen
            for index, rollout in enumerate(groups[i].rollouts)
        ]
        with wrap_os_errors("write the samples of a batch", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        if self._num_files is not None:
            oldest = max(0, step + 1 - self._num_files)
            for old in range(self._oldest, oldest):
                self._paths.samples(old).unlink(missing_ok=True)
            self._oldest = oldest
        return rows


def _credit(group: Group, index: int, advantages: NDArray[np.float64]) -> dict[str, Any]:
    """Return the mean advantage of a rollout, and its credits with their advantages if it has any."""
    credits, (start, end) = group.rollouts[index].credits, group.part_offsets[index : index + 2]
    fields: dict[str, Any] = {"advantage": float(advantages[start:end].mean())}
    if credits:
        fields["credits"] = [
            {"name": credit.name, "reward": credit.reward, "advantage": float(advantage)}
            for credit, advantage in zip(credits, advantages[start:end], strict=True)
        ]
    return fields
