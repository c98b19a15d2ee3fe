"""The log: one format for every process, on stderr. People read it; nothing in the project does."""

import os
import sys

from loguru import logger

from prime_rl.configs.shared import LogConfig


def set_up_logging(config: LogConfig) -> None:
    """Log to stderr; with several ranks each line says whose it is."""
    rank = f" [rank {os.environ['RANK']}]" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
    when = "{time:HH:mm:ss!UTC}" if config.utc else "{time:HH:mm:ss}"
    logger.remove()
    logger.add(sys.stderr, level=config.level.upper(), format=f"{when} {{level: <7}}{rank} {{message}}")
