"""Which settings make a resumed run the same run: those that decide a number of training, and no others."""

from collections.abc import Iterator, Mapping
from typing import Any

_DECIDING = (
    "model.name", "model.lora", "model.dtype", "model.reduce_dtype", "model.debug", "optim", "scheduler", "loss",
    "reference", "minibatches", "data", "seed", "tokenizer.name",
)  # fmt: skip
# How rows are shared among forward passes changes no result beyond rounding, and what is published nothing at all.
_IGNORED = {"data.micro_batch_size", "model.lora.publish", "model.download_timeout"}


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
    differing = {key: (repr(old[key]), repr(new[key])) for key in old.keys() & new.keys() if old[key] != new[key]}
    differing |= dict.fromkeys(_switched_on(old, new), ("None", "set"))
    differing |= dict.fromkeys(_switched_on(new, old), ("set", "None"))
    return [
        f"{key} was {was} when the checkpoint was written and is {is_}"
        for key, (was, is_) in sorted(differing.items())
        if key.startswith(only)
    ]


def _switched_on(old: Mapping[str, Any], new: Mapping[str, Any]) -> set[str]:
    """Blocks that are None in `old` and have keys in `new`."""
    off = {key for key, value in old.items() if value is None}
    return {key for key in off if any(other.startswith(f"{key}.") for other in new)}


def _decides(key: str) -> bool:
    return any(key == root or key.startswith(f"{root}.") for root in _DECIDING)


def _flat(block: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in block.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{key}.")
        else:
            yield key, value
