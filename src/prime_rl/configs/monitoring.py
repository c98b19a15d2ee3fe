"""`wandb`, `trackio`, `tensorboard` and `mlflow`: the metric loggers."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from prime_rl.configs.lists import StrList
from prime_rl.configs.loading.base_config import BaseConfig, common
from prime_rl.configs.loading.root_config import RootConfig

NO_SAMPLES = "has no effect: only the orchestrator and eval have samples (orchestrator.{}.log_extras.samples)"
"""Reason why a command does not use `<logger>.log_extras.samples`."""
WANDB_ALIASES: dict[str, str] = {"monitor.wandb": "wandb"}
"""Upstream's name of the W&B block, accepted by every command that logs to W&B."""


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


class WandbExtrasConfig(LogExtrasConfig):
    """Tables, histograms and figures."""

    figures: bool = False
    """Log figures under viz/: reward landscape, advantage distribution and pass@k (orchestrator), gradient flow
    (trainer). Needs the extra `plots`."""

    figure_interval: int = Field(50, ge=1)
    """Steps between two updates of the figures; the last one comes at the end."""

    figures_3d: bool = False
    """Draw surfaces instead of heatmaps."""

    def without_effect(self) -> Iterator[tuple[str, str]]:
        """Report the keys of figures if they are off."""
        if not self.figures:
            yield from ((key, "has no effect without figures") for key in ("figure_interval", "figures_3d"))


class MetricLoggerConfig(BaseConfig):
    """Keys of every metric logger.

    Attributes:
        logger: module:class in `monitors.loggers`.
        packages: what the extra with the name of the block installs.
    """

    logger: ClassVar[str]
    packages: ClassVar[tuple[str, ...]] = ()

    timeout_seconds: float = Field(60, gt=0)
    """Timeout at the end for the values that are not written yet."""

    log_extras: LogExtrasConfig | None = None
    """Tables and histograms; None logs scalars only."""

    def logs_distributions(self, step: int) -> bool:
        """Whether the distributions of a step are logged."""
        extras = self.log_extras
        return extras is not None and extras.distributions and step % extras.interval == 0


class WandbConfig(MetricLoggerConfig):
    """Weights & Biases. Off unless this block is given. `rl` logs two runs, NAME-trainer and NAME-orchestrator."""

    deprecated: ClassVar[dict[str, str]] = {"timeout": "timeout_seconds"}
    logger: ClassVar[str] = "wandb_logger:WandbLogger"

    project: str = Field("prime-rl", json_schema_extra=common("Logging"))
    """Project of the run."""

    name: str | None = None
    """Name of the run; None lets W&B choose one."""

    id: str | None = None
    """Id of an earlier run to continue; None starts a new one. Trainer and orchestrator have separate ids."""

    entity: str | None = None
    """User or team that owns the project; None uses the account's default."""

    group: str | None = None
    """Group of the run; `rl` puts its two runs into one group."""

    tags: StrList = Field([])
    """Tags of the run."""

    offline: bool = False
    """Log to the run directory only, without an account; `wandb sync` uploads it later."""

    timeout_seconds: float = Field(120, gt=0)
    """Timeout for the connection at the start and for the upload at the end."""

    log_extras: WandbExtrasConfig | None = Field(default_factory=WandbExtrasConfig)
    """Tables, histograms and figures; None logs scalars only."""

    names: Literal["prime"] | None = None
    """Also log names that dashboards of nanochat's Prime guide read, such as rollout/mean_reward and policy/loss."""

    metric_aliases: dict[str, str] = Field({})
    """Further names of metrics, for dashboards with other names: `{"rollout/mean_reward" = "reward/mean"}`."""


class TrackioConfig(MetricLoggerConfig):
    """trackio, a local replacement of W&B. Off unless this block is given. Needs the extra `trackio`."""

    logger: ClassVar[str] = "trackio_logger:TrackioLogger"
    packages: ClassVar[tuple[str, ...]] = ("trackio",)

    project: str = "prime-rl"
    """Project of the run."""

    name: str | None = None
    """Name of the run; None uses the role of the process. `rl` logs two runs, NAME-trainer and NAME-orchestrator."""

    group: str | None = None
    """Group of the run; `rl` puts its two runs into one group."""


class TensorBoardConfig(MetricLoggerConfig):
    """TensorBoard, for output_dir/tensorboard. Off unless this block is given. Needs the extra `tensorboard`."""

    logger: ClassVar[str] = "tensorboard_logger:TensorBoardLogger"
    packages: ClassVar[tuple[str, ...]] = ("tensorboard",)

    flush_seconds: float = Field(10, gt=0)
    """Longest time until a value is in the file."""


class MLflowConfig(MetricLoggerConfig):
    """MLflow. Off unless this block is given. Needs the extra `mlflow`. `rl` logs two runs, NAME-trainer and
    NAME-orchestrator."""

    logger: ClassVar[str] = "mlflow_logger:MLflowLogger"
    packages: ClassVar[tuple[str, ...]] = ("mlflow", "sqlalchemy", "alembic")

    experiment: str = "prime-rl"
    """Experiment of the run."""

    name: str | None = None
    """Name of the run; None uses the role of the process."""

    group: str | None = None
    """Value of the tag `group`; `rl` puts its two runs into one group."""

    tracking_uri: str | None = None
    """Server or database; None uses MLFLOW_TRACKING_URI, else mlflow.db in the run directory."""


class LoggedConfig(RootConfig):
    """Keys of the commands that log metrics."""

    aliases: ClassVar[dict[str, str]] = WANDB_ALIASES

    wandb: WandbConfig | None = Field(None, json_schema_extra=common("Logging"))
    """Weights & Biases; None writes only metrics/*.jsonl."""

    trackio: TrackioConfig | None = None
    """trackio; None disables it."""

    tensorboard: TensorBoardConfig | None = None
    """TensorBoard; None disables it."""

    mlflow: MLflowConfig | None = None
    """MLflow; None disables it."""

    @property
    def metric_loggers(self) -> list[MetricLoggerConfig]:
        """The metric loggers that are on."""
        return [logger for name in METRIC_LOGGERS if (logger := getattr(self, name)) is not None]


METRIC_LOGGERS = ("wandb", "trackio", "tensorboard", "mlflow")
"""The blocks of all metric loggers."""
NAMED_LOGGERS = ("wandb", "trackio", "mlflow")
"""Those whose runs have a name."""
