"""I9 world size is invisible: means over the tokens of all ranks, from sums and counts that are reduced once a step."""

from collections.abc import Mapping

import torch
from torch import Tensor

from prime_rl.trainer.parallel import World

Weighted = tuple[Tensor, Tensor]
"""A sum and the count that it is divided by, scalars."""


class Means:
    """Running sums and counts by name. Every rank must add the same names."""

    def __init__(self) -> None:
        self._totals: dict[str, Tensor] = {}

    def add(self, values: Mapping[str, Weighted]) -> None:
        """Add sums and counts; they stay on the device, so nothing waits for it."""
        for name, pair in values.items():
            total = torch.stack([x.detach().double() for x in pair])
            self._totals[name] = self._totals[name] + total if name in self._totals else total

    def reduce(self, world: World) -> dict[str, float | None]:
        """Sum over all ranks and divide; None where nothing was counted or the mean is not finite."""
        names = sorted(self._totals)
        if not names:
            return {}
        totals = world.sum_rows(torch.stack([self._totals[name] for name in names])).tolist()
        means = {name: total / count if count else None for name, (total, count) in zip(names, totals, strict=True)}
        return {name: mean if mean is not None and abs(mean) < float("inf") else None for name, mean in means.items()}
