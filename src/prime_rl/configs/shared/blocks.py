"""Blocks that several commands share."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from prime_rl.configs.shared.bench import STEPS, limit_to_bench_steps
from prime_rl.configs.shared.environment_rewards import RewardConfig
from prime_rl.configs.shared.monitoring import LogExtrasConfig, MetricLoggerConfig, TensorBoardConfig, TrackioConfig
from prime_rl.core.api_key import API_KEY_VAR
from prime_rl.core.ports import join_host_port
from prime_rl.loading.base_config import BaseConfig, common
from prime_rl.loading.provenance import ConfigState
from prime_rl.loading.root_config import RootConfig
from prime_rl.storage.paths import RunPaths

DEFAULT_MODEL = "Qwen/Qwen3-0.6B"
DEFAULT_PORT = 8000
SERVER_ADDRESS_VAR = "INFERENCE_SERVER_IP"
"""Environment variable with the address on which the server listens and to which its clients connect."""


def server_root(url: str) -> str:
    """Return the root URL of a server, without a trailing `/` or `/v1`."""
    return url.rstrip("/").removesuffix("/v1")


def split_commas(value: object) -> object:
    """Split `a,b` into a list, so that lists can be typed without brackets."""
    return [item.strip() for item in value.split(",") if item.strip()] if isinstance(value, str) else value


StrList = Annotated[list[str], BeforeValidator(split_commas)]
IntList = Annotated[list[int], BeforeValidator(split_commas)]


class NameConfig(BaseConfig):
    """The model."""

    name: str = Field(DEFAULT_MODEL, json_schema_extra=common("Model"))
    """Hugging Face id or local directory of the base model (policy version 0)."""


class TokenizerConfig(BaseConfig):
    """The tokenizer."""

    name: str | None = None
    """Hugging Face id or local directory of the tokenizer; None uses the model's tokenizer."""

    trust_remote_code: bool = False
    """Run Python code from the tokenizer's repository."""


class LogConfig(BaseConfig):
    """The log."""

    level: Literal["debug", "info", "warning", "error"] = Field("info", json_schema_extra=common("Logging"))
    """Minimum level of log messages."""

    utc: bool = False
    """Log times in UTC instead of local time."""

    file: bool = True
    """Also write the log to logs/ in the run directory, unless it goes there already, as under `rl`."""


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


class WandbConfig(MetricLoggerConfig):
    """Weights & Biases. Off unless this block is given. `rl` logs two runs, NAME-trainer and NAME-orchestrator."""

    deprecated: ClassVar[dict[str, str]] = {"timeout": "timeout_seconds"}

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

    log_extras: WandbExtrasConfig | None = None
    """Tables, histograms and figures; None logs scalars only."""


class CkptConfig(BaseConfig):
    """Checkpoints, from which a run can resume. Off unless this block is given."""

    deprecated: ClassVar[dict[str, str]] = {"timeout": "timeout_seconds"}

    path: Path = Path("checkpoints")
    """Directory of the checkpoints, relative to output_dir unless absolute."""

    interval: int = Field(50, ge=1, json_schema_extra=common("Checkpoints"))
    """Steps between two checkpoints; the last step is always saved."""

    save_async: bool = False
    """Continue training while a checkpoint is written."""

    timeout_seconds: float = Field(3600, gt=0)
    """Timeout for writing one checkpoint."""

    resume_step: int | None = Field(None, ge=-1, json_schema_extra=common("Checkpoints"))
    """Checkpoint to resume from; -1 is the latest complete one, None starts a new run."""

    keep_last: int | None = Field(None, ge=1, json_schema_extra=common("Checkpoints"))
    """Number of checkpoints to keep; None keeps all."""

    keep_interval: int | None = Field(None, ge=1)
    """Never delete checkpoints at multiples of this many steps; needs keep_last."""

    def without_effect(self) -> Iterator[tuple[str, str]]:
        """Report `keep_interval` without `keep_last`."""
        if self.keep_last is None:
            yield "keep_interval", "has no effect without ckpt.keep_last: all checkpoints are kept"


