"""Keys of `uv run sft`."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from prime_rl.configs.base import DEFAULT_OUTPUT_DIR, BaseConfig, RootConfig, later
from prime_rl.configs.bench import STEPS, shorten
from prime_rl.configs.optim import AdamWConfig, ConstantSchedulerConfig, OptimConfig, SchedulerConfig, check_schedule
from prime_rl.configs.shared import (
    CkptConfig,
    LogConfig,
    Monitored,
    StrList,
    TokenizerConfig,
    WandbConfig,
)
from prime_rl.configs.trainer import TrainerModelConfig


class LossMaskConfig(BaseConfig):
    """Which messages are learned."""

    system: bool = False
    """Learn system messages."""

    user: bool = False
    """Learn user messages."""

    assistant: bool = True
    """Learn assistant messages."""

    tool: bool = False
    """Learn tool messages."""


class SFTDataConfig(BaseConfig):
    """A dataset of conversations or prompt-completion pairs."""

    type: Literal["sft"] = "sft"
    """Kind of data."""

    name: str = "PrimeIntellect/Reverse-Text-SFT"
    """Hugging Face id of the dataset, or a local .jsonl file of `messages` or `prompt`, `completion`."""

    split: str = "train"
    """Split of a Hugging Face dataset."""

    seq_len: int = Field(128, ge=2)
    """Length of a packed row, tokens; longer examples are cut."""

    batch_size: int = Field(128, ge=1)
    """Rows in a batch (one step)."""

    micro_batch_size: int = Field(1, ge=1)
    """Most rows in one forward pass."""

    shuffle: bool = True
    """Shuffle each epoch."""

    seed: int = 0
    """Seed of the shuffling."""

    loss_mask: LossMaskConfig = later(LossMaskConfig())
    """Which messages are learned; assistant only by default."""

    pack_function: Literal["cat", "stack"] = later("cat")
    """How examples become rows: packed one after the other, or one padded row each."""

    subsets: StrList = later([])
    """Subsets of the dataset to mix."""

    probabilities: list[float] = later([])
    """Shares of the subsets."""


class SFTFakeDataConfig(BaseConfig):
    """Random rows, for tests and benchmarks."""

    type: Literal["fake"] = "fake"
    """Kind of data."""

    seq_len: int = Field(128, ge=2)
    """Length of a row, tokens."""

    batch_size: int = Field(128, ge=1)
    """Rows in a batch (one step)."""

    micro_batch_size: int = Field(1, ge=1)
    """Most rows in one forward pass."""

    length: Literal["fixed", "variable"] = "fixed"
    """Whether rows hold one full example or several of different lengths."""

    seed: int = 0
    """Seed of the tokens."""


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

    ckpt: CkptConfig | None = later(None)
    """Checkpoints; None writes none."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto is cuda where there is one."""

    seed: int = 42
    """Seed of random weights."""

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

    @classmethod
    def prepare(cls, state: Any) -> None:
        """Complete the merged values before construction."""
        super().prepare(state)
        shorten(state)

    @model_validator(mode="after")
    def _schedule_falls(self) -> "SFTConfig":
        check_schedule(self.scheduler, self.optim)
        return self
