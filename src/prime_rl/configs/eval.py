"""Keys of `uv run eval`."""

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from prime_rl.configs.base import DEFAULT_OUTPUT_DIR, RootConfig
from prime_rl.configs.playing import AnyServerConfig, PlayedEnvConfig
from prime_rl.configs.rendering import RenderingConfig
from prime_rl.configs.shared import (
    SERVER_ADDRESS_VAR,
    IntList,
    LogConfig,
    Monitored,
    NameConfig,
    SamplingConfig,
    StrList,
    TokenizerConfig,
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
    variables: ClassVar[dict[str, str]] = {**RootConfig.variables, SERVER_ADDRESS_VAR: "client.host"}

    client: AnyServerConfig = AnyServerConfig()
    """Where the model is served."""

    model: NameConfig = NameConfig()
    """The model to ask for."""

    tokenizer: TokenizerConfig = TokenizerConfig()
    """The tokenizer that renders the prompts; not used where the server renders them (client.api = chat)."""

    rendering: RenderingConfig = RenderingConfig()
    """Between messages and tokens; not used where the server renders the prompts."""

    sampling: SamplingConfig = SamplingConfig()
    """How completions are sampled."""

    env: list[PlayedEnvConfig] = Field([])
    """Environments to evaluate in; one table is a list of one."""

    benchmarks: StrList = Field([])
    """Named benchmarks, besides `env`: math500, aime24, aime25, gsm8k, livecodebench."""

    num_examples: int = Field(-1, ge=-1)
    """Examples per environment; -1 takes all."""

    rollouts_per_example: int = Field(1, ge=1)
    """Rollouts n of each example; pass@k is reported for k up to n."""

    pass_threshold: float = 1.0
    """A rollout passes (pass@k) if its reward is at least this."""

    seq_len: int = Field(2048, ge=2)
    """Longest prompt and completion together, tokens; not used where the server renders the prompts."""

    max_concurrent: int | None = Field(256, ge=1)
    """Most rollouts in flight at once; None sets no limit."""

    workers_per_env: int = Field(1, ge=1)
    """Processes that run each environment."""

    weights_dir: Path | None = None
    """Folder of published weights (`weights` of a run) to evaluate one after the other on our own server."""

    steps: IntList | None = None
    """Which of the published versions; None takes all."""

    eval_base: bool = True
    """With weights_dir, evaluate the base model, version 0, too."""

    seed: int = 42
    """Seed of the choice of examples, where not all are taken."""

    output_dir: Path = DEFAULT_OUTPUT_DIR
    """Results are written to its folder `evals`."""

    wandb: WandbConfig | None = None
    """Weights & Biases; None writes files only."""

    log: LogConfig = LogConfig()
    """The log."""