class ClientConfig(BaseConfig):
    """The connection to the inference server."""

    deprecated: ClassVar[dict[str, str]] = {"timeout": "timeout_seconds", "probe_timeout": "probe_timeout_seconds"}

    host: str = "localhost"
    """Host name or address of the server; unused with base_url."""

    port: int = Field(DEFAULT_PORT, ge=1, le=65535)
    """Port of the server; unused with base_url."""

    base_url: StrList | None = Field(None, json_schema_extra=common("Inference"))
    """URLs such as http://localhost:8000/v1, separated by commas; None uses host and port."""

    api_key_var: str = API_KEY_VAR
    """Environment variable with the server's API key; no key is sent if it is unset."""

    timeout_seconds: float = Field(1200, gt=0)
    """Timeout of one request."""

    probe_timeout_seconds: float = Field(30, gt=0)
    """Timeout for a server to report its policy version. After it the server is removed, and its rollouts are restarted
    on other servers."""

    reconnect_seconds: float = Field(4, gt=0)
    """Time without any reachable server after which the run fails. `rl` with max_restarts, which restarts its server,
    uses wait_timeout_seconds."""

    def without_effect(self) -> Iterator[tuple[str, str]]:
        """Report `host` and `port` next to `base_url`."""
        if self.base_url is not None:
            yield from ((key, "has no effect if client.base_url is set") for key in ("host", "port"))

    @property
    def urls(self) -> list[str]:
        """Root URLs of the servers, without a trailing `/` or `/v1`."""
        given = self.base_url or [f"http://{join_host_port(self.host, self.port)}"]
        return [server_root(url) for url in given]


class SamplingConfig(BaseConfig):
    """Sampling of completions."""

    temperature: float = Field(1.0, ge=0, json_schema_extra=common("Rollouts"))
    """Sampling temperature; the trainer applies the same. 0 is greedy (evaluation only)."""

    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling: keep the most likely tokens up to this probability mass. The trainer applies the same mask."""

    top_k: int = Field(-1, ge=-1)
    """Keep this many of the most likely tokens; -1 keeps all. The trainer applies the same mask."""

    min_p: float = Field(0.0, ge=0, le=1)
    """Keep tokens with at least this probability relative to the most likely one. The trainer applies the same mask."""

    max_tokens: int | None = Field(None, ge=1, json_schema_extra=common("Rollouts"))
    """Maximum tokens of one turn's completion; None allows the whole sequence length."""

    min_tokens: int = Field(0, ge=0)
    """Minimum tokens of one turn's completion."""

    # Upstream configurations set it, and an unknown key would not explain why another value is wrong.
    repetition_penalty: float = Field(1.0, gt=0)
    """Only 1 is supported: the trainer does not apply the penalty, so its log-probabilities would be wrong."""

    seed: int | None = None
    """Seed from which each request derives its own; None samples without a seed."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.repetition_penalty != 1:
            raise ValueError(
                "repetition_penalty is not supported: the trainer does not apply it to its log-probabilities; remove it"
            )
        return self


class EnvConfig(BaseConfig):
    """A verifiers environment."""

    shorthand: ClassVar[str | None] = "id"
    deprecated: ClassVar[dict[str, str]] = {
        "timeout": "timeout_seconds",
        "start_timeout": "start_timeout_seconds",
        "silence_timeout": "silence_timeout_seconds",
    }

    id: str = Field("reverse_text", json_schema_extra=common("Rollouts"))
    """Name of the installed environment package (`-` and `_` are equivalent), or of a file: `my_env` finds my_env.py in
    the working directory, `path/my_env.py` any file."""

    args: dict[str, object] = Field({}, json_schema_extra=common("Rollouts"))
    """Arguments of the environment's load_environment()."""

    name: str | None = None
    """Name in metrics; None uses the id."""

    rewards: list[RewardConfig] = Field([])
    """Reward functions to add to those of the environment."""

    install: bool = False
    """Install an environment of the hub (`owner/name`) with `prime env install` if it, or its version, is missing."""

    identity: str | None = None
    """Module, version and content hash; set when a run starts. Another given value logs a warning."""

    weight: float = Field(1.0, gt=0)
    """Share of the started groups, relative to the other environments."""

    breakdown: list[str] = Field([])
    """Columns of the examples, such as `answer` or `info.level`, by whose values an evaluation is broken down."""

    rollouts_per_example: int | None = Field(None, ge=1)
    """Rollouts of each example of this environment; None uses the value for all environments."""

    max_concurrent: int | None = Field(None, ge=1)
    """Maximum rollouts of this environment in flight, in training; at least one group is. None sets no limit."""

    max_rollouts_per_minute: float | None = Field(None, gt=0)
    """Maximum rollouts of this environment that start per minute, in training; None sets no limit."""

    sampling: dict[str, object] = Field({})
    """Keys of `sampling` to override for this environment."""

    timeout_seconds: float | None = Field(1200, gt=0)
    """Time limit of the environment for one rollout, without the time in which the model samples, and for the scoring
    of a group. A slower rollout is truncated and scored. None sets no limit."""

    num_retries: int = Field(1, ge=0)
    """Number of retries of a rollout or of a group's scoring after an infrastructure error: connection, sandbox
    (vf.InfraError), overloaded server."""

    min_rollouts: int | None = Field(None, ge=1)
    """Train on groups with at least this many successful rollouts; the baseline uses these alone, and the batch gets
    smaller. None requires all rollouts."""

    reward_errors: Literal["drop", "zero"] = "drop"
    """If a reward function raises or returns a non-finite number: drop the rollout, or set this reward to 0.
    Infrastructure errors are never 0, and functions of weight 0 only log a warning."""

    step_rewards: Literal["ignore", "add", "included"] = "ignore"
    """Rewards that a classic environment sets in single steps: `add` adds them to the rubric's reward, `included` means
    that the rubric adds them up itself; both credit each turn only with the reward that comes after it."""

    start_timeout_seconds: float = Field(600, gt=0)
    """Timeout for a worker process to load the environment."""

    silence_timeout_seconds: float = Field(600, gt=0)
    """Replace a worker process whose event loop the environment blocks for longer, or for longer than timeout_seconds +
    cleanup_seconds."""

    cleanup_seconds: float = Field(30, ge=0)
    """Time limit for cleanup, such as the deletion of sandboxes, after cancelled or timed-out rollouts; then the worker
    process is killed. grace_timeout_seconds of `rl` limits it too when the run ends."""

    runtime: Literal["sandbox", "subprocess"] = "sandbox"
    """Where agents of a v1 environment run programs such as a shell, unless `args.env.<agent>.runtime` names a
    container or cloud: in the `sandbox` of this machine, or as a `subprocess` with your permissions and without
    isolation."""

    def sampling_with(self, sampling: SamplingConfig) -> SamplingConfig:
        """Return `sampling` with the overrides of this environment.

        Raises:
            ValueError: an unknown key or an invalid value in the environment's `sampling`.
        """
        try:
            return SamplingConfig.model_validate(sampling.model_dump() | self.sampling)
        except ValidationError as error:
            problem = error.errors()[0]
            key = ".".join(map(str, problem["loc"]))
            message = problem["msg"].removeprefix("Value error, ")
            raise ValueError(
                f"env.sampling of environment {self.label!r}: {key}{': ' if key else ''}{message}"
            ) from None

    @property
    def label(self) -> str:
        """Name of the environment in metrics and messages."""
        return self.name or (Path(self.id).stem if self.id.endswith(".py") else self.id)


