"""The loss on examples that are not trained on, every so many steps."""

import time
from collections.abc import Sequence

from loguru import logger

from prime_rl.configs.sft import SFTConfig
from prime_rl.monitor import Monitor
from prime_rl.trainer.engine import Engine
from prime_rl.trainer.parallel import World
from prime_rl.trainer.sft.objective import sft_objective, share_rows
from prime_rl.trainer.sft.stream import Row


class Validator:
    """Computes and reports `val/loss`: the mean over all learned tokens of the validation set, on any number of ranks.

    It is reported under the version of the weights, 0 before the first step.
    """

    def __init__(
        self, config: SFTConfig, rows: Sequence[Row] | None, engine: Engine, world: World, monitor: Monitor | None
    ) -> None:
        """Share out the packed rows; None does nothing ever. `monitor` is that of rank 0."""
        self._minibatch = None if rows is None else share_rows(rows, config.data.micro_batch_size, world)
        self._interval = config.val.interval if config.val is not None else 1
        self._engine, self._monitor = engine, monitor

    def __call__(self, version: int, last: bool = False) -> None:
        """Validate if `version` is the first or the `last`, or its turn has come. All ranks call it together."""
        if self._minibatch is None or (version % self._interval and not last):
            return
        start = time.perf_counter()
        loss = self._engine.evaluate(self._minibatch, sft_objective)
        if self._monitor is not None:
            self._monitor.log(version, {"val/loss": loss, "time/val": time.perf_counter() - start})
            logger.info(f"validation of version {version} | loss {loss:.4g}")
