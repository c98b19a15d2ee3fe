"""Writing a resolved configuration as TOML that loads to the same values."""

import os
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel

from prime_rl.configs.base import RootConfig
from prime_rl.errors import ConfigError


def to_toml(config: RootConfig) -> str:
    """The complete configuration. TOML has no null, so None is written as the string "None"."""
    head = f"# Resolved configuration of `{config.command}`; `uv run {config.command} @ FILE` repeats it.\n\n"
    return head + tomli_w.dumps(_plain(config.model_dump(mode="json")))


def write_config(config: RootConfig, path: Path) -> None:
    """Write `to_toml` to `path` by rename.

    Raises:
        ConfigError: the directory cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}")
        temporary.write_text(to_toml(config))
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(
            f"output_dir = {config.output_dir} cannot be written: {error.strerror} ({path}); set --output-dir"
        ) from None


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    if isinstance(value, dict):
        # Scalars first: in TOML a key after a table would belong to that table.
        items = sorted(value.items(), key=lambda item: isinstance(item[1], dict) or _is_tables(item[1]))
        return {key: _plain(inner) for key, inner in items}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return "None" if value is None else value


def _is_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)
