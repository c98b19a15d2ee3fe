"""`log`: the log files and the terminal."""

from typing import Literal

from pydantic import Field

from prime_rl.configs.loading.base_config import BaseConfig, common


class LogConfig(BaseConfig):
    """The log."""

    level: Literal["debug", "info", "warning", "error"] = Field("info", json_schema_extra=common("Logging"))
    """Minimum level of log messages."""

    utc: bool = False
    """Log times in UTC instead of local time."""

    file: bool = True
    """Also write the log to logs/ in the run directory, unless it goes there already, as under `rl`."""
