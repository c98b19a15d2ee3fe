"""Keys of `uv run synthesize`."""

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from prime_rl.configs.base import DEFAULT_OUTPUT_DIR, RootConfig
from prime_rl.configs.playing import AnyServerConfig, PlayedEnvConfig
from prime_rl.configs.rendering import RenderingConfig
from prime_rl.configs.shared import SERVER_ADDRESS_VAR, LogConfig, NameConfig, SamplingConfig, TokenizerConfig


class SynthesizeConfig(RootConfig):
    """Training data from a served model that plays environments: conversations, ready for `sft`."""

    command: ClassVar[str] = "synthesize"
    aliases: ClassVar[dict[str, str]] = {"environment": "env", "rollouts_per_prompt": "rollouts_per_example"}
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

    env: list[PlayedEnvConfig] = Field([PlayedEnvConfig()], min_length=1)
    """Environments to play; one table is a list of one."""

    split: Literal["train", "eval"] = "train"
    """Which examples of the environments."""

    num_examples: int = Field(-1, ge=-1)
    """Examples per environment; -1 takes all."""

    rollouts_per_example: int = Field(1, ge=1)
    """Rollouts of each example."""

    min_reward: float | None = None
    """Write only rollouts whose reward is at least this; None writes all."""

    keep_truncated: bool = False
    """Also write rollouts that were cut by a token limit: their end is not what the model meant to say."""

    seq_len: int = Field(2048, ge=2)
    """Longest prompt and completion together, tokens; not used where the server renders the prompts."""

    max_concurrent: int | None = Field(256, ge=1)
    """Most rollouts in flight at once; None sets no limit."""

    workers_per_env: int = Field(1, ge=1)
    """Processes that run each environment."""

    seed: int = 42
    """Seed of the choice of examples, where not all are taken."""

    output_dir: Path = DEFAULT_OUTPUT_DIR
    """Samples are written to its folder `synthesis`."""

    log: LogConfig = LogConfig()
    """The log."""
