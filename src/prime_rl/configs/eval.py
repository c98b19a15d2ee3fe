"""Keys of `uv run eval`."""

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from prime_rl.configs.base import DEFAULT_OUTPUT_DIR, RootConfig, later
from prime_rl.configs.shared import (
    ClientConfig,
    EnvConfig,
    LogConfig,
    Monitored,
    NameConfig,
    SamplingConfig,
    StrList,
    WandbConfig,
)


class EvalConfig(RootConfig):
    """Evaluation of a served model in environments or benchmarks."""

    command: ClassVar[str] = "eval"
    aliases: ClassVar[dict[str, str]] = {
        **Monitored,
        "environment": "env",
        "rollouts_per_prompt": "rollouts_per_example",
    }

    client: ClientConfig = ClientConfig()
    """Where the model is served."""

    model: NameConfig = NameConfig()
    """The model to ask for."""

    sampling: SamplingConfig = SamplingConfig()
    """How completions are sampled."""

    env: list[EnvConfig] = Field([])
    """Environments to evaluate in; one table is a list of one."""

    benchmarks: StrList = Field([])
    """Named benchmarks, such as math500,aime24,aime25."""

    num_examples: int = Field(-1, ge=-1)
    """Examples per environment; -1 takes all."""

    rollouts_per_example: int = Field(1, ge=1)
    """Rollouts of each example."""

    seq_len: int = Field(2048, ge=2)
    """Longest prompt and completion together, tokens."""

    max_concurrent: int | None = Field(None, ge=1)
    """Most rollouts in flight at once; None sets no limit."""

    weights_dir: Path | None = later(None)
    """Folder of published weights to evaluate one after the other."""

    steps: list[int] | None = later(None)
    """Which of the published versions; None takes all."""

    eval_base: bool = later(True)
    """Also evaluate the base model."""

    seed: int = 42
    """Seed of the choice of examples."""

    output_dir: Path = DEFAULT_OUTPUT_DIR
    """Where results are written."""

    wandb: WandbConfig | None = None
    """Weights & Biases; None writes only the results file."""

    log: LogConfig = LogConfig()
    """The log."""
