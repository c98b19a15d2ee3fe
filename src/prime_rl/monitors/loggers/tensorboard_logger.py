"""TensorBoard: scalars and histograms in an event file, written without torch or TensorFlow."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.histogram_pb2 import HistogramProto
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from prime_rl.configs.loading.root_config import RootConfig
from prime_rl.configs.monitoring import TensorBoardConfig
from prime_rl.core.errors import translate_error, unwritable
from prime_rl.monitors.loggers.logger_base import MetricLogger

_NUM_BINS = 64


class TensorBoardLogger(MetricLogger):
    """One event file in `tensorboard/<role>` of the run directory; a resumed process adds another one.

    TensorBoard has no tables, and shows no figures of plotly.

    Raises:
        ConfigError: the file cannot be written.
    """

    name = "TensorBoard"

    def __init__(self, config: TensorBoardConfig, role: str, directory: Path, whole: RootConfig | None) -> None:
        folder = directory / "tensorboard" / role
        with translate_error(OSError, unwritable(f"tensorboard: {folder} cannot be written")):
            folder.mkdir(parents=True, exist_ok=True)
            self._writer = EventFileWriter(str(folder), flush_secs=config.flush_seconds)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log scalars."""
        self._write(step, [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()])

    def log_distributions(self, step: int, distributions: Mapping[str, NDArray[np.float64]]) -> None:
        """Log one histogram per name."""
        values = [
            Summary.Value(tag=f"distributions/{name}", histo=_histogram(values))
            for name, values in distributions.items()
        ]
        self._write(step, values)

    def summarize(self, values: Mapping[str, float]) -> None:
        """Log the values at step 0: TensorBoard has no summary."""
        self.log(0, values)

    def close(self) -> None:
        """Write the remaining values and close the file."""
        self._writer.close()

    def _write(self, step: int, values: Sequence[Summary.Value]) -> None:
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))


def _histogram(values: NDArray[np.float64]) -> HistogramProto:
    counts, edges = np.histogram(values, bins=_NUM_BINS)
    return HistogramProto(
        min=float(values.min()),
        max=float(values.max()),
        num=values.size,
        sum=float(values.sum()),
        sum_squares=float(np.square(values).sum()),
        bucket_limit=edges[1:].tolist(),
        bucket=counts.tolist(),
    )
