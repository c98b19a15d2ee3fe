"""Records a trace or a memory snapshot of a few steps."""

from pathlib import Path

import torch
from loguru import logger
from torch.profiler import ProfilerActivity, profile, schedule

from prime_rl.core.errors import ConfigError
from prime_rl.trainer.parallel.process_group import World
from prime_rl.trainer.process_setup import check_writable

# The first step compiles and allocates, the second warms up the profiler. A trace grows by some hundred megabytes a
# step.
_SKIPPED, _WARMUP, _TRACED = 1, 1, 2
_LAST_TRACED = _SKIPPED + _WARMUP + _TRACED


class Profiler:
    """Records the third and fourth step of this process. Call `step` after each, and `close` after the last.

    Writes `trace_path`/rank_N.json (for Perfetto or chrome://tracing) and `memory_path`/rank_N.pickle (for
    pytorch.org/memory_viz).
    """

    def __init__(self, trace_path: Path | None, memory_path: Path | None, world: World) -> None:
        """Start recording; None disables the trace or the snapshot.

        Raises ConfigError if a memory snapshot is requested without CUDA, or a directory is not writable.
        """
        self._name, self._memory_path, self._steps = f"rank_{world.rank}", memory_path, 0
        if memory_path is not None and world.device.type != "cuda":
            raise ConfigError("memory_profiler_path: torch records the memory of CUDA devices only; remove the key")
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
        """Count a completed step."""
        self._steps += 1
        if self._trace is not None:
            self._trace.step()
            if self._steps == _LAST_TRACED:
                self.close()
        if self._memory_path is not None and self._steps == _LAST_TRACED:
            target = self._memory_path / f"{self._name}.pickle"
            torch.cuda.memory._dump_snapshot(str(target))
            torch.cuda.memory._record_memory_history(enabled=None)
            logger.info("wrote a memory snapshot to {}", target)

    def close(self) -> None:
        """Stop a trace that is still recording; it is written if the traced steps were reached."""
        if self._trace is not None:
            self._trace.stop()
            self._trace = None


def _export(recorded: profile, target: Path) -> None:
    recorded.export_chrome_trace(str(target))
    logger.info("wrote a trace of {} steps to {}", _TRACED, target)
