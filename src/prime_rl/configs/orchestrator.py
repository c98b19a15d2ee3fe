"""Keys of `uv run orchestrator`."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from prime_rl.configs.advantage import GROUP_BASELINES, AdvantageConfig, GRPOAdvantageConfig, RewardShapingConfig
from prime_rl.configs.base_model import NameConfig
from prime_rl.configs.bench import sample_without_trainer
from prime_rl.configs.buffer import BufferConfig, SimpleBufferConfig
from prime_rl.configs.checkpoint import SKIPPED
from prime_rl.configs.client import ClientConfig
from prime_rl.configs.command_bases import RolloutsConfig, RunConfig
from prime_rl.configs.concurrency import ConcurrencyConfig
from prime_rl.configs.environment import EnvConfig
from prime_rl.configs.heartbeat import HeartbeatConfig
from prime_rl.configs.loading.base_config import BaseConfig, common
from prime_rl.configs.loading.provenance import ConfigState
from prime_rl.configs.online_eval import OnlineEvalConfig, ValConfig
from prime_rl.configs.sampling import SamplingConfig, check_trained_sampling
from prime_rl.liveness.run_settings import RUN_KEYS, SAMPLED_LENGTH, RunSettings, describe_model
from prime_rl.storage.paths import RunPaths


class SlotConfig(BaseConfig):
    """The adapter of this run in a trainer and a server that several runs share (docs/multi_run.md)."""

    name: str | None = None
    """Name under which inference serves it. None is the name of the run's folder if the trainer publishes adapters;
    otherwise the run uses the whole server."""

    rank: int | None = Field(None, ge=1)
    """Rank of the adapter, at most the trainer's; None is the trainer's."""

    alpha: float | None = Field(None, gt=0)
    """Scale, as the trainer's model.lora.alpha; None is the trainer's."""


class OrchestratorModelConfig(NameConfig):
    """The model, and the run's adapter."""

    lora: SlotConfig = Field(default_factory=SlotConfig)
    """The run's adapter, with a trainer of several runs."""


