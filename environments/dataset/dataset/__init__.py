"""Questions and answers of any data set: a single-turn verifiers environment, and a v1 taskset for agents."""

from typing import Any

from dataset.environment import load_environment

__all__ = ["DatasetTaskset", "load_environment"]


def __getattr__(name: str) -> Any:
    if name == "DatasetTaskset":  # imports the v1 API, which the classic environment does not need
        from dataset.taskset import DatasetTaskset

        return DatasetTaskset
    raise AttributeError(f"module 'dataset' has no attribute {name!r}")
