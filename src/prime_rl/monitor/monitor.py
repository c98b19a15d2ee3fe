"""One place for all a process reports: a JSON line a step, and Weights & Biases where it is configured."""

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import ArrayLike

from prime_rl.configs.base import RootConfig
from prime_rl.configs.shared import WandbConfig
from prime_rl.monitor.jsonl import JsonLines
from prime_rl.run.paths import RunPaths


class Monitor:
    """Metrics of one process.

    `metrics/<role>.jsonl` is always written; W&B, with its tables, only where configured.
    """

    def __init__(self, paths: RunPaths, role: str, wandb: WandbConfig | None, config: RootConfig | None = None) -> None:
        """Open the file, and the W&B run if there is one.

        Args:
            paths: the run directory.
            role: `trainer` or `orchestrator`.
            wandb: the W&B run; None for none.
            config: shown with the W&B run.

        Raises:
            ConfigError: W&B is configured but has no key.
            RunError: W&B cannot be reached.
        """
        self._lines = JsonLines(paths.metrics(role))
        self._run = None
        if wandb is not None:
            from prime_rl.monitor.wandb import WandbRun  # importing wandb takes a second

            self._run = WandbRun(wandb, role, paths.root, config)

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Report the metrics of a step; None stands for a metric that has no value this time."""
        self._lines.log(step, metrics)
        if self._run is not None:
            self._run.log(step, metrics)

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show rollouts as a table, one row each, every `log_extras.interval` steps."""
        if self._run is not None:
            self._run.log_samples(step, rows)

    def log_distributions(self, step: int, distributions: Mapping[str, ArrayLike]) -> None:
        """Show how values of a step are spread, every `log_extras.interval` steps.

        Args:
            step: the step.
            distributions: name -> values, any shape.
        """
        if self._run is not None:
            self._run.log_distributions(step, distributions)

    def close(self) -> None:
        """Flush and end; the W&B run is marked finished."""
        self._lines.close()
        if self._run is not None:
            self._run.close()
