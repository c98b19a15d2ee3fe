"""`model.name` and `tokenizer`: the base model. `training/model.py` has the keys of the trained model."""

from pydantic import Field

from prime_rl.configs.loading.base_config import BaseConfig, common

DEFAULT_MODEL = "Qwen/Qwen3-0.6B"


class NameConfig(BaseConfig):
    """The model."""

    name: str = Field(DEFAULT_MODEL, json_schema_extra=common("Model"))
    """Hugging Face id or local directory of the base model (policy version 0)."""

    revision: str | None = None
    """Branch, tag or commit of the model on the Hugging Face hub; None is the default branch."""

    download_timeout_seconds: float = Field(3600, gt=0)
    """Timeout for the download of the model, by this or another process of the node."""


class TokenizerConfig(BaseConfig):
    """The tokenizer."""

    name: str | None = None
    """Hugging Face id or local directory of the tokenizer; None uses the model's tokenizer."""

    trust_remote_code: bool = False
    """Run Python code from the tokenizer's repository."""
