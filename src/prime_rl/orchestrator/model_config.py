"""What a model's config.json says, read without torch or transformers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loguru import logger


def read_model_config(model: str) -> Mapping[str, Any]:
    """Return what describes the language model in the config.json of `model`, a local directory or a Hugging Face id.

    Nothing that the orchestrator does is wrong without it: where the file cannot be had, what is returned is empty, and
    the log says so.
    """
    try:
        config = json.loads(_path(model).read_text())
        if not isinstance(config, dict):
            raise ValueError("it is no JSON object")
    except (OSError, ValueError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        logger.warning("no config.json of {} can be read: {}", model, reason)
        return {}
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def vocabulary_size(config: Mapping[str, Any]) -> int | None:
    """Return how many tokens the model knows, 0 and on; None if its config.json does not say."""
    size = config.get("vocab_size")
    return size if isinstance(size, int) and size > 0 else None


def _path(model: str) -> Path:
    directory = Path(model).expanduser()
    if directory.is_dir():
        return directory / "config.json"
    from huggingface_hub import hf_hub_download  # seldom needed, and slow to import

    try:
        return Path(hf_hub_download(model, "config.json", local_files_only=True))
    except FileNotFoundError:  # not in the cache
        return Path(hf_hub_download(model, "config.json"))
