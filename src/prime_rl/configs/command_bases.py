"""Keys that several commands share: the base classes of those that run steps, train, run environments, or evaluate."""

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from prime_rl.configs.base_model import NameConfig, TokenizerConfig
from prime_rl.configs.bench import STEPS, limit_to_bench_steps
from prime_rl.configs.checkpoint import CkptConfig
from prime_rl.configs.client import SERVER_ADDRESS_VAR, AnyServerConfig
from prime_rl.configs.environment import EvalEnvConfig, ExampleCount
from prime_rl.configs.loading.base_config import common
from prime_rl.configs.loading.provenance import ConfigState
from prime_rl.configs.loading.root_config import RootConfig
from prime_rl.configs.logging import LogConfig
from prime_rl.configs.monitoring import METRIC_LOGGERS, NO_SAMPLES, LoggedConfig
from prime_rl.configs.rendering import RenderingConfig
from prime_rl.configs.sampling import SamplingConfig
from prime_rl.configs.sandbox import SandboxConfig
from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.configs.training.optim import AdamWConfig, ConstantSchedulerConfig, OptimConfig, SchedulerConfig
from prime_rl.storage.paths import RunPaths


class RunConfig(LoggedConfig):
    """Keys of the commands that run steps: `rl`, `trainer`, `orchestrator`, `sft`."""

    max_steps: int | None = Field(None, ge=1, json_schema_extra=common("Run"))
    """Steps of the run; None is unlimited."""

    ckpt: CkptConfig | None = Field(None, json_schema_extra=common("Checkpoints"))
    """Checkpoints; None writes none."""

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
    def run_paths(self) -> RunPaths:
        """The run directory: output_dir, or its folder `bench` for a benchmark."""
        root = self.output_dir / "bench" if self.bench else self.output_dir
        return RunPaths(root, getattr(self, "fs_consistency_timeout_seconds", None))


class TrainingConfig(RunConfig):
    """Keys of `trainer` and `sft`."""

    model: TrainerModelConfig = Field(default_factory=TrainerModelConfig)
    """The model. `sft` rejects its seq_len: there, data.seq_len is the length of a row."""

    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig)
    """The tokenizer that is published with the weights."""

    optim: OptimConfig = Field(default_factory=AdamWConfig, json_schema_extra=common("Training"))
    """Optimizer."""

    scheduler: SchedulerConfig = Field(default_factory=ConstantSchedulerConfig, json_schema_extra=common("Training"))
    """Learning rate schedule."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto is cuda if available."""

    seed: int = Field(42, ge=0)
    """Seed of random weights and of random batches."""

    deterministic: bool = False
    """Use deterministic kernels only, also of attention: the same batches give the same weights, bit for bit. Slower on
    a GPU. The trainer ends with an error at an operation without one."""

    wait_timeout_seconds: float = Field(1800, gt=0)
    """Timeout for the next batch."""

    dist_timeout_seconds: float = Field(600, gt=0)
    """Timeout of a rank while it waits for another."""

    gc_interval: int = Field(50, ge=1)
    """Steps between two Python garbage collections, which all ranks run at the same time."""

    grad_norm_interval: int | None = Field(10, ge=1)
    """Steps between two records of the gradient norm of each layer and role; None records none."""

    memory_profiler_path: Path | None = None
    """Directory for a CUDA memory snapshot of the first steps, one file per rank."""

    trace_path: Path | None = None
    """Directory for a profiler trace of the third and fourth step, one file per rank."""

    def without_effect_alone(self) -> Iterator[tuple[str, str]]:
        """Report keys that only the orchestrator uses."""
        for logger in METRIC_LOGGERS:
            yield f"{logger}.log_extras.samples", NO_SAMPLES.format(logger)

    def doubtful(self, prefix: str = "") -> Iterator[str]:
        """Report a learning rate that never reaches its peak."""
        limit, warmup = getattr(self, "max_steps", None), self.scheduler.warmup_steps
        if limit is not None and warmup >= limit and not self.bench:
            yield (
                f"{prefix}scheduler.warmup_steps = {warmup} and max_steps = {limit}: the learning rate does not reach "
                f"{prefix}optim.lr"
            )

    def logs_distributions(self, step: int) -> bool:
        """Whether the distributions of a step are logged."""
        return any(logger.logs_distributions(step) for logger in self.metric_loggers)

    def records_layers(self, step: int) -> bool:
        """Whether the gradient norms of layers are recorded in a step."""
        return self.grad_norm_interval is not None and step % self.grad_norm_interval == 0

    @model_validator(mode="after")
    def _check_training(self) -> Self:
        check_memory(self.model, self.optim)
        lowest = getattr(self.scheduler, "min_lr", 0)
        if lowest > (peak := self.scheduler.factor * self.optim.lr):
            raise ValueError(
                f"scheduler.min_lr = {lowest} is above scheduler.factor * optim.lr = {peak}, which it decays from"
            )
        return self


