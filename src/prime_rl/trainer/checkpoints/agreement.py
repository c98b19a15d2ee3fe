"""I7: what one rank finds out about files, all ranks know before the next collective, errors included."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from prime_rl.errors import ConfigError, RunError
from prime_rl.run.surroundings import describe
from prime_rl.trainer.parallel import World

Value = TypeVar("Value")


class Agreement:
    """Work on files that ends the same way on every rank. All ranks make the same calls."""

    def __init__(self, world: World, group: dist.ProcessGroup) -> None:
        """Talk over `group`, which nothing else may use at the same time."""
        self._world, self._group = world, group

    def gather(self, work: Callable[[], Value]) -> list[Value]:
        """Do `work` on every rank; return what all returned, or raise everywhere the first error of any.

        Raises:
            ConfigError, RunError: as `work`, whose OSError becomes a RunError.
        """
        value, error = _attempt(work)
        answers: list[Any] = [None] * self._world.size
        dist.all_gather_object(answers, (value, error), group=self._group)
        first = next((error for _, error in answers if error is not None), None)
        if first is not None:
            raise first
        return [value for value, _ in answers]

    def on_lead(self, work: Callable[[], Value]) -> Value:
        """Do `work` on rank 0 alone; return its answer, or raise its error, everywhere."""
        return self.gather(lambda: work() if self._world.leads else None)[0]  # type: ignore[return-value]

    def failure(self, work: Callable[[], None]) -> RunError | None:
        """Do `work` on every rank; return the first RunError of any, the same everywhere."""
        try:
            self.gather(work)
        except RunError as error:
            return error
        return None


def _attempt(work: Callable[[], Value]) -> tuple[Value | None, Exception | None]:
    try:
        return work(), None
    except (ConfigError, RunError) as error:
        return None, error
    except OSError as error:
        return None, RunError(describe(error))
