"""Keys of `uv run sft`."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from prime_rl.configs.base import DEFAULT_OUTPUT_DIR, RootConfig
from prime_rl.configs.bench import STEPS, shorten
from prime_rl.configs.memory import check_memory
from prime_rl.configs.optim import AdamWConfig, ConstantSchedulerConfig, OptimConfig, SchedulerConfig, check_schedule
from prime_rl.configs.sft_data import SFTDataConfig, SFTFakeDataConfig, ValConfig
from prime_rl.configs.shared import (
    CkptConfig,
    LogConfig,
    Monitored,
    TokenizerConfig,
    WandbConfig,
)
from prime_rl.configs.trainer import TrainerModelConfig


class SFTConfig(RootConfig):
    """Supervised fine-tuning."""

    command: ClassVar[str] = "sft"
    aliases: ClassVar[dict[str, str]] = Monitored

    model: TrainerModelConfig = TrainerModelConfig()
    """The model; its seq_len is not used here (data.seq_len is)."""

    tokenizer: TokenizerConfig = TokenizerConfig()
    """The tokenizer, published with the weights."""

    data: Annotated[SFTDataConfig | SFTFakeDataConfig, Field(discriminator="type")] = SFTDataConfig()
    """What to learn."""

    val: ValConfig | None = None
    """Validation loss; None computes none."""

    optim: OptimConfig = AdamWConfig(lr=1e-5)
    """The optimizer."""

    scheduler: SchedulerConfig = ConstantSchedulerConfig()
    """Learning rate over the steps."""

    max_steps: int | None = Field(None, ge=1)
    """Steps to train; None is one pass over the data."""

    output_dir: Path = DEFAULT_OUTPUT_DIR
    """The run directory; the result is its newest weights/step_N."""

    weights_interval: int | None = Field(None, ge=1)
    """Steps between two publications of weights; None publishes the last only."""

    weights_dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Precision of the published weights; auto is bfloat16 on CUDA and float32 on CPU."""

    ckpt: CkptConfig | None = None
    """Checkpoints; None writes none."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto is cuda where there is one."""

    seed: int = 42
    """Seed of random weights."""

    wait_timeout_seconds: float = Field(1800, gt=0)
    """Longest wait for the data of one batch, seconds."""

    dist_timeout_seconds: float = Field(600, gt=0)
    """Longest wait of one rank for another, seconds."""

    wandb: WandbConfig | None = None
    """Weights & Biases; None writes only metrics/trainer.jsonl."""

    log: LogConfig = LogConfig()
    """The log."""

    bench: bool = False
    """Benchmark: a few steps in output_dir/bench, then a table."""

    bench_steps: int = Field(STEPS, ge=2)
    """Steps of a benchmark, of which the first is not counted; takes the place of max_steps."""

    memory_profiler_path: Path | None = None
    """Directory for a CUDA memory snapshot of the first steps, one file a rank."""

    trace_path: Path | None = None
    """Directory for a profiler trace of the third and fourth step, one file a rank."""

    @classmethod
    def prepare(cls, state: Any) -> None:
        """Complete the merged values before construction."""
        super().prepare(state)
        shorten(state)

    @model_validator(mode="after")
    def _data_have_an_end(self) -> "SFTConfig":
        data, val = self.data, self.val
        if data.type == "fake":
            if self.max_steps is None:
                raise ValueError("max_steps: fake data never end; set max_steps")
            if val is not None and not self.bench:
                raise ValueError("val: data.type is fake, so there is nothing to validate on; leave val out")
            return self
        if data.streaming and self.max_steps is None:
            raise ValueError("max_steps: how many steps a pass is, streaming does not tell; set max_steps")
        if val is not None and not (val.name or val.split) and data.streaming:
            raise ValueError("val.fraction: a stream cannot be parted; give val.name or val.split")
        if val is not None and val.name == data.name and (val.split or "train") == data.split:
            raise ValueError("val.name: these are the data to train on; leave it out to hold a part of them out")
        if val is not None and val.split and not val.name:
            files = [name for name in data.name if Path(name).expanduser().is_file()]
            if files:
                raise ValueError(f"val.split: {files[0]} is a file, which has no splits; give val.name")
        return self

    @model_validator(mode="after")
    def _memory_fits_together(self) -> "SFTConfig":
        check_memory(self.model, self.optim)
        return self

    @model_validator(mode="after")
    def _schedule_falls(self) -> "SFTConfig":
        check_schedule(self.scheduler, self.optim)
        return self
