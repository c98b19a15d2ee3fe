"""The log: one format for all processes, on stderr and in a file. It is for people; no code parses it."""

import os
import sys
from pathlib import Path

from loguru import logger

from prime_rl.core.logs.log_file import open_log_file
from prime_rl.core.terminal_escape import escape_control_chars


def set_up_logging(level: str, utc: bool, file: Path | None = None) -> None:
    """Log to stderr, with times in UTC or in the local time zone; with several ranks, each line contains the rank.

    The lines also go to `file`, if it is given and stderr does not go to its folder already.
    """
    rank = f" [rank {os.environ['RANK']}]" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
    time = "{time:HH:mm:ss!UTC}" if utc else "{time:HH:mm:ss}"
    logger.remove()
    # A message may quote model output.
    logger.configure(patcher=lambda record: record.update({"message": escape_control_chars(record["message"])}))
    line = f"{time} {{level: <7}}{rank} {{message}}"
    # diagnose=True would print the values of variables in tracebacks, including keys.
    logger.add(sys.stderr, level=level.upper(), format=line, diagnose=False)
    if file is None:
        return
    try:
        log_file = open_log_file(file)
    except OSError as error:
        logger.warning("the log goes to stderr only: {} cannot be written: {}", file, error.strerror)
        return
    if log_file is not None:
        logger.add(log_file, level=level.upper(), format=line, diagnose=False)
