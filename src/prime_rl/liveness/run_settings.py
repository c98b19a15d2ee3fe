"""The settings that the processes of a run must share, also if they are started separately, and their comparison.

Trainer and orchestrator write theirs into their heartbeats; a server answers them to `GET /policy`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

Setting = str | int | None
RunSettings = Mapping[str, Setting]
"""Key of the configuration -> resolved value."""

PUBLISHED_DTYPE, SERVED_DTYPE = "weight_broadcast.dtype", "model.dtype"
ADAPTER_RANK, MAX_ADAPTER_RANK = "model.lora.rank", "max_lora_rank"
"""None if the trainer publishes no adapters, or the server accepts none."""
SAMPLED_LENGTH, SERVED_LENGTH = "seq_len", "model.max_model_len"
REPLAYS_ROUTES, RECORDS_ROUTES = "model.router_replay", "enable_return_routed_experts"
"""0 or 1."""
MAX_RUNS = "max_concurrent_runs"
"""1 for a trainer without this setting."""
RUN_KEYS = "keys of the run's training"
"""Keys of the trainer that an orchestrator sets for its run, separated by commas; None if it sets none."""

_LIMITS = (("model.seq_len", SAMPLED_LENGTH), (SERVED_LENGTH, SAMPLED_LENGTH), (MAX_ADAPTER_RANK, ADAPTER_RANK))
"""Pairs of a limit in one process and the value in the other one that must not exceed it."""
_EXACT_IN = {"bfloat16": ("bfloat16", "float32"), "float16": ("float16", "float32"), "float32": ("float32",)}
"""Precision of published weights -> precisions that represent each of their values."""


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """The settings of one process, and where it is in messages: `here`, or `at` something."""

    place: str
    values: RunSettings


def describe_model(name: str) -> str:
    """Return the name of a model that is equal in all processes: of a folder, its absolute path."""
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def find_difference(one: ProcessSettings, other: ProcessSettings) -> str | None:
    """Return the first difference that prevents two processes from working together: places, values and cure.

    Settings of the same key must be equal. A setting that only one of them has does not count.
    """
    for key, value in one.values.items():
        if key in other.values and other.values[key] != value:
            return f"{key} = {value} {one.place} and {other.values[key]} {other.place}; give both the same"
    return _find_excess(one, other) or _find_excess(other, one)


def _find_excess(limiting: ProcessSettings, limited: ProcessSettings) -> str | None:
    """Return the first value of `limited` that `limiting` cannot take."""
    for limit_key, key in _LIMITS:
        limit, value = limiting.values.get(limit_key), limited.values.get(key)
        if isinstance(limit, int) and isinstance(value, int) and limit < value:
            return (
                f"{key} = {value} {limited.place} is above {limit_key} = {limit} {limiting.place}; "
                f"set {limit_key} to {value} or more, or {key} to {limit} or less"
            )
    if limited.values.get(ADAPTER_RANK) and limiting.values.get(MAX_ADAPTER_RANK, 0) is None:
        return (
            f"model.lora.publish = adapter {limited.place} needs a server with enable_lora = true, and it is false "
            f"{limiting.place}; add --enable-lora there, or set model.lora.publish to merged"
        )
    if limited.values.get(REPLAYS_ROUTES) and limiting.values.get(RECORDS_ROUTES) == 0:
        return (
            f"{REPLAYS_ROUTES} = true {limited.place} needs a server that records the experts of each token, and the "
            f"one {limiting.place} does not; add --enable-return-routed-experts there"
        )
    is_single = ADAPTER_RANK in limiting.values and limiting.values.get(MAX_RUNS, 1) == 1
    if is_single and (keys := limited.values.get(RUN_KEYS)):
        return (
            f"{keys} {limited.place}: keys of one of several runs, which needs a trainer with {MAX_RUNS} above 1, "
            f"and the one {limiting.place} has one run; set them there"
        )
    published, served = limited.values.get(PUBLISHED_DTYPE), limiting.values.get(SERVED_DTYPE)
    if served and isinstance(published, str) and served not in _EXACT_IN.get(published, (served,)):
        return (
            f"{PUBLISHED_DTYPE} = {published} {limited.place} and {SERVED_DTYPE} = {served} {limiting.place}: the "
            f"server would sample from rounded weights; set {SERVED_DTYPE} to {published}, or {PUBLISHED_DTYPE} to "
            f"{served}"
        )
    return None
