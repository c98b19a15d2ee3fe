"""Writing a resolved configuration as TOML that loads to the same values."""

import os
from pathlib import Path
from typing import Any

import tomli_w

from prime_rl.core.errors import translate_error, unwritable
from prime_rl.loading.base_config import BaseConfig


def to_toml(config: BaseConfig) -> str:
    """Return the complete configuration as TOML."""
    head = f"# Resolved configuration of `{config.command}`; `uv run {config.command} @ FILE` repeats it.\n\n"
    return head + tomli_w.dumps(substitute(config.model_dump(mode="json"), None, "None"))


def write_config(config: BaseConfig, path: Path) -> None:
    """Write `to_toml` to `path` by rename. Raises ConfigError if the directory cannot be written."""
    with translate_error(OSError, unwritable(f"cannot write {path}")):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}")
        temporary.write_text(to_toml(config))
        temporary.replace(path)


def substitute(value: Any, old: str | None, new: str | None) -> Any:
    """Replace `old` by `new` in nested values. TOML has no null: "None" stands for it."""
    if isinstance(value, dict):
        return {key: substitute(inner, old, new) for key, inner in value.items()}
    if isinstance(value, list):
        return [substitute(inner, old, new) for inner in value]
    return new if value == old else value
