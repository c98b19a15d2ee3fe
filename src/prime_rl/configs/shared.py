"""Blocks that several entry points share."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from prime_rl.configs.base import BaseConfig, later
from prime_rl.configs.broadcast import IPCBroadcastConfig, NCCLBroadcastConfig
from prime_rl.run.heartbeat import Limits

DEFAULT_MODEL = "Qwen/Qwen3-0.6B"
DEFAULT_PORT = 8000
API_KEY_VAR = "INFERENCE_SERVER_API_KEY"
SERVER_ADDRESS_VAR = "INFERENCE_SERVER_IP"
"""Environment variable with the server's address: where it listens, and where its clients look for it."""


def split_commas(value: object) -> object:
    """Read `a,b` as a list of two, so that lists can be typed without brackets."""
    return [item.strip() for item in value.split(",") if item.strip()] if isinstance(value, str) else value


StrList = Annotated[list[str], BeforeValidator(split_commas)]
IntList = Annotated[list[int], BeforeValidator(split_commas)]


class NameConfig(BaseConfig):
    """Which model."""

    name: str = DEFAULT_MODEL
    """Hugging Face id or local directory of the base model, policy version 0."""


class TokenizerConfig(BaseConfig):
    """Which tokenizer."""

    name: str | None = None
    """Hugging Face id or local directory of the tokenizer; None takes the model's own."""

    trust_remote_code: bool = False
    """Run Python code that the tokenizer's repository brings along."""


class LogConfig(BaseConfig):
    """What is written to the log."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe message that is written."""

    utc: bool = False
    """Write times in UTC instead of local time."""


class LogExtrasConfig(BaseConfig):
    """Tables beside the scalar metrics."""

    samples: bool = True
    """Log a table of rollouts: prompt, completion, reward, advantage."""

    distributions: bool = True
    """Log histograms of per-rollout and per-token values."""

    interval: int = Field(10, ge=1)
    """Steps between two tables."""


class WandbConfig(BaseConfig):
    """Weights & Biases. Off unless this block is given. `rl` makes two runs, NAME-trainer and NAME-orchestrator."""

    project: str = "prime-rl"
    """Project that the run is filed under."""

    name: str | None = None
    """Name of the run; None lets W&B choose one."""

    id: str | None = None
    """Id of an earlier run to go on with; None starts a new one. Trainer and orchestrator have one each."""

    entity: str | None = None
    """User or team that owns the project; None takes the account's default."""

    group: str | None = None
    """Group that runs are shown under; `rl` puts its two runs into one."""

    tags: StrList = Field([])
    """Labels of the run."""

    offline: bool = False
    """Write to the run directory only; `wandb sync` uploads later. No account is needed."""

    timeout: float = Field(120, gt=0)
    """Longest wait for W&B at the start and, to upload the rest, at the end, seconds."""

    log_extras: LogExtrasConfig | None = None
    """Tables of samples and distributions; None logs scalars only."""


class CkptConfig(BaseConfig):
    """Checkpoints, to go on from after the end of a run or its death. Off unless this block is given."""

    path: Path = Path("checkpoints")
    """Folder of the checkpoints, inside output_dir unless absolute."""

    interval: int = Field(50, ge=1)
    """Steps between two checkpoints; the last step is always one."""

    save_async: bool = False
    """Go on training while a checkpoint is written."""

    timeout: float = Field(3600, gt=0)
    """Longest time to write one checkpoint, seconds."""

    resume_step: int | None = Field(None, ge=-1)
    """Checkpoint to resume from; -1 is the newest complete one, None starts anew."""

    keep_last: int | None = Field(None, ge=1)
    """How many checkpoints to keep; None keeps all."""

    keep_interval: int | None = Field(None, ge=1)
    """Checkpoints at multiples of this many steps are kept for good."""


