"""Metrics as JSON lines: what one looks at without an account."""

import json
import math
import numbers
from collections.abc import Mapping
from pathlib import Path

from prime_rl.errors import ConfigError
from prime_rl.run.surroundings import told


class JsonLines:
    """Appends one JSON object a step. A line is written in one piece, so a reader never sees half of it as whole.

    What a process that died, or a full disk, has left of a line is cut off before the next one is written.
    """

    def __init__(self, path: Path) -> None:
        """Open `path` to append to it.

        Raises:
            ConfigError: it cannot be written.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._path, self._file = path, path.open("ab", buffering=0)
            self._cut_torn_line()
        except OSError as error:
            raise ConfigError(f"output_dir: {path} cannot be written: {error.strerror}; set --output-dir") from None

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Write the metrics of `step`; what is not finite becomes null, which JSON knows.

        Raises:
            SurroundingsError: the disk is full.
        """
        line = (json.dumps({"step": step, **finite(metrics)}, allow_nan=False) + "\n").encode()
        with told(f"write the metrics of step {step}", self._path):
            written = self._file.write(line)
            while written < len(line):  # the disk took a part; the next try says why
                written += self._file.write(line[written:])

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _cut_torn_line(self) -> None:
        data = self._path.read_bytes()
        if not data.endswith(b"\n"):
            self._file.truncate(data.rfind(b"\n") + 1)


def finite(metrics: Mapping[str, float | None]) -> dict[str, float | None]:
    """Turn NaN and infinity into None, and numpy scalars and bools into plain numbers."""
    return {name: _plain(value) for name, value in metrics.items()}


def _plain(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return int(value) if isinstance(value, numbers.Integral) else float(value)
