"""The settings that separately started processes of a run must share. Each heartbeat contains those of its process."""

from collections.abc import Mapping
from pathlib import Path

Setting = str | int | None
RunSettings = Mapping[str, Setting]
"""Key of the configuration -> value."""

_TRAINER_LENGTH, _SAMPLED_LENGTH = "model.seq_len", "seq_len"


def describe_model(name: str) -> str:
    """Return the name of a model that is equal in all processes: of a folder, its absolute path."""
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def find_difference(own: RunSettings, other: RunSettings) -> str | None:
    """Return the first setting that differs, with both values; None if the processes can work together.

    A setting that only one of them has does not count. The trainer may take longer samples than the orchestrator ships.
    """
    for key in own.keys() & other.keys():
        if own[key] != other[key]:
            return f"{key} = {own[key]} here and {other[key]}"
    for here, there, is_trainer in ((own, other, True), (other, own, False)):
        longest, shipped = here.get(_TRAINER_LENGTH), there.get(_SAMPLED_LENGTH)
        if isinstance(longest, int) and isinstance(shipped, int) and longest < shipped:
            if is_trainer:
                return f"{_TRAINER_LENGTH} = {longest} here is below {_SAMPLED_LENGTH} = {shipped}"
            return f"{_SAMPLED_LENGTH} = {shipped} here is above {_TRAINER_LENGTH} = {longest}"
    return None
