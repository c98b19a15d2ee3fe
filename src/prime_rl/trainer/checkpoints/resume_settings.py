"""Which settings of the trainer may change on resume: those that change results log a warning, a few are refused."""

from collections.abc import Iterator, Mapping
from typing import Any

from prime_rl.core.errors import ConfigError

_DECIDING = (
    "model.name", "model.lora", "model.dtype", "model.reduce_dtype", "model.debug", "optim", "scheduler", "loss",
    "reference", "num_minibatches", "data", "seed", "tokenizer.name",
)  # fmt: skip
# Names that earlier releases wrote into checkpoints.
_RENAMED = {
    "minibatches": "num_minibatches",
    "optim.betas1": "optim.beta1",
    "optim.betas2": "optim.beta2",
    "optim.mu": "optim.momentum",
    "data.fake.generate_samples": "data.fake.variable_length",
    "model.download_timeout": "model.download_timeout_seconds",
}
# These change results by rounding at most.
_IGNORED = {"data.micro_batch_size", "model.lora.publish", "model.download_timeout_seconds"}


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Select them from a dumped configuration, as dotted keys.

    The learning rate is a function of the step and these settings, so a checkpoint contains no scheduler. A decaying
    schedule also depends on `max_steps`.
    """
    keys = {_RENAMED.get(key, key): value for key, value in _flat(config)}
    roots = tuple(f"{root}." for root in _DECIDING)
    chosen = {key: value for key, value in keys.items() if f"{key}.".startswith(roots) and key not in _IGNORED}
    if keys.get("scheduler.type") != "constant":
        chosen["max_steps"] = keys.get("max_steps")
    return chosen


def check_settings(old_command: str, before: Mapping[str, Any], command: str, now: Mapping[str, Any]) -> list[str]:
    """Return the changed settings, as `changed_settings`; ConfigError if a run of `command` cannot be resumed.

    The data and environments check their own settings when their position is restored.
    """
    if old_command != command:
        raise ConfigError(
            f"the checkpoint was written by {old_command}, not by {command}; to start from its weights, export them "
            "(prime_rl.trainer.export) and set model.name to the folder"
        )
    had, has = before["optim"]["type"], now["optim"]["type"]
    if had != has:
        raise ConfigError(
            f"optim.type = {has}, but the checkpoint has the state of {had}; resume with that, or export its weights "
            "(prime_rl.trainer.export) and start a new run with them"
        )
    return changed_settings(before, now)


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Describe each setting that differs in one line; keys that one version of the program lacks are ignored."""
    old, new = settings_of(before), settings_of(now)
    differing = {key: (repr(old[key]), repr(new[key])) for key in old.keys() & new.keys() if old[key] != new[key]}
    differing |= dict.fromkeys(_switched_on(old, new), ("None", "set"))
    differing |= dict.fromkeys(_switched_on(new, old), ("set", "None"))
    return [
        f"{key} was {was} when the checkpoint was written and is {is_}" for key, (was, is_) in sorted(differing.items())
    ]


def _switched_on(old: Mapping[str, Any], new: Mapping[str, Any]) -> set[str]:
    """Blocks that are None in `old` and have keys in `new`."""
    off = {key for key, value in old.items() if value is None}
    return {key for key in off if any(other.startswith(f"{key}.") for other in new)}


def _flat(block: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in block.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{key}.")
        else:
            yield key, value
