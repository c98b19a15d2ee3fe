"""The log: one format for every process, on stderr. People read it; nothing in the project does."""

import os
import sys
from typing import TYPE_CHECKING

from loguru import logger

from prime_rl.configs.shared import LogConfig
from prime_rl.plain import visible

if TYPE_CHECKING:
    from loguru import Record


def set_up_logging(config: LogConfig) -> None:
    """Log to stderr; with several ranks each line says whose it is."""
    rank = f" [rank {os.environ['RANK']}]" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
    when = "{time:HH:mm:ss!UTC}" if config.utc else "{time:HH:mm:ss}"
    logger.remove()
    logger.configure(patcher=_spell_out)
    line = f"{when} {{level: <7}}{rank} {{message}}"
    # diagnose would write the values of variables under a traceback, keys among them.
    logger.add(sys.stderr, level=config.level.upper(), format=line, diagnose=False)


def _spell_out(record: "Record") -> None:
    """A message may quote a rollout."""
    record["message"] = visible(record["message"])
