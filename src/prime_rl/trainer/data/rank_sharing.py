"""Divides the rendering and tokenizing of examples among the ranks; all ranks receive all results."""

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from prime_rl.trainer.checkpoints.rank_consensus import RankConsensus
from prime_rl.trainer.data.chat_rendering import RenderedSequence
from prime_rl.trainer.data.local_files import LocatedRow
from prime_rl.trainer.parallel.process_group import World

_PER_RANK = 16

Encode = Callable[[LocatedRow], list[RenderedSequence]]


class SharedEncoder:
    """Encodes examples on all ranks together. All ranks make the same calls, from one thread at a time."""

    def __init__(self, world: World | None = None) -> None:
        """Divide the work among the ranks of `world`; None does all of it in this process."""
        self._rank, self._size = (world.rank, world.size) if world is not None else (0, 1)
        self.examples_per_call, self._ranks = 1, None  # the number of examples that a call should have
        if world is not None and world.size > 1:
            # A separate group, because batches are made in a thread during the collectives of training.
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=world.timeout_s))
            self._ranks, self.examples_per_call = RankConsensus(world, group), _PER_RANK * world.size

    def __call__(self, rows: Sequence[LocatedRow], encode: Encode) -> list[RenderedSequence]:
        """Encode `rows`, the same on every rank, in order. Raises ConfigError on every rank if a row is invalid."""
        if self._ranks is None:
            return [sequence for row in rows for sequence in encode(row)]
        mine = rows[self._rank :: self._size]
        parts = self._ranks.gather(lambda: [encode(row) for row in mine])
        return [sequence for i in range(len(rows)) for sequence in parts[i % self._size][i // self._size]]
