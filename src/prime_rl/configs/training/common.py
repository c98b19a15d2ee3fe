"""Keys of the commands that train: `trainer` and `sft`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from prime_rl.configs.shared.blocks import RunConfig, TokenizerConfig
from prime_rl.configs.shared.monitoring import NO_SAMPLES
from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.configs.training.optim import AdamWConfig, ConstantSchedulerConfig, OptimConfig, SchedulerConfig
from prime_rl.loading.base_config import common


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

    seed: int = 42
    """Seed of random weights and of random batches."""

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
        for logger in ("wandb", "trackio", "tensorboard"):
            yield f"{logger}.log_extras.samples", NO_SAMPLES.format(logger)

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
