"""Metrics and log line of a step, reported by rank 0."""

import time
from collections.abc import Mapping

import numpy as np
from loguru import logger
from numpy.typing import ArrayLike, NDArray

from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.monitors import Monitor
from prime_rl.storage.progress import Progress
from prime_rl.trainer.fsdp import compute_dtype
from prime_rl.trainer.metrics.rank_statistics import rank_statistics
from prime_rl.trainer.model.policy_model import PolicyModel
from prime_rl.trainer.model_flops import ModelFlops, peak_flops, peak_memory
from prime_rl.trainer.optim.lr_schedule import warn_if_warmup_exceeds_run
from prime_rl.trainer.parallel.process_group import World
from prime_rl.trainer.profiling import Profiler
from prime_rl.trainer.train_step import StepResult, TrainStep

_GIB = 1024**3
_SHOWN = {
    "loss": "loss",
    "grad_norm": "grad norm",
    "entropy": "entropy",
    "mismatch_kl": "mismatch",
    "lr": "lr",
    "perf/tokens_per_second": "tokens/s",
    "time/step": "seconds",
}
"""Metrics of the log line, and their labels."""
_WAITS = ("wait_for_batch", "load_data")
"""Laps in which a rank waits for data."""


class StepTimer:
    """Measures the phases of a step."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}  # seconds by name
        self.start = self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Record the time since the last lap as `name`."""
        now = time.perf_counter()
        self.laps[name], self._last = now - self._last, now


class StepReporter:
    """Computes throughput and passes the metrics of each step to the monitor."""

    def __init__(
        self,
        policy: PolicyModel,
        config: TrainerConfig | SFTConfig,
        world: World,
        monitor: Monitor | None,
        train_step: TrainStep,
    ) -> None:
        """`monitor` is None except on rank 0. Measures the peak FLOP/s of an unknown device."""
        self._profiler = Profiler(config.trace_path, config.memory_profiler_path, world)
        self._flops, self._world, self._monitor = ModelFlops.of(policy), world, monitor
        self._train_step = train_step
        if world.is_main:
            parameters = sum(p.numel() for p in policy.parameters())
            trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
            which = "" if trained == parameters else f" ({trained:,} trained)"
            logger.info(f"{config.model.name}: {parameters:,} parameters{which} on {world.size} x {world.device.type}")
            warn_if_warmup_exceeds_run(config.scheduler, config.max_steps)
        self._peak = peak_flops(world.device, compute_dtype(config.model.dtype, world.device)) if world.is_main else 0.0

    def report(
        self,
        step: int,
        result: StepResult,
        timer: StepTimer,
        lengths: NDArray[np.integer],
        scored: int,
        progress: Progress,
        publication: Mapping[str, float | None] | None = None,
        distributions: Mapping[str, ArrayLike] | None = None,
    ) -> None:
        """Report a step. All ranks call it together.

        `timer` has a lap `train`, and every lap becomes `time/<name>`. `lengths` are the tokens of each sample of the
        whole batch, `scored` the number of trained tokens, `progress` includes the step, `publication` are the metrics
        of the publisher, `distributions` values of sampled tokens by name.
        """
        self._profiler.step()
        own = {
            "time/step": time.perf_counter() - timer.start,
            **{f"time/{name}": timer.laps[name] for name in _WAITS if name in timer.laps},
            "time/synchronize": self._train_step.synchronize_seconds,
            "perf/peak_memory_gib": peak_memory(self._world.device) / _GIB,
        }
        over_ranks = rank_statistics(own, self._world)
        if self._monitor is None:
            return
        tokens, seconds, peak = int(lengths.sum()), timer.laps["train"], self._peak * self._world.size
        metrics = {
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            **result.layer_norms,
            **result.means,
            **result.rates,
            "optim/skipped": result.skipped,
            "tokens": tokens,
            **progress.metrics(),
            "world_size": self._world.size,
            **own,
            **over_ranks,
            **{f"time/{name}": seconds for name, seconds in timer.laps.items()},
            # Tokens without padding, and model FLOPs, per second of forward, backward and update.
            "perf/tokens_per_second": tokens / seconds,
            "perf/mfu": self._flops.total(lengths, scored) / seconds / peak,
            "perf/mfu_simple": self._flops.total_upstream(lengths) / seconds / peak,
            **(publication or {}),
        }
        self._monitor.log(step, metrics)
        if distributions:
            self._monitor.log_distributions(step, distributions)
        values = {label: metrics[name] for name, label in _SHOWN.items() if name in metrics}
        parts = [f"{label} {'-' if value is None else f'{value:.4g}'}" for label, value in values.items()]
        logger.info(f"step {step} | " + " | ".join(parts))

    def close(self) -> None:
        """Close the monitor and stop recording."""
        self._profiler.close()
        if self._monitor is not None:
            self._monitor.close()
