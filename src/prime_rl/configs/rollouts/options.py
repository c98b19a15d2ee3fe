"""Keys of the commands that run environments: chat templates, and the number of rollouts in flight."""

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from prime_rl.configs.rollouts.sandbox import SandboxConfig
from prime_rl.configs.shared.blocks import SERVER_ADDRESS_VAR, NameConfig, SamplingConfig, TokenizerConfig
from prime_rl.loading.base_config import BaseConfig
from prime_rl.loading.root_config import RootConfig


class RenderingConfig(BaseConfig):
    """Conversion between messages and tokens: chat template, tool calls, reasoning."""

    tool_call_parser: Literal["hermes", "qwen3_coder", "llama3_json", "mistral"] = "hermes"
    """Format of the model's tool calls; hermes is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Qwen)."""

    reasoning_parser: Literal["none", "think"] = "none"
    """think passes `<think>...</think>` to environments as reasoning_content, none leaves it in the content."""

    chat_template: Path | None = None
    """Jinja file with the chat template; None uses the tokenizer's own."""

    chat_template_args: dict[str, object] = Field({})
    """Further variables of the chat template, such as `enable_thinking`."""


class ConcurrencyConfig(BaseConfig):
    """Limit of rollouts in flight that follows each server's load (/metrics). `max_concurrent` sets a fixed limit."""

    deprecated: ClassVar[dict[str, str]] = {"interval": "interval_seconds"}

    adaptive: bool = True
    """Adapt the limit; if false, `initial` is the limit of each server, or none if it is unset."""

    initial: int | None = Field(None, ge=1)
    """Initial limit per server; None is the number of sequences of seq_len that fit into the KV cache."""

    min: int = Field(8, ge=1)
    """Minimum rollouts in flight per server."""

    max: int = Field(4096, ge=1)
    """Maximum rollouts in flight per server."""

    interval_seconds: float = Field(1.0, gt=0)
    """Time between two reads of /metrics."""

    def without_effect(self) -> Iterator[tuple[str, str]]:
        """Report the keys of the adaptive limit if it is off."""
        if not self.adaptive:
            keys = ("min", "max", "interval_seconds")
            yield from ((key, "has no effect without concurrency.adaptive") for key in keys)


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

    seed: int = 42
    """Seed of the choice and order of examples."""
