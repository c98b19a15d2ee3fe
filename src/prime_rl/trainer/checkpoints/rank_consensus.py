"""Runs work on files with the same result on every rank: an error of one rank is raised on all of them (I7)."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from prime_rl.core.errors import ConfigError, RunError
from prime_rl.core.os_errors import summarize_os_error
from prime_rl.trainer.parallel.process_group import World

Value = TypeVar("Value")


class RankConsensus:
    """Runs work with the same result on every rank. All ranks make the same calls."""

    def __init__(self, world: World, group: dist.ProcessGroup) -> None:
        """Communicate over `group`, which nothing else may use at the same time."""
        self._world, self._group = world, group

    def gather(self, work: Callable[[], Value]) -> list[Value]:
        """Do `work` on every rank; return all results by rank, or raise the first rank's error on every rank.

        Raises:
            ConfigError, RunError: as `work`, whose OSError becomes a RunError.
        """
        value, error = None, None
        try:
            value = work()
        except (ConfigError, RunError, OSError) as caught:
            error = RunError(summarize_os_error(caught)) if isinstance(caught, OSError) else caught
        answers: list[Any] = [None] * self._world.size
        dist.all_gather_object(answers, (value, error), group=self._group)
        first = next((error for _, error in answers if error is not None), None)
        if first is not None:
            raise first
        return [value for value, _ in answers]

    def on_main(self, work: Callable[[], Value]) -> Value:
        """Do `work` on rank 0 alone; return its result, or raise its error, on every rank."""
        return self.gather(lambda: work() if self._world.is_main else None)[0]  # type: ignore[return-value]
