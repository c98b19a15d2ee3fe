"""Checks of a published adapter before its tensors are read; without torch, like `weight_checks`.

A version that is an adapter contains factors A and B of low-rank additions to layers of the base model, in peft's
format. Its manifest has the hash of every factor, and as `adapter` the hash of the configuration with the scale.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from prime_rl.core.errors import translate_error
from prime_rl.core.types import PolicyVersion
from prime_rl.inference.policy.weight_checks import (
    PublishedPolicy,
    ServedModel,
    Shapes,
    TensorLocation,
    WeightsRefusedError,
    check_weights,
    read_published,
)
from prime_rl.storage.artifact import MANIFEST

ADAPTER_CONFIG = "adapter_config.json"

POLICY_ADAPTER = 1
"""Number of the policy's adapter, in our slots and in vLLM's; named adapters have larger numbers."""

_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """How an adapter's factors are applied: peft's configuration (rank `r`, `lora_alpha` ...) and its file's hash."""

    config: Mapping[str, Any]
    digest: str


def check_version(directory: Path, version: PolicyVersion, model: ServedModel, max_rank: int | None) -> PublishedPolicy:
    """Check a published version by `check_weights` or `check_adapter`."""
    if (directory / ADAPTER_CONFIG).exists():
        return check_adapter(directory, version, model.shapes, max_rank)
    return check_weights(directory, version, model.shapes, model.tied)


def check_adapter(directory: Path, version: PolicyVersion, base: Shapes, max_rank: int | None) -> PublishedPolicy:
    """Check that `directory` contains a complete adapter of the served model, published as `version`.

    `max_rank` is the largest rank of the server; None if it accepts no adapters.

    Raises:
        WeightsRefusedError: as `check_weights`; or a factor matches no layer of the base model, its rank is too large,
            or the server accepts no adapters.
    """
    policy, places, manifest = read_published(directory, version)
    file = directory / ADAPTER_CONFIG
    invalid = f"{file} is not a configuration of an adapter"
    with translate_error((OSError, ValueError), lambda error: WeightsRefusedError(f"{invalid}: {error}")):
        raw = file.read_bytes()
        config = json.loads(raw)
        if not isinstance(config, dict):
            raise ValueError("not an object")
    adapter = AdapterSpec(config, xxhash.xxh3_128_hexdigest(raw))
    if manifest.get("adapter") != adapter.digest:
        raise WeightsRefusedError(f"{file} differs from its manifest: {MANIFEST} has another hash")
    if max_rank is None:
        raise WeightsRefusedError(f"{directory} contains an adapter; the server accepts it with enable_lora = true")
    rank = _check_factors(directory, places, base)
    if rank > max_rank:
        raise WeightsRefusedError(
            f"{directory} contains an adapter of rank {rank}; this server has max_lora_rank = {max_rank}"
        )
    return replace(policy, adapter=adapter)


def _check_factors(directory: Path, places: Mapping[str, TensorLocation], base: Shapes) -> int:
    """Check every factor against its layer and the other factor of that layer; return the largest rank."""
    largest = 0
    layers = {name.removeprefix(_PREFIX).rpartition(".lora_")[0] for name in places}
    for layer in sorted(layers):
        a, b = (places.get(f"{_PREFIX}{layer}.lora_{factor}.weight") for factor in "AB")
        if a is None or b is None:
            raise WeightsRefusedError(f"{directory} lacks a factor of layer {layer or '?'}, or its name is not peft's")
        weight = base.get(f"{layer}.weight")
        if weight is None:
            raise WeightsRefusedError(f"{a.file} adapts layer {layer}, which the served model does not have")
        rank = a.shape[0] if a.shape else 0
        if (a.shape, b.shape, len(weight)) != ((rank, weight[-1]), (weight[0], rank), 2):
            raise WeightsRefusedError(
                f"{a.file} adapts layer {layer} by factors of shape {list(a.shape)} and {list(b.shape)}; "
                f"its weight has shape {list(weight)} in the served model"
            )
        largest = max(largest, rank)
    if 2 * len(layers) != len(places):
        raise WeightsRefusedError(f"{directory} contains tensors that are not factors of an adapter")
    return largest
