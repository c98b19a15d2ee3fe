"""Which settings make a resumed run the same run: those that decide a number of training, and no others."""

from collections.abc import Iterator, Mapping
from typing import Any

_DECIDING = (
    "model.name", "model.lora", "model.dtype", "model.reduce_dtype", "model.debug", "optim", "scheduler", "loss",
    "reference", "minibatches", "data", "seed",
)  # fmt: skip
# How rows are shared among forward passes changes no result beyond rounding, and what is published nothing at all.
_IGNORED = {"data.micro_batch_size", "model.lora.publish"}


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Pick them from a dumped configuration, as dotted keys.

    The learning rate is a function of the step and these settings, which is why no scheduler is in a checkpoint; a
    schedule that falls also depends on where it ends.
    """
    keys = dict(_flat(config))
    chosen = {key: value for key, value in keys.items() if _decides(key) and key not in _IGNORED}
    if keys.get("scheduler.type") != "constant":
        chosen["max_steps"] = keys.get("max_steps")
    return chosen


def changes(before: Mapping[str, Any], now: Mapping[str, Any], only: str = "") -> list[str]:
    """One line for each deciding setting that differs; keys that one version of the program does not know are equal."""
    old, new = settings_of(before), settings_of(now)
    return [
        f"{key} was {old[key]!r} when the checkpoint was written and is {new[key]!r}"
        for key in sorted(old.keys() & new.keys())
        if key.startswith(only) and old[key] != new[key]
    ]


def _decides(key: str) -> bool:
    return any(key == root or key.startswith(f"{root}.") for root in _DECIDING)


def _flat(block: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in block.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{key}.")
        else:
            yield key, value
