"""A trace or a memory snapshot of a few steps, on request."""

from pathlib import Path

import torch
from loguru import logger
from torch.profiler import ProfilerActivity, profile, schedule

from prime_rl.errors import ConfigError
from prime_rl.trainer.parallel import World
from prime_rl.trainer.start import check_writable

# The first step compiles and allocates, the second warms the profiler up, a few more say everything: a trace grows by
# some hundred megabytes a step.
_SKIPPED, _WARMUP, _TRACED = 1, 1, 2
LAST_TRACED = _SKIPPED + _WARMUP + _TRACED
"""Steps after which nothing more is recorded."""


class Profiler:
    """Records the third and fourth step of this process. Call `step` after each, and `close` after the last.

    Written are `trace_path`/rank_N.json (open it in Perfetto or chrome://tracing) and `memory_path`/rank_N.pickle (for
    pytorch.org/memory_viz).
    """

    def __init__(self, trace_path: Path | None, memory_path: Path | None, world: World) -> None:
        """Prepare; None records nothing of that kind.

        Raises:
            ConfigError: a memory snapshot is asked for without CUDA, or a directory cannot be made.
        """
        self._name, self._memory_path, self._steps = f"rank_{world.rank}", memory_path, 0
        if memory_path is not None and world.device.type != "cuda":
            raise ConfigError("memory_profiler_path: torch records the memory of CUDA devices only; leave it out")
        for key, path in (("trace_path", trace_path), ("memory_profiler_path", memory_path)):
            if path is not None:
                check_writable(key, path)
        self._trace: profile | None = None
        if trace_path is not None:
            target = trace_path / f"{self._name}.json"
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (world.device.type == "cuda")
            self._trace = profile(
                activities=activities,
                schedule=schedule(wait=_SKIPPED, warmup=_WARMUP, active=_TRACED, repeat=1),
                on_trace_ready=lambda recorded: _export(recorded, target),
                record_shapes=True,
            )
            self._trace.start()
        if memory_path is not None:
            torch.cuda.memory._record_memory_history()

    def step(self) -> None:
        """Say that a step has ended."""
        self._steps += 1
        if self._trace is not None:
            self._trace.step()
            if self._steps == LAST_TRACED:
                self.close()
        if self._memory_path is not None and self._steps == LAST_TRACED:
            target = self._memory_path / f"{self._name}.pickle"
            torch.cuda.memory._dump_snapshot(str(target))
            torch.cuda.memory._record_memory_history(enabled=None)
            logger.info("wrote a memory snapshot to {}", target)

    def close(self) -> None:
        """End a trace that is still being recorded; what it has by then is written if it got to the traced steps."""
        if self._trace is not None:
            self._trace.stop()
            self._trace = None


def _export(recorded: profile, target: Path) -> None:
    recorded.export_chrome_trace(str(target))
    logger.info("wrote a trace of {} steps to {}", _TRACED, target)
