"""Blocks of the metric loggers other than W&B, whose block is in `shared`."""

from pydantic import Field

from prime_rl.loading.base_config import BaseConfig

NO_SAMPLES = "has no effect: only the orchestrator and eval have samples (orchestrator.{}.log_extras.samples)"
"""Reason why a command does not use `<logger>.log_extras.samples`."""


class LogExtrasConfig(BaseConfig):
    """Tables and histograms."""

    samples: bool = True
    """Log a table of rollouts with prompt, completion and reward: orchestrator (with advantage) and `eval`. TensorBoard
    has no tables."""

    distributions: bool = True
    """Log histograms. Orchestrator and `eval`: reward and completion length of each rollout, and its advantage.
    Trainer and `sft`: logprob, entropy, importance ratio, mismatch and advantage of up to 16384 tokens over all
    ranks."""

    interval: int = Field(10, ge=1)
    """Steps between two tables; `eval` logs each evaluation."""


class MetricLoggerConfig(BaseConfig):
    """Keys of every metric logger."""

    timeout_seconds: float = Field(60, gt=0)
    """Timeout at the end for the values that are not written yet."""

    log_extras: LogExtrasConfig | None = None
    """Tables and histograms; None logs scalars only."""

    def logs_distributions(self, step: int) -> bool:
        """Whether the distributions of a step are logged."""
        extras = self.log_extras
        return extras is not None and extras.distributions and step % extras.interval == 0


class TrackioConfig(MetricLoggerConfig):
    """trackio, a local replacement of W&B. Off unless this block is given. Needs the extra `trackio`."""

    project: str = "prime-rl"
    """Project of the run."""

    name: str | None = None
    """Name of the run; None uses the role of the process. `rl` logs two runs, NAME-trainer and NAME-orchestrator."""

    group: str | None = None
    """Group of the run; `rl` puts its two runs into one group."""


class TensorBoardConfig(MetricLoggerConfig):
    """TensorBoard, for output_dir/tensorboard. Off unless this block is given. Needs the extra `tensorboard`."""

    flush_seconds: float = Field(10, gt=0)
    """Longest time until a value is in the file."""
