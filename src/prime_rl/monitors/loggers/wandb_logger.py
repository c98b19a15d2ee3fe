"""Weights & Biases: scalars of every step, and tables of samples and distributions every few steps."""

import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import wandb
from loguru import logger
from numpy.typing import NDArray

from prime_rl.configs.loading.root_config import RootConfig
from prime_rl.configs.monitoring import WandbConfig
from prime_rl.core.errors import ConfigError, summarize_exception
from prime_rl.monitors.figures import Figure
from prime_rl.monitors.loggers.logger_base import MetricLogger, continues_earlier_run, table_of

PRIME_NAMES = {
    "rollout/mean_reward": "reward/mean",
    "rollout/max_reward": "reward/max",
    "rollout/min_reward": "reward/min",
    "rollout/std_reward": "reward/std",
    "rollout/mean_sequence_length": "seq_len/mean",
    "rollout/max_sequence_length": "seq_len/max",
    "rollout/min_sequence_length": "seq_len/min",
    "advantages/mean": "advantage/mean",
    "advantages/std": "advantage/std",
    "advantages/min": "advantage/min",
    "advantages/max": "advantage/max",
    "policy/loss": "loss",
    "policy/mean_logprob": "logprob/mean",
    "policy/entropy": "entropy",
    "policy/grad_norm": "grad_norm",
    "policy/learning_rate": "lr",
    "policy/mean_ratio": "importance_ratio/mean",
    "policy/clip_fraction": "importance_ratio/clipped",
    "train/world_size": "world_size",
    "train/step_time": "time/step",
    "train/sync_time": "time/synchronize",
    "train/tokens_per_second": "perf/tokens_per_second",
}
"""Names of nanochat's Prime guide, and ours. It spells only rollout/mean_reward and the groups before the slashes."""
_EVALUATED = re.compile(
    r"(eval|val)/(?:(?!/by/).)+/(pass@\d+|reward/mean|metrics/(?:categorical_accuracy|exact_match_reward))"
)
"""Metrics of an evaluation that the guide reads without the environment's name."""
_QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


class WandbLogger(MetricLogger):
    """One W&B run. A configured id continues or starts the run of that id; a resumed process continues its own run.

    While W&B cannot be reached, the run is logged offline, with a warning: a service that is down stops no training.

    Args:
        role: role of the process; the job type of the run.
        directory: the folder that contains W&B's `wandb` folder.
        whole: configuration of the process, shown with the run.

    Raises:
        ConfigError: there is no API key, or W&B rejects the settings.
    """

    name = "W&B"

    def __init__(self, config: WandbConfig, role: str, directory: Path, whole: RootConfig | None) -> None:
        names = PRIME_NAMES.items() if config.names else ()
        own = {alias: ours for alias, ours in names if role != "orchestrator" or not alias.startswith("train/")}
        self._aliases = own | config.metric_aliases
        self._evaluates = None if not config.names else "val" if getattr(whole, "val", None) is not None else "eval"
        known = directory / "wandb" / f"{role}.id"
        is_disabled = os.environ.get("WANDB_MODE") == "disabled"
        run_id = config.id or (known.read_text() if continues_earlier_run(whole) and known.exists() else None)
        start = partial(
            wandb.init,
            **config.model_dump(include={"project", "name", "entity", "group", "tags"}),
            id=run_id,
            resume="allow" if run_id else None,
            job_type=role,
            dir=directory,
            config=whole.model_dump(mode="json") if whole else None,
            settings=wandb.Settings(init_timeout=config.timeout_seconds, reinit="create_new"),
        )
        try:
            # WANDB_MODE = offline is not read: `wandb.offline` sets it.
            self._run = start(mode="offline" if config.offline else "disabled" if is_disabled else "online")
        except (wandb.errors.Error, TimeoutError) as error:
            # Without an answer, W&B repeats requests until `init_timeout`; a refusal is an error of another kind.
            if not isinstance(error, TimeoutError) and "timed out" not in str(error).lower():
                advice = "run `uv run wandb login`, set WANDB_API_KEY, or use --wandb.offline"
                raise ConfigError(f"wandb: {summarize_exception(error)}; {advice}") from None
            advice = "this run is logged offline, and `wandb sync` uploads it later"
            logger.warning("W&B cannot be reached; {}: {}", advice, summarize_exception(error))
            self._run = start(mode="offline")
        known.parent.mkdir(parents=True, exist_ok=True)
        known.write_text(self._run.id)
        # The step is an ordinary metric, because it decreases after a rollback; W&B's own counter cannot.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log scalars."""
        named = {alias: metrics[name] for alias, name in self._aliases.items() if name in metrics}
        evaluated: dict[str, list[float]] = {}
        for name, value in metrics.items() if self._evaluates else ():
            if (match := _EVALUATED.fullmatch(name)) and match[1] == self._evaluates:
                evaluated.setdefault(f"eval/{match[2].removeprefix('metrics/')}", []).append(value)
        named |= {name: float(np.mean(values)) for name, values in evaluated.items()}  # over the environments
        self._run.log({"step": step, **metrics, **named})

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log a table with one row per rollout; values that are no scalars are shown as JSON."""
        columns, data = table_of(step, rows)
        self._run.log({"step": step, "samples": wandb.Table(columns=columns, data=data)})

    def log_distributions(self, step: int, distributions: Mapping[str, NDArray[np.float64]]) -> None:
        """Log one histogram per name, and one table with all quantiles."""
        columns = ["step", "name", "count", "mean", *(f"q{quantile:g}" for quantile in _QUANTILES)]
        data = [
            [step, name, values.size, float(values.mean()), *np.quantile(values, _QUANTILES).tolist()]
            for name, values in distributions.items()
        ]
        histograms = {f"distributions/{name}": wandb.Histogram(values) for name, values in distributions.items()}
        self._run.log({"step": step, "distributions": wandb.Table(columns=columns, data=data), **histograms})

    def log_figures(self, step: int, figures: Mapping[str, Figure]) -> None:
        """Log figures by name."""
        from plotly.graph_objects import Figure as PlotlyFigure  # an optional package

        plots = {name: wandb.Plotly(PlotlyFigure(figure)) for name, figure in figures.items()}
        self._run.log({"step": step, **plots})

    def summarize(self, values: Mapping[str, float]) -> None:
        """Set values of the run's summary."""
        self._run.summary.update(dict(values))

    def close(self) -> None:
        """Upload the remaining data and finish the run."""
        self._run.finish()