WANDB_ALIASES: dict[str, str] = {"monitor.wandb": "wandb"}
"""Upstream's name of the W&B block, accepted by every command that logs to W&B."""


class RunConfig(RootConfig):
    """Keys of the commands that run steps: `rl`, `trainer`, `orchestrator`, `sft`."""

    aliases: ClassVar[dict[str, str]] = WANDB_ALIASES

    max_steps: int | None = Field(None, ge=1, json_schema_extra=common("Run"))
    """Steps of the run; None is unlimited."""

    ckpt: CkptConfig | None = Field(None, json_schema_extra=common("Checkpoints"))
    """Checkpoints; None writes none."""

    wandb: WandbConfig | None = Field(None, json_schema_extra=common("Logging"))
    """Weights & Biases; None writes only metrics/*.jsonl."""

    trackio: TrackioConfig | None = None
    """trackio; None disables it."""

    tensorboard: TensorBoardConfig | None = None
    """TensorBoard; None disables it."""

    log: LogConfig = Field(default_factory=LogConfig)
    """The log."""

    bench: bool = Field(False, json_schema_extra=common("Run"))
    """Benchmark a few steps in output_dir/bench; prints a table. The orchestrator samples from the base model without a
    trainer, and the RL trainer trains on random batches (data.fake)."""

    bench_steps: int = Field(STEPS, ge=2)
    """Steps of a benchmark instead of max_steps; the first is not counted."""

    @classmethod
    def prepare(cls, state: ConfigState) -> None:
        """Complete the merged values before construction."""
        super().prepare(state)
        limit_to_bench_steps(state)

    def without_effect(self) -> Iterator[tuple[str, str]]:
        """Report `bench_steps` without `bench`."""
        if not self.bench:
            yield "bench_steps", "has no effect without --bench"

    @property
    def metric_loggers(self) -> list[MetricLoggerConfig]:
        """The metric loggers that are on."""
        return [logger for logger in (self.wandb, self.trackio, self.tensorboard) if logger is not None]

    @property
    def run_paths(self) -> RunPaths:
        """The run directory: output_dir, or its folder `bench` for a benchmark."""
        root = self.output_dir / "bench" if self.bench else self.output_dir
        return RunPaths(root, getattr(self, "fs_consistency_timeout_seconds", None))
