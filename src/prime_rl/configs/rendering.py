"""`rendering`: the conversion between messages and tokens."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from prime_rl.configs.loading.base_config import BaseConfig


class TemplateConfig(BaseConfig):
    """The chat template."""

    chat_template: Path | None = None
    """Jinja file with the chat template; None uses the tokenizer's own."""

    chat_template_args: dict[str, object] = Field({})
    """Further variables of the chat template, such as `enable_thinking`."""


class RenderingConfig(TemplateConfig):
    """Conversion between messages and tokens: chat template, tool calls, reasoning."""

    tool_call_parser: Literal[
        "auto",
        "hermes",
        "qwen3_coder",
        "llama3_json",
        "mistral",
        "glm45",
        "kimi_k2",
        "deepseek_v3",
        "minimax_m2",
        "gpt_oss",
    ] = "auto"
    """Format of the model's tool calls. auto finds it in the chat template; where it knows none, it takes hermes:
    `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

    history: Literal["sampled", "template"] = "sampled"
    """How a later prompt contains the replies of the model: as they were `sampled`, so a conversation is one sample, or
    as the `template` writes them, which begins a new sample where it drops reasoning or writes other text."""

    reasoning_parser: Literal["none", "think"] = "none"
    """think passes `<think>...</think>` to environments as reasoning_content, none leaves it in the content. The
    analysis of gpt-oss is always reasoning_content."""
