"""Weights & Biases: scalars of every step, and tables of samples and distributions every few steps.

I7: training depends on no service. W&B is waited for at the start, as long as `wandb.timeout` says; what fails or hangs
later is told once, and the run goes on with `metrics/*.jsonl` alone.
"""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import wandb
from loguru import logger
from numpy.typing import ArrayLike

from prime_rl.configs.base import RootConfig
from prime_rl.configs.shared import WandbConfig
from prime_rl.errors import ConfigError, RunError
from prime_rl.monitor.jsonl import finite
from prime_rl.run.rewind import is_restart

_QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


class WandbRun:
    """One W&B run. An id goes on with the run of that id, or starts it; a resumed process goes on with its own."""

    def __init__(self, config: WandbConfig, role: str, directory: Path, whole: RootConfig | None) -> None:
        """Start the run.

        Args:
            config: its W&B settings.
            role: what the process is; the job type of the run.
            directory: W&B's files go to its `wandb` folder.
            whole: the process's configuration, shown with the run.

        Raises:
            ConfigError: no key, or settings that W&B refuses.
            RunError: W&B cannot be reached.
        """
        self._extras, self._timeout_s, self._works = config.log_extras, config.timeout, True
        known = directory / "wandb" / f"{role}.id"
        run_id = config.id or (known.read_text() if _goes_on(whole) and known.exists() else None)
        try:
            self._run = wandb.init(
                project=config.project,
                name=config.name,
                id=run_id,
                resume="allow" if run_id else None,
                entity=config.entity,
                group=config.group,
                tags=config.tags,
                job_type=role,
                dir=directory,
                mode="offline" if config.offline else "online",
                config=whole.model_dump(mode="json") if whole else None,
                settings=wandb.Settings(init_timeout=config.timeout),
            )
        except wandb.errors.UsageError as error:
            raise ConfigError(
                f"wandb: {_first_line(error)}; run `uv run wandb login`, set WANDB_API_KEY, or use --wandb.offline"
            ) from None
        except wandb.errors.CommError as error:
            raise RunError(f"wandb cannot be reached: {_first_line(error)}; --wandb.offline needs no network") from None
        known.parent.mkdir(parents=True, exist_ok=True)
        known.write_text(self._run.id)
        # The step is a metric like the others: after a rewind it goes back, which W&B's own counter never does.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Log scalars."""
        self._log({"step": step, **{name: value for name, value in finite(metrics).items() if value is not None}})

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log a table with one row per rollout; what is not a scalar is shown as JSON."""
        if self._extras is None or not self._extras.samples or step % self._extras.interval or not rows:
            return
        columns = ["step", *rows[0]]
        data = [[step, *(_cell(row.get(column)) for column in columns[1:])] for row in rows]
        self._log({"step": step, "samples": wandb.Table(columns=columns, data=data)})

    def log_distributions(self, step: int, distributions: Mapping[str, ArrayLike]) -> None:
        """Log one histogram per name, and one table with the quantiles of all."""
        if self._extras is None or not self._extras.distributions or step % self._extras.interval:
            return
        arrays = {name: np.asarray(values, dtype=np.float64).ravel() for name, values in distributions.items()}
        arrays = {name: values[np.isfinite(values)] for name, values in arrays.items()}
        arrays = {name: values for name, values in arrays.items() if values.size}
        columns = ["step", "name", "count", "mean", *(f"q{quantile:g}" for quantile in _QUANTILES)]
        data = [
            [step, name, values.size, float(values.mean()), *np.quantile(values, _QUANTILES).tolist()]
            for name, values in arrays.items()
        ]
        histograms = {f"distributions/{name}": wandb.Histogram(values) for name, values in arrays.items()}
        self._log({"step": step, "distributions": wandb.Table(columns=columns, data=data), **histograms})

    def close(self) -> None:
        """Upload what is left and mark the run finished; what takes too long is left in its folder."""
        if not self._works:
            return
        ending = threading.Thread(target=lambda: self._or_told(self._run.finish), name="wandb-end", daemon=True)
        ending.start()
        ending.join(self._timeout_s)
        if ending.is_alive():
            logger.warning(
                "W&B has not taken all within {:g} s (wandb.timeout); `wandb sync` uploads the rest", self._timeout_s
            )

    def _log(self, values: Mapping[str, Any]) -> None:
        if self._works:
            self._or_told(lambda: self._run.log(dict(values)))

    def _or_told(self, work: Callable[[], Any]) -> None:
        """Do it; where W&B cannot (its service has died, its folder is full), say so and do without from then on."""
        try:
            work()
        except (wandb.errors.Error, OSError) as error:
            self._works = False
            logger.warning("W&B is done without from now on: {}: {}", type(error).__name__, _first_line(error))


def _goes_on(config: RootConfig | None) -> bool:
    """Tell whether the process resumes a checkpoint, or is started again."""
    ckpt = getattr(config, "ckpt", None)
    resumes = ckpt is not None and ckpt.resume_step is not None
    return resumes or getattr(config, "restart", False) or is_restart()


def _cell(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, bool)) or value is None else json.dumps(value)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
