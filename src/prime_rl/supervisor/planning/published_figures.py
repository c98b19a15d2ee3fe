"""Upstream prime-rl's published benchmarks of its trainer, and how far the plan is from them.

All have one sequence in a row, two rows for each rank in a step, `compile`, and activation checkpointing (January and
February 2026). Speed is the tokens of a step over its seconds, because the published tokens/s of full fine-tunes
include the gathering of the weights between steps. The plan misses rows 10, 16, 17 and 19. Upstream's other baselines
of the same settings are nearer to it: 19.5 GiB and 61 s for row 10, 85.6 GiB and 5.4 s for row 16, 10.3 s for row 17.
"""

from dataclasses import dataclass

from prime_rl.configs.training.model import (
    ActivationCheckpointConfig,
    ActivationOffloadConfig,
    CompileConfig,
    LoRAConfig,
    TrainerModelConfig,
)
from prime_rl.configs.training.optim import AdamWConfig
from prime_rl.supervisor.planning.gpu_table import parse_gpus
from prime_rl.supervisor.planning.model_shape import load_shape
from prime_rl.supervisor.planning.trainer_plan import TrainerJob, trainer_memory, trainer_seconds

MEMORY_TOLERANCE, SPEED_TOLERANCE = 0.15, 0.25
_ROWS = 2


@dataclass(frozen=True, slots=True)
class PublishedFigure:
    """A row: job is `full`, `lora` or `sft`, with `offload` if activations are offloaded."""

    gpus: str
    model: str
    job: str
    tokens: int
    step_seconds: float
    memory_gib: float

    @property
    def trainer_job(self) -> TrainerJob:
        """What was measured."""
        ranks, gpu = parse_gpus(self.gpus)
        kind, _, offload = self.job.partition(" ")
        model = TrainerModelConfig(
            compile=CompileConfig(),
            ac=ActivationCheckpointConfig(),
            ac_offloading=ActivationOffloadConfig() if offload else None,
            lora=LoRAConfig(rank=16) if kind == "lora" else None,
        )
        step = _ROWS * ranks * self.tokens
        shape = load_shape(self.model)
        return TrainerJob(
            shape, gpu, ranks, model, AdamWConfig(), self.tokens, self.tokens, step, upstream=True, is_sft=kind == "sft"
        )

    @property
    def errors(self) -> tuple[float, float]:
        """Planned over published memory, and planned over published tokens/s, minus 1."""
        job = self.trainer_job
        memory, seconds = sum(trainer_memory(job).values()), sum(trainer_seconds(job).values())
        return memory / self.memory_gib - 1, self.step_seconds / seconds - 1


_K16, _K64 = 16384, 65536
FIGURES = (
    PublishedFigure("1xH100", "Qwen3-0.6B", "full", _K16, 1.99, 12.53),
    PublishedFigure("1xH100", "Qwen3-0.6B", "full", _K64, 12.18, 19.56),
    PublishedFigure("1xH100", "Qwen3-0.6B", "full offload", _K64, 12.46, 16.08),
    PublishedFigure("1xH100", "Qwen3-0.6B", "lora", _K16, 2.45, 5.15),
    PublishedFigure("1xH100", "Qwen3-0.6B", "sft", _K16, 1.28, 52.84),
    PublishedFigure("1xH100", "Qwen3-0.6B", "sft", 8192, 0.62, 31.74),
    PublishedFigure("1xH100", "Qwen3-4B", "lora", _K16, 5.26, 23.3),
    PublishedFigure("1xH100", "Qwen3-4B", "lora offload", _K16, 5.5, 20.57),
    PublishedFigure("1xA6000", "Qwen3-0.6B", "full", _K16, 7.46, 12.47),
    PublishedFigure("1xA6000", "Qwen3-0.6B", "full", _K64, 52.8, 11.73),
    PublishedFigure("1xA6000", "Qwen3-0.6B", "lora", _K16, 9.23, 5.09),
    PublishedFigure("1xA6000", "Qwen3-0.6B", "sft", 8192, 2.46, 31.21),
    PublishedFigure("8xH100", "Qwen3-30B-A3B", "lora", _K64, 44.86, 63.68),
    PublishedFigure("8xB200", "Qwen3-4B", "lora", _K16, 5.69, 10.22),
    PublishedFigure("8xB200", "Qwen3-4B", "sft", _K16, 3.74, 54.59),
    PublishedFigure("8xB200", "Qwen3-30B-A3B", "full", _K16, 28.3, 32.0),
    PublishedFigure("8xB200", "INTELLECT-3", "lora", _K16, 54.3, 90.4),
    PublishedFigure("8xB200", "INTELLECT-3", "lora", _K64, 202, 153.6),
    PublishedFigure("8xB200", "Qwen3-235B-A22B", "lora", _K16, 62.7, 161.5),
)
"""The nineteen rows of the project's reference."""