class ClientConfig(BaseConfig):
    """Where the inference server is."""

    host: str = "localhost"
    """Host name or address of the server; not used with base_url."""

    port: int = Field(DEFAULT_PORT, ge=1, le=65535)
    """Port of the server; not used with base_url."""

    base_url: StrList | None = None
    """Full addresses such as http://localhost:8000/v1, several separated by commas; None means host and port."""

    api_key_var: str = API_KEY_VAR
    """Name of the environment variable that holds the server's key; no key is sent where it is unset."""

    timeout: float = Field(1200, gt=0)
    """Longest time for one request, seconds."""

    probe_timeout: float = Field(30, gt=0)
    """Longest time for a server to say what it samples from, seconds; one that does not is taken out, and what it was
    playing is played elsewhere."""

    reconnect_seconds: float = Field(4, gt=0)
    """Longest time in which no server answers before the run ends, seconds; `rl` with max_restarts, which starts its
    server again, takes wait_timeout_seconds."""

    @property
    def urls(self) -> list[str]:
        """Roots of the servers, without a trailing `/` or `/v1`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        given = self.base_url or [f"http://{host}:{self.port}"]
        return [url.rstrip("/").removesuffix("/v1") for url in given]


class SamplingConfig(BaseConfig):
    """How completions are sampled."""

    temperature: float = Field(1.0, ge=0)
    """Divides the logits before sampling; the trainer applies the same. 0 is greedy (not for training)."""

    top_p: float = Field(1.0, gt=0, le=1)
    """Keep the likeliest tokens up to this probability mass; 1 keeps all. The trainer cuts in the same way."""

    top_k: int = Field(-1, ge=-1)
    """Keep this many of the likeliest tokens; -1 keeps all. The trainer cuts in the same way."""

    min_p: float = Field(0.0, ge=0, le=1)
    """Keep tokens at least this likely relative to the likeliest; 0 keeps all. The trainer cuts in the same way."""

    max_tokens: int | None = Field(None, ge=1)
    """Longest completion of one turn, tokens; None fills the sequence length."""

    min_tokens: int = Field(0, ge=0)
    """Shortest completion of one turn, tokens."""

    repetition_penalty: float = later(1.0, gt=0)
    """Divides the logits of tokens seen already; 1 changes nothing."""

    seed: int | None = None
    """Seed of the sampler; None draws freshly. Each request derives its own from it."""


class EnvConfig(BaseConfig):
    """One verifiers environment."""

    shorthand: ClassVar[str | None] = "id"

    id: str = "reverse_text"
    """Name of the installed environment package (`-` and `_` are the same)."""

    args: dict[str, object] = Field({})
    """Arguments of the environment's load_environment()."""

    name: str | None = None
    """Name in metrics; None takes the id."""

    weight: float = Field(1.0, gt=0)
    """Share of the groups that are trained on, relative to the other environments."""

    sampling: dict[str, object] = Field({})
    """Keys of `sampling` that differ for this environment."""

    timeout: float | None = Field(None, gt=0)
    """Longest time for one rollout, seconds; a slower one fails its group. None sets no limit."""

    start_timeout: float = Field(600, gt=0)
    """Longest time for a worker process to load the environment, seconds."""

    silence_timeout: float = Field(600, gt=0)
    """Longest time that the environment may block its worker process where `timeout` is None, seconds; the worker is
    replaced then."""

    @property
    def label(self) -> str:
        """Name of the environment in metrics and messages."""
        return self.name or self.id


class HeartbeatConfig(BaseConfig):
    """How a silent, stuck or dead process is noticed; see docs/liveness.md."""

    aliases: ClassVar[dict[str, str]] = {"silence_s": "silence", "timeout_s": "timeout"}

    silence: float = Field(5, gt=0)
    """Seconds without a beat after which a process is reported as silent; nothing ends of it."""

    timeout: float = Field(60, gt=0)
    """Seconds without a beat after which a process counts as dead; of inference over several nodes, a node as lost."""

    @property
    def limits(self) -> Limits:
        """The two for who judges; nobody is dead before he is silent."""
        return Limits(min(self.silence, self.timeout), self.timeout)


class DeltaConfig(BaseConfig):
    """Versions as deltas against the version before. Off unless this block is given; see docs/delta.md."""

    full_interval: int = Field(10, ge=1)
    """Every so many versions one is full; a server that starts anew reads it and the deltas since."""


class FileBroadcastConfig(BaseConfig):
    """Weights travel through the run directory."""

    type: Literal["filesystem"] = "filesystem"
    """Way from trainer to inference."""

    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Precision of the published weights; auto is bfloat16 on CUDA and float32 on CPU."""

    timeout: float = Field(1200, gt=0)
    """Longest time to write one version, seconds."""

    directory: Path | None = None
    """Folder on this node to write versions to, such as /dev/shm, linked from `weights/`; the last is written there."""

    canary: bool = True
    """Publish the trainer's log-probabilities of 64 fixed tokens with each version, for inference to compare with."""

    delta: DeltaConfig | None = None
    """Publish what has changed since the version before, for slow networks; None publishes every version in full."""


BroadcastConfig = Annotated[FileBroadcastConfig | NCCLBroadcastConfig | IPCBroadcastConfig, Field(discriminator="type")]

Monitored: dict[str, str] = {"monitor.wandb": "wandb"}
"""Aliases of every entry point that logs to W&B (the older spelling of the key)."""
