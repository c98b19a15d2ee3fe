"""Figures and metrics in W&B for a custom training loop.

run = setup_prime_rl_wandb(project_name="my-project", run_name="first")
tracker = RLMetricsTracker()
for step in range(100):
    ...
    tracker.log_rollout(step=step, rewards=rewards, sequence_lengths=lengths, advantages=advantages)
    log_prime_rl_metrics_to_wandb(wandb_run=run, step=step, rl_tracker=tracker, create_visualizations=step % 50 == 0)
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from prime_rl.monitors.figures import Figure, FigureHistory, check_plotly_installed

sys.modules[f"{__name__}.rl_metrics_tracker"] = sys.modules[__name__]  # an earlier path of this module


class RLMetricsTracker:
    """Statistics of the rollouts of each step, and the history that the figures show."""

    def __init__(self) -> None:
        self._history = FigureHistory()
        self._metrics: dict[str, float] = {}

    def log_rollout(
        self,
        step: int,
        rewards: Sequence[float],
        sequence_lengths: Sequence[int] | None = None,
        advantages: Sequence[float] | None = None,
    ) -> None:
        """Add the rollouts of a step; all sequences have one entry per rollout. Lengths are in tokens.

        Raises:
            ValueError: there are no rewards.
        """
        if not len(rewards):
            raise ValueError(f"step {step} has no rollouts")
        self._history.add_rollouts(step, rewards, () if advantages is None else advantages)
        self._metrics = _statistics("reward", rewards)
        if sequence_lengths is not None:
            self._metrics |= _statistics("seq_len", sequence_lengths)
        if advantages is not None:
            self._metrics |= _statistics("advantage", advantages)

    def log_gradients(self, step: int, norms: Sequence[float]) -> None:
        """Add the gradient norm of each layer, for the figure of the gradient flow."""
        self._history.add_metrics(step, {f"grad_norm/layer_{layer}": float(norm) for layer, norm in enumerate(norms)})

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the latest step: `reward/mean`, `reward/std`, `seq_len/max`, `advantage/mean` and so on."""
        return dict(self._metrics)

    def figures(self, three_d: bool = False) -> dict[str, Figure]:
        """Return the figures over all steps, by name."""
        return self._history.figures(three_d)


def setup_prime_rl_wandb(
    project_name: str = "prime-rl",
    run_name: str | None = None,
    config: Mapping[str, Any] | None = None,
    tags: Sequence[str] | None = None,
    **options: Any,
) -> Any:
    """Start a W&B run whose metrics have the axis `step`, and return it; `options` are those of `wandb.init`."""
    import wandb  # importing wandb takes a second

    run = wandb.init(
        project=project_name, name=run_name, config=dict(config or {}), tags=list(tags) if tags else None, **options
    )
    run.define_metric("*", step_metric="step")
    return run


def log_prime_rl_metrics_to_wandb(
    wandb_run: Any, step: int, rl_tracker: RLMetricsTracker, create_visualizations: bool = False, three_d: bool = False
) -> None:
    """Log the metrics of the latest step, and with `create_visualizations` the figures under `viz/`.

    Raises:
        ConfigError: figures are wanted, and plotly is not installed.
    """
    values: dict[str, Any] = {"step": step, **rl_tracker.metrics}
    if create_visualizations:
        check_plotly_installed("create_visualizations")
        import wandb
        from plotly.graph_objects import Figure as PlotlyFigure

        figures = rl_tracker.figures(three_d)
        values |= {f"viz/{name}": wandb.Plotly(PlotlyFigure(figure)) for name, figure in figures.items()}
    wandb_run.log(values)


def _statistics(name: str, values: Sequence[float]) -> dict[str, float]:
    array = np.asarray(values, dtype=np.float64)
    found = {"mean": array.mean(), "std": array.std(), "min": array.min(), "max": array.max()}
    return {f"{name}/{stat}": float(value) for stat, value in found.items()}
