"""What a step tells: one object of metrics for the monitor, one line for the log. Rank 0 alone speaks."""

import time
from collections.abc import Mapping

import numpy as np
from loguru import logger
from numpy.typing import NDArray

from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.monitor import Monitor
from prime_rl.trainer.engine import StepResult
from prime_rl.trainer.model import PolicyModel
from prime_rl.trainer.optim import warn_of_short_run
from prime_rl.trainer.parallel import World, compute_dtype
from prime_rl.trainer.perf import ModelFlops, peak_flops, peak_memory
from prime_rl.trainer.profile import Profiler

_GIB = 1024**3


class Stopwatch:
    """Names the stretches of a step.

    Attributes:
        laps: seconds by name.
    """

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._start = self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """End the stretch that ran since the last lap."""
        now = time.perf_counter()
        self.laps[name], self._last = now - self._last, now

    @property
    def total(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._start


class Reporter:
    """Computes throughput and hands every step's metrics to the monitor."""

    def __init__(
        self, policy: PolicyModel, config: TrainerConfig | SFTConfig, world: World, monitor: Monitor | None
    ) -> None:
        """Take the monitor of rank 0, None on the others. Measures the peak of the device where it is not known."""
        self._profiler = Profiler(config.trace_path, config.memory_profiler_path, world)
        self._flops, self._world, self._monitor = ModelFlops.of(policy), world, monitor
        if world.leads:
            parameters = sum(p.numel() for p in policy.parameters())
            trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
            which = "" if trained == parameters else f" ({trained:,} trained)"
            logger.info(f"{config.model.name}: {parameters:,} parameters{which} on {world.size} x {world.device.type}")
            warn_of_short_run(config.scheduler, config.max_steps)
        self._peak = peak_flops(world.device, compute_dtype(config.model.dtype, world.device)) if world.leads else 0.0

    def report(
        self,
        step: int,
        result: StepResult,
        clock: Stopwatch,
        lengths: NDArray[np.integer],
        scored: int,
        publication: Mapping[str, float | None] | None = None,
    ) -> None:
        """Report step `step`.

        Args:
            step: from 0.
            result: what the engine did.
            clock: with a lap `train`; every lap becomes `time/<name>`.
            lengths: tokens of each sample of the whole batch.
            scored: how many of them were trained.
            publication: metrics of the publisher.
        """
        self._profiler.step()
        if self._monitor is None:
            return
        metrics = {
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            **result.means,
            **result.rates,
            "optim/skipped": result.skipped,
            "tokens": int(lengths.sum()),
            "time/step": clock.total,
            **{f"time/{name}": seconds for name, seconds in clock.laps.items()},
            **self._performance(lengths, scored, clock.laps["train"]),
            **(publication or {}),
        }
        self._monitor.log(step, metrics)
        logger.info(_line(step, metrics))

    def _performance(self, lengths: NDArray[np.integer], scored: int, seconds: float) -> dict[str, float]:
        """Tokens (never padding) and model FLOPs per second of forward, backward and update."""
        peak = self._peak * self._world.size
        return {
            "perf/tokens_per_second": int(lengths.sum()) / seconds,
            "perf/mfu": self._flops.total(lengths, scored) / seconds / peak,
            "perf/mfu_upstream": self._flops.total_upstream(lengths) / seconds / peak,
            "perf/peak_memory_gib": peak_memory(self._world.device) / _GIB,
        }

    def close(self) -> None:
        """Flush and end the monitor and what is still being recorded."""
        self._profiler.close()
        if self._monitor is not None:
            self._monitor.close()


def _line(step: int, metrics: Mapping[str, float | None]) -> str:
    shown = {
        "loss": "loss",
        "grad_norm": "grad norm",
        "entropy": "entropy",
        "mismatch_kl": "mismatch",
        "lr": "lr",
        "perf/tokens_per_second": "tokens/s",
        "time/step": "seconds",
    }
    parts = [f"{label} {_number(metrics[name])}" for name, label in shown.items() if name in metrics]
    return f"step {step} | " + " | ".join(parts)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
