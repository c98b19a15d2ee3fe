"""`orchestrator.concurrency`: the number of rollouts in flight."""

from collections.abc import Iterator
from typing import ClassVar

from pydantic import Field

from prime_rl.configs.loading.base_config import BaseConfig


class ConcurrencyConfig(BaseConfig):
    """Limit of rollouts in flight that follows each server's load (/metrics). `max_concurrent` sets a fixed limit."""

    deprecated: ClassVar[dict[str, str]] = {"interval": "interval_seconds"}

    adaptive: bool = True
    """Adapt the limit; if false, `initial` is the limit of each server, or none if it is unset."""

    initial: int | None = Field(None, ge=1)
    """Initial limit per server; None is the number of sequences of seq_len that fit into the KV cache."""

    min: int = Field(8, ge=1)
    """Minimum rollouts in flight per server."""

    max: int = Field(4096, ge=1)
    """Maximum rollouts in flight per server."""

    interval_seconds: float = Field(1.0, gt=0)
    """Time between two reads of /metrics."""

    def without_effect(self) -> Iterator[tuple[str, str]]:
        """Report the keys of the adaptive limit if it is off."""
        if not self.adaptive:
            keys = ("min", "max", "interval_seconds")
            yield from ((key, "has no effect without concurrency.adaptive") for key in keys)
