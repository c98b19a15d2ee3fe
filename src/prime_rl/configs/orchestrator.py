"""Keys of `uv run orchestrator`."""

from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationError, model_validator

from prime_rl.configs.advantage import AdvantageConfig, GRPOAdvantageConfig, RewardShapingConfig
from prime_rl.configs.base import RootConfig
from prime_rl.configs.bench import STEPS, sample_alone, shorten
from prime_rl.configs.buffer import BufferConfig, SimpleBufferConfig
from prime_rl.configs.concurrency import ConcurrencyConfig
from prime_rl.configs.online_eval import OnlineEvalConfig, ValConfig
from prime_rl.configs.rendering import RenderingConfig
from prime_rl.configs.shared import (
    SERVER_ADDRESS_VAR,
    CkptConfig,
    ClientConfig,
    EnvConfig,
    HeartbeatConfig,
    LogConfig,
    Monitored,
    NameConfig,
    SamplingConfig,
    TokenizerConfig,
    WandbConfig,
)

_COLDEST = 0.01
"""vLLM raises a temperature between 0 and this to this."""


class OrchestratorConfig(RootConfig):
    """The orchestrator: samples rollouts, scores them, ships batch n, switches inference to v_n."""

    command: ClassVar[str] = "orchestrator"
    aliases: ClassVar[dict[str, str]] = {
        **Monitored,
        "environment": "env",
        "rollouts_per_prompt": "rollouts_per_example",
    }
    variables: ClassVar[dict[str, str]] = {**RootConfig.variables, SERVER_ADDRESS_VAR: "client.host"}

    client: ClientConfig = ClientConfig()
    """Where inference is."""

    model: NameConfig = NameConfig()
    """The model that inference serves; its tokenizer renders the prompts."""

    tokenizer: TokenizerConfig = TokenizerConfig()
    """The tokenizer that renders the prompts."""

    sampling: SamplingConfig = SamplingConfig()
    """How training rollouts are sampled."""

    env: list[EnvConfig] = Field([EnvConfig()], min_length=1)
    """Environments to train in; one table is a list of one."""

    batch_size: int = Field(128, ge=1)
    """Rollouts in a batch (one step); a multiple of rollouts_per_example."""

    rollouts_per_example: int = Field(1, ge=1)
    """Rollouts G of one example; they form a group, whose mean reward is the baseline."""

    seq_len: int = Field(2048, ge=2)
    """Longest sample, prompt and completion, and length of a packed row, tokens."""

    advantage: AdvantageConfig = GRPOAdvantageConfig()
    """How rewards become advantages."""

    reward_shaping: RewardShapingConfig = RewardShapingConfig()
    """Changes to rewards before the advantages."""

    rendering: RenderingConfig = RenderingConfig()
    """Between messages and tokens."""

    restart: bool = False
    """Go on with the run in output_dir, after this process alone has ended."""

    async_level: int = Field(2, ge=0)
    """Bound k on staleness, steps: a token of batch n is sampled by version n - k or newer. 0 is on-policy."""

    max_off_policy_steps: int | None = Field(None, ge=0)
    """Bound on staleness where it shall be wider than async_level for long rollouts, steps; None is async_level."""

    oversampling_factor: float = Field(1.0, ge=1)
    """Where drops are expected, up to (factor - 1) batches more in flight, as far as max_off_policy_steps allows."""

    max_concurrent: int | None = Field(None, ge=1)
    """Most rollouts in flight at once, over all servers; None follows `concurrency`."""

    concurrency: ConcurrencyConfig = ConcurrencyConfig()
    """How many rollouts each server is given at once."""

    max_steps: int | None = Field(None, ge=1)
    """Batches to ship; None goes on for ever."""

    seed: int = 42
    """Seed of the stream of examples."""

    run_id: str | None = None
    """Name under which the inference server is leased; None makes one from the output directory."""

    on_refused_weights: Literal["end", "keep"] = "end"
    """What a version does that inference refuses (altered, incomplete, wrong canary ...): end the run, or keep sampling
    from the version before until a newer one comes, as long as the bound allows; then the run ends."""

    wait_timeout_seconds: float = Field(1800, gt=0)
    """Longest wait for the trainer's next version or for inference to start, seconds."""

    visibility_seconds: float | None = Field(None, ge=0)
    """How long files of what the others write may take to be seen whole, before they count as damaged, seconds; None is
    0 on a local disk and 60 on a network file system."""

    ckpt: CkptConfig | None = None
    """Checkpoints; None writes none."""

    eval: OnlineEvalConfig | None = None
    """Evaluation during the run."""

    val: ValConfig | None = None
    """Validation during the run."""

    buffer: BufferConfig = SimpleBufferConfig()
    """Which examples are drawn, and which groups are too easy or too hard."""

    length_aware_admission: bool = True
    """Within a version's reign start groups that are expected to be long first; needs async_level >= 1."""

    filter_zero_advantage: bool = False
    """Drop groups whose rollouts all have the same reward, which teach nothing, and sample others in their place."""

    workers_per_env: int = Field(1, ge=1)
    """Processes that run each environment."""

    trajectory_strategy: Literal["interleaved", "branching"] = "interleaved"
    """How multi-turn rollouts become samples: one growing sequence, or one per turn."""

    mask_truncated_completions: bool = False
    """Do not train on completions that were cut by max_tokens."""

    zero_truncated_completions: bool = False
    """Give completions that were cut by max_tokens a reward of 0."""

    wandb: WandbConfig | None = None
    """Weights & Biases; None writes only metrics/orchestrator.jsonl."""

    log: LogConfig = LogConfig()
    """The log."""

    bench: bool = False
    """Benchmark inference: a few batches from the base model, without a trainer, in output_dir/bench, then a table."""

    bench_steps: int = Field(STEPS, ge=2)
    """Steps of a benchmark, of which the first is not counted; takes the place of max_steps."""

    heartbeat: HeartbeatConfig = HeartbeatConfig()
    """How the silence of a process that this one waits for is noticed."""

    @classmethod
    def prepare(cls, state: Any) -> None:
        """Complete the merged values before construction."""
        super().prepare(state)
        shorten(state)
        sample_alone(state, cls.model_fields["batch_size"].default)

    @model_validator(mode="after")
    def _check(self) -> "OrchestratorConfig":
        if self.batch_size % self.rollouts_per_example:
            raise ValueError(
                f"batch_size = {self.batch_size} is not a multiple of "
                f"rollouts_per_example = {self.rollouts_per_example}; a batch is made of whole groups"
            )
        if self.max_off_policy_steps is not None and self.max_off_policy_steps < self.async_level:
            raise ValueError(
                f"max_off_policy_steps = {self.max_off_policy_steps} is below async_level = {self.async_level}; it "
                "widens the bound for long rollouts"
            )
        if self.oversampling_factor > 1 and not self.async_level:
            raise ValueError("oversampling_factor > 1 needs async_level >= 1: at 0 a surplus could join no batch")
        for env in self.env:
            _check_sampling(self.sampling_of(env), f" of environment {env.label!r}" if env.sampling else "")
        return self

    def sampling_of(self, env: EnvConfig) -> SamplingConfig:
        """Return how rollouts of `env` are sampled: `sampling` with what the environment changes of it."""
        try:
            return SamplingConfig.model_validate(self.sampling.model_dump() | env.sampling)
        except ValidationError as error:
            problem = error.errors()[0]
            key = ".".join(map(str, problem["loc"]))
            raise ValueError(f"env.sampling of environment {env.label!r}: {key}: {problem['msg']}") from None

    @property
    def bound(self) -> int:
        """Most versions that a token may lie behind the policy that is trained on it."""
        return self.async_level if self.max_off_policy_steps is None else self.max_off_policy_steps


def _check_sampling(sampling: SamplingConfig, whose: str) -> None:
    if sampling.temperature == 0:
        raise ValueError(
            f"sampling.temperature = 0{whose} gives every rollout of a group the same reward; set it above 0"
        )
    if sampling.temperature < _COLDEST:
        raise ValueError(
            f"sampling.temperature = {sampling.temperature}{whose}: vLLM samples at {_COLDEST} instead, and the "
            f"trainer would compute other log-probabilities; set it to {_COLDEST} or more"
        )
    if sampling.top_k == 1:
        raise ValueError(
            f"sampling.top_k = 1{whose} leaves one token to choose from, whose gradient is 0; set it above 1, or to -1"
        )
