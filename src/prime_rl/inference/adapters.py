"""I5: what is checked of a published adapter before its tensors are read (without torch, as `weights` for all weights).

A version that is an adapter holds factors A and B of low-rank additions to layers of the base model, in peft's format.
Its manifest has the hash of every factor, and as `adapter` that of the file that says by how much their products count.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from prime_rl.inference.weights import Policy, Shapes, TensorPlace, WeightsRefusedError, check_weights, read_published
from prime_rl.run.artifact import MANIFEST
from prime_rl.types import PolicyVersion

ADAPTER_CONFIG = "adapter_config.json"

POLICY_ADAPTER = 1
"""Number of the adapter that belongs to the policy, in our slots and vLLM's; named ones have larger numbers."""

_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class Adapter:
    """How an adapter's factors are to be used.

    Attributes:
        config: peft's configuration: rank `r`, `lora_alpha`, `target_modules` ...
        digest: hash of the file that says so.
    """

    config: Mapping[str, Any]
    digest: str


def check_version(directory: Path, version: PolicyVersion, base: Shapes, tied: bool, max_rank: int | None) -> Policy:
    """Check a published version, all weights or an adapter, as `check_weights` or `check_adapter` do."""
    if (directory / ADAPTER_CONFIG).exists():
        return check_adapter(directory, version, base, max_rank)
    return check_weights(directory, version, base, tied)


def check_adapter(directory: Path, version: PolicyVersion, base: Shapes, max_rank: int | None) -> Policy:
    """Check that `directory` claims to hold an adapter of the running model, published as `version`, whole.

    Args:
        directory: a published weights directory.
        version: the version it must declare.
        base: names and shapes of the base checkpoint.
        max_rank: largest rank that is served; None if no adapter is.

    Raises:
        WeightsRefusedError: as `check_weights`; or a factor belongs to no layer of the base model, or its rank is too
            large, or the server takes no adapters.
    """
    policy, places, manifest = read_published(directory, version)
    adapter = _read_config(directory / ADAPTER_CONFIG)
    if manifest.get("adapter") != adapter.digest:
        raise WeightsRefusedError(
            f"{directory / ADAPTER_CONFIG} is not what was published: {MANIFEST} has another hash of it"
        )
    if max_rank is None:
        raise WeightsRefusedError(f"{directory} holds an adapter; this server takes them with enable_lora = true")
    rank = _check_factors(directory, places, base)
    if rank > max_rank:
        raise WeightsRefusedError(
            f"{directory} holds an adapter of rank {rank}; this server has max_lora_rank = {max_rank}"
        )
    return Policy(policy.version, policy.hash, policy.path, policy.tensors, policy.canary, adapter)


def _read_config(file: Path) -> Adapter:
    try:
        raw = file.read_bytes()
        config = json.loads(raw)
        if not isinstance(config, dict):
            raise ValueError("not an object")
    except (OSError, ValueError) as error:
        raise WeightsRefusedError(f"{file} is not an adapter's configuration: {error}") from None
    return Adapter(config, xxhash.xxh3_128_hexdigest(raw))


def _check_factors(directory: Path, places: Mapping[str, TensorPlace], base: Shapes) -> int:
    """See that every factor fits a layer and the other factor of that layer; return the largest rank."""
    largest = 0
    layers = {name.removeprefix(_PREFIX).rpartition(".lora_")[0] for name in places}
    for layer in sorted(layers):
        a, b = (places.get(f"{_PREFIX}{layer}.lora_{factor}.weight") for factor in "AB")
        if a is None or b is None:
            raise WeightsRefusedError(
                f"{directory} lacks a factor of layer {layer or '?'}, or names it as peft does not"
            )
        weight = base.get(f"{layer}.weight")
        if weight is None:
            raise WeightsRefusedError(f"{a.file} adapts layer {layer}, unknown to the model that is served")
        rank = a.shape[0] if a.shape else 0
        if (a.shape, b.shape, len(weight)) != ((rank, weight[-1]), (weight[0], rank), 2):
            raise WeightsRefusedError(
                f"{a.file} adapts layer {layer} by factors of shape {list(a.shape)} and {list(b.shape)}; "
                f"its weight has shape {list(weight)} in the model that is served"
            )
        largest = max(largest, rank)
    if 2 * len(layers) != len(places):
        raise WeightsRefusedError(f"{directory} holds tensors that are no factors of an adapter")
    return largest