class OrchestratorConfig(RunConfig, RolloutsConfig):
    """The orchestrator: samples and scores rollouts, writes batch n, updates inference to v_n."""

    command_name: ClassVar[str] = "orchestrator"
    aliases: ClassVar[dict[str, str]] = {"lora_name": "model.lora.name"}
    deprecated: ClassVar[dict[str, str]] = {
        "on_refused_weights": "on_invalid_weights",
        "visibility_seconds": "fs_consistency_timeout_seconds",
    }
    deprecated_values: ClassVar[dict[str, dict[str, str]]] = {
        "on_invalid_weights": {"end": "fail", "keep": "keep_previous"}
    }

    model: OrchestratorModelConfig = Field(default_factory=OrchestratorModelConfig)
    """The model."""

    optim: dict[str, Any] = Field(default_factory=dict)
    """Changes of the trainer's `optim` for this run, with a trainer of several runs."""

    scheduler: dict[str, Any] = Field(default_factory=dict)
    """Changes of the trainer's `scheduler` for this run, with a trainer of several runs."""

    loss: dict[str, Any] = Field(default_factory=dict)
    """Changes of the trainer's `loss` for this run, with a trainer of several runs."""

    num_minibatches: int | None = Field(None, ge=1)
    """Optimizer steps per batch, with a trainer of several runs; None is the trainer's."""

    client: ClientConfig = Field(default_factory=ClientConfig)
    """The connection to the inference server."""

    env: list[EnvConfig] = Field(default_factory=lambda: [EnvConfig()], min_length=1)
    """Environments to train in; one table is a list of one."""

    batch_size: int = Field(128, ge=1, json_schema_extra=common("Rollouts"))
    """Rollouts per batch (one step); a multiple of rollouts_per_example. A batch consists of batch_size /
    rollouts_per_example groups, also if an environment has its own group size."""

    rollouts_per_example: int = Field(8, ge=1, json_schema_extra=common("Rollouts"))
    """Rollouts G of each example, which form a group. 1 needs an advantage without a group baseline (advantage.type
    none or reinforce_pp)."""

    seq_len: int = Field(2048, ge=2, json_schema_extra=common("Model"))
    """Maximum tokens of a sample (prompt and completion) and of a packed row."""

    advantage: AdvantageConfig = Field(default_factory=GRPOAdvantageConfig, json_schema_extra=common("Algorithm"))
    """Computation of advantages from rewards."""

    reward_shaping: RewardShapingConfig = Field(default_factory=RewardShapingConfig)
    """Changes of the rewards before the advantages are computed."""

    clean: bool = False
    """Remove an earlier run from output_dir first, also the trainer's weights and metrics; false refuses to start."""

    wait_for_final_version: bool = True
    """Run until inference uses the version trained on the last batch; false exits after the last batch, as for a server
    without a trainer."""

    restart: bool = False
    """Continue the run in output_dir after only this process ended."""

    async_level: int = Field(2, ge=0, json_schema_extra=common("Algorithm"))
    """Maximum staleness k in steps: tokens of batch n are sampled by version n - k or newer. 0 is on-policy.
    max_off_policy_steps replaces the limit."""

    max_off_policy_steps: int | None = Field(None, ge=0)
    """Maximum staleness in steps, if larger than async_level (lets long rollouts finish); None is async_level."""

    oversampling_factor: float = Field(1.0, ge=1)
    """If drops are expected, start up to (factor - 1) additional batches; needs max_off_policy_steps above
    async_level."""

    max_concurrent: int | None = Field(None, ge=1)
    """Maximum number of rollouts in flight on all servers; None uses `concurrency`."""

    concurrency: ConcurrencyConfig = Field(default_factory=ConcurrencyConfig)
    """Adaptive limit of the rollouts in flight per server."""

    run_id: str | None = None
    """Name of the run for the lease of the inference server; None derives it from output_dir."""

    on_invalid_weights: Literal["fail", "keep_previous"] = "fail"
    """If inference rejects a version (altered, incomplete, wrong canary): fail, or keep sampling from the previous
    version until a newer one is published or the staleness limit is reached, which fails the run."""

    min_servers: int | None = Field(None, ge=1)
    """Start the run when so many servers of `client.base_url` answer; the others join when they answer. None waits for
    all."""

    wait_timeout_seconds: float = Field(1800, gt=0)
    """Timeout for the trainer's next version and for the start of inference."""

    failing_env_seconds: float = Field(600, ge=0)
    """Fail if all environments only raise errors for this long. A failing environment is retried after pauses of up to
    30 s, while the others run."""

    failing_at_start_seconds: float = Field(120, ge=0)
    """The same limit for an environment without a successful group so far; at most `failing_env_seconds`."""

    fs_consistency_timeout_seconds: float | None = Field(None, ge=0)
    """How long an incomplete file of another process is read again before it counts as damaged; None is 0 on a local
    disk and 60 on a network file system."""

    eval: OnlineEvalConfig | None = None
    """Evaluation during training."""

    val: ValConfig | None = None
    """Validation during training."""

    buffer: BufferConfig = Field(default_factory=SimpleBufferConfig)
    """Choice of examples, and the groups that are too easy or too hard."""

    length_aware_admission: Annotated[bool | int, AfterValidator(int)] = Field(1, ge=0)
    """After each weight update, start the groups that are expected to take longest first (async_level >= 1). A number
    W > 1 sorts W batches at once, so that few batches wait for long groups: more throughput if the engine has a slot
    for almost every rollout of a batch, less otherwise. false or 0 keeps the order of the stream."""

    filter_zero_advantage: bool = False
    """Drop groups whose rollouts all have the same reward, and sample others instead."""

    trajectory_strategy: Literal["interleaved", "branching"] = "interleaved"
    """Samples of a multi-turn rollout: one growing sequence, or one per turn."""

    mask_truncated_completions: bool = False
    """Do not train on completions that max_tokens truncated."""

    zero_truncated_completions: bool = False
    """Set the reward of completions that max_tokens truncated to 0."""

    pass_threshold: float = 1.0
    """Reward from which a rollout solves its example, in the metrics pass@k and groups/solved_*."""

    num_samples_per_batch: int | None = Field(None, ge=1)
    """Maximum number of rollouts per batch in samples/ and in W&B's table, as whole groups; None writes all."""

    num_kept_sample_files: int | None = Field(1000, ge=1)
    """Number of latest batches whose text stays in samples/, and the tokens of a few of their groups; None keeps all.
    1,000 batches of 512 rollouts of 2,000 tokens have about 5 GB of text, so long runs would fill the disk."""

    kept_sample_interval: int | None = Field(10, ge=1)
    """Also keep the files of every Nth older batch, so that the page shows the whole run; None keeps none of them."""

    heartbeat: HeartbeatConfig = Field(default_factory=HeartbeatConfig)
    """Detection of unresponsive processes."""

    @classmethod
    def prepare(cls, state: ConfigState) -> None:
        """Complete the merged values before construction."""
        super().prepare(state)
        sample_without_trainer(state, cls.model_fields["batch_size"].default)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.batch_size % self.rollouts_per_example:
            raise ValueError(
                f"batch_size = {self.batch_size} is not a multiple of "
                f"rollouts_per_example = {self.rollouts_per_example}; a batch consists of whole groups"
            )
        if 1 in map(self.group_size, self.env) and self.advantage.type in GROUP_BASELINES and not self.bench:
            raise ValueError(
                f"rollouts_per_example = 1 makes every advantage 0 with advantage.type {self.advantage.type!r}, which "
                "compares the rollouts of one example; set rollouts_per_example = 8, or advantage.type none"
            )
        if self.max_off_policy_steps is not None and self.max_off_policy_steps < self.async_level:
            raise ValueError(
                f"max_off_policy_steps = {self.max_off_policy_steps} is below async_level = {self.async_level}; it "
                "can only extend the limit for long rollouts"
            )
        if self.oversampling_factor > 1 and not self.async_level:
            raise ValueError("oversampling_factor > 1 needs async_level >= 1: at 0 additional groups fit into no batch")
        labels = [env.label for env in self.env]
        if twice := [label for label in labels if labels.count(label) > 1]:
            raise ValueError(f"two environments are called {twice[0]!r}; give each a different env.name")
        for env in self.env:
            fewest, most = min(2, self.group_size(env)), self.group_size(env)
            if env.min_rollouts is not None and not fewest <= env.min_rollouts <= most:
                raise ValueError(
                    f"env.min_rollouts = {env.min_rollouts} of environment {env.label!r} is not between {fewest} and "
                    f"rollouts_per_example = {most}; a group of one rollout has no baseline"
                )
            pause_seconds = 60 * most / env.max_rollouts_per_minute if env.max_rollouts_per_minute else 0.0
            if pause_seconds >= self.wait_timeout_seconds:
                raise ValueError(
                    f"env.max_rollouts_per_minute = {env.max_rollouts_per_minute:g} of {env.label!r} starts "
                    f"a group of {most} every {pause_seconds:.0f} s, and wait_timeout_seconds = "
                    f"{self.wait_timeout_seconds:g} ends a run without progress; raise one of them"
                )
            check_trained_sampling(
                env.sampling_with(self.sampling), f" of environment {env.label!r}" if env.sampling else ""
            )
        return self

    def without_effect(self) -> Iterator[tuple[str, str]]:
        """Report keys that need another key."""
        yield from super().without_effect()
        if self.max_staleness == self.async_level:
            yield "oversampling_factor", "has no effect unless max_off_policy_steps is above async_level"
        if self.max_concurrent is not None:
            for key in ("adaptive", "min", "max", "interval_seconds"):
                yield f"concurrency.{key}", "has no effect if max_concurrent is set"

    def samplings(self) -> list[tuple[str, SamplingConfig]]:
        """Return all sampling parameters of training and evaluation, with their keys."""
        found = [("sampling", self.sampling)]
        found += [("env.sampling", env.sampling_with(self.sampling)) for env in self.env if env.sampling]
        if self.eval is not None:
            own = [env.sampling_with(self.eval.sampling) for env in self.eval.env if env.sampling]
            found += [("eval.sampling", self.eval.sampling), *(("eval.env.sampling", each) for each in own)]
        return found

    def doubtful(self, prefix: str = "") -> Iterator[str]:
        """Report completions that are longer than a sample can be."""
        for key, sampling in self.samplings():
            if sampling.max_tokens is not None and sampling.max_tokens > self.seq_len:
                yield (
                    f"{prefix}{key}.max_tokens = {sampling.max_tokens} is above {prefix}seq_len = {self.seq_len}, "
                    "which counts the prompt too: completions end there"
                )

    def without_effect_alone(self) -> Iterator[tuple[str, str]]:
        """Report checkpoint keys that only the trainer uses."""
        for key in ("save_async", "timeout_seconds", "keep_last", "keep_interval", *SKIPPED):
            yield f"ckpt.{key}", "has no effect on the orchestrator; give it to the trainer"

    def group_size(self, env: EnvConfig) -> int:
        """Return the number of rollouts of each example of an environment."""
        return env.rollouts_per_example or self.rollouts_per_example

    @property
    def run_settings(self) -> RunSettings:
        """What this process and the trainer must agree on."""
        return {
            "model.name": describe_model(self.model.name),
            "model.revision": self.model.revision,
            "tokenizer.name": describe_model(self.tokenizer.name or self.model.name),
            SAMPLED_LENGTH: self.seq_len,
            "max_steps": self.max_steps,
            "async_level": self.async_level,
            "ckpt.interval": self.ckpt.interval if self.ckpt is not None else None,
            "ckpt.path": str(self.ckpt.path) if self.ckpt is not None else None,
            RUN_KEYS: ", ".join(self.training_keys) or None,
        }

    @property
    def training_keys(self) -> list[str]:
        """The keys of the trainer that this run sets for itself, with a trainer of several runs."""
        blocks = {"optim": self.optim, "scheduler": self.scheduler, "loss": self.loss}
        keys = [f"{block}.{key}" for block, changes in blocks.items() for key in changes]
        rank, alpha = self.model.lora.rank, self.model.lora.alpha
        single = {"num_minibatches": self.num_minibatches, "model.lora.rank": rank, "model.lora.alpha": alpha}
        return keys + [key for key, value in single.items() if value is not None]

    def record(self, paths: RunPaths, name: str | None = None) -> None:
        """Write nothing: `resume.announce` writes the file once at the start, because each change announces a start."""

    @property
    def identities(self) -> dict[str, str | None]:
        """Which code each environment is, by name; known once the run starts."""
        return {env.label: env.identity for env in self.env}

    @property
    def max_staleness(self) -> int:
        """Maximum number of versions between the one that sampled a token and the one trained on it."""
        return self.async_level if self.max_off_policy_steps is None else self.max_off_policy_steps


def slot_name(folder: Path) -> str:
    """Return the name of the slot of the run in `folder`."""
    return re.sub(r"[^\w.@:/+-]", "_", folder.resolve().name)