def check_memory(model: TrainerModelConfig, optim: OptimConfig) -> None:
    """Raise ValueError if the memory options cannot be combined with each other or the optimizer."""
    if model.fsdp_cpu_offload and optim.type == "muon":
        raise ValueError(
            "model.fsdp_cpu_offload updates on the CPU, where Muon's matrix products take longer than the step; use "
            "model.optim_cpu_offload, or optim.type 'adamw'"
        )
    if model.fsdp_cpu_offload and model.optim_cpu_offload:
        raise ValueError(
            "model.fsdp_cpu_offload already keeps the optimizer's state in host memory; leave out "
            "model.optim_cpu_offload"
        )


class RolloutsConfig(RootConfig):
    """Keys of `orchestrator`, `eval` and `synthesize`."""

    aliases: ClassVar[dict[str, str]] = {"environment": "env", "rollouts_per_prompt": "rollouts_per_example"}
    variables: ClassVar[dict[str, str]] = {SERVER_ADDRESS_VAR: "client.host"}

    model: NameConfig = Field(default_factory=NameConfig)
    """The served model."""

    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig)
    """The tokenizer that renders the prompts; unused if the server renders them (client.api = chat)."""

    rendering: RenderingConfig = Field(default_factory=RenderingConfig)
    """Conversion between messages and tokens; unused if the server renders the prompts (client.api = chat)."""

    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    """Sampling of completions."""

    sandbox: SandboxConfig = Field(default_factory=SandboxConfig)
    """Isolation and limits of code that the model writes, in environments that execute code."""

    workers_per_env: int = Field(1, ge=1)
    """Worker processes per environment."""

    seed: int = Field(42, ge=0)
    """Seed of the choice and order of examples."""


class EvaluationConfig(RolloutsConfig):
    """Keys of `eval` and `synthesize`."""

    client: AnyServerConfig = Field(default_factory=AnyServerConfig)
    """The server of the model."""

    env: list[EvalEnvConfig] = Field([])
    """Environments to run; one table is a list of one."""

    num_examples: ExampleCount = Field(-1, json_schema_extra=common("Rollouts"))
    """Examples per environment; -1 is all."""

    rollouts_per_example: int = Field(1, ge=1, json_schema_extra=common("Rollouts"))
    """Rollouts n of each example; `eval` reports pass@k for k up to n."""

    seq_len: int = Field(2048, ge=2, json_schema_extra=common("Model"))
    """Maximum tokens of prompt and completion; unused if the server renders the prompts."""

    max_concurrent: int | None = Field(256, ge=1, json_schema_extra=common("Rollouts"))
    """Maximum number of rollouts in flight; None sets no limit."""

    log: LogConfig = Field(default_factory=LogConfig)
    """The log."""

    @model_validator(mode="after")
    def _check_sampling(self) -> Self:
        for env in self.env:
            env.sampling_with(self.sampling)  # raises ValueError for an invalid override
        return self
