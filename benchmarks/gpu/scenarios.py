"""Scenarios of `trainer_step.py`, with their goals and the published figures of upstream prime-rl.

Upstream's figures: its benchmarks/results/BENCHMARKS.md of 2026-02-01, one H100, FlashAttention-3, compiled,
activation checkpointing, two micro-batches per step. `published` includes the gathering of weights to the host after
each step, like upstream's counter; `step` is its tokens over its measured step time.
"""

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Shape:
    """A Qwen3 architecture with tied embeddings."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    vocabulary: int = 151_936


@dataclass(frozen=True, slots=True)
class Upstream:
    """Tokens/s by step time and as published, and the peak in GiB."""

    step: float
    published: float
    peak_gib: float


Settings = dict[str, Any]
COMPILED: Settings = {"compile": {}, "reshard_after_forward": False}
SELECTIVE: Settings = {"compile": {}, "ac": {"mode": "selective"}}
FULL: Settings = {"compile": {}, "ac": {"mode": "full"}}
EAGER: Settings = {"ac": {"mode": "full"}}


@dataclass(frozen=True, slots=True)
class Scenario:
    """One line of the table.

    Attributes:
        shape: shape of the model.
        row: tokens of a micro-batch.
        sequence: tokens of each sequence in it.
        ways: settings of `model`, the fastest first; the next is tried if one fails, for example without memory.
        rows: micro-batches of a step.
        kind: kind of the objective.
        publish: publish the weights of every step and include the time.
        goal: tokens/s to reach.
        most_gib: limit of the peak of allocated memory.
        upstream: figures for the same model, row and kind.
    """

    shape: Shape
    row: int
    sequence: int
    ways: tuple[Settings, ...]
    rows: int = 2
    kind: str = "rl"
    publish: bool = False
    goal: float | None = None
    most_gib: float | None = None
    upstream: Upstream | None = None


SMALL = Shape(hidden=1024, intermediate=3072, layers=28, heads=16, kv_heads=8)
LARGE = Shape(hidden=2560, intermediate=9728, layers=36, heads=32, kv_heads=8)
TINY = Shape(hidden=64, intermediate=128, layers=2, heads=4, kv_heads=2, head_dim=16, vocabulary=512)
_K = 1024
_LORA: Settings = {"lora": {"rank": 16}}
_FAST = (COMPILED, SELECTIVE, FULL, EAGER)
_LONG = (SELECTIVE, FULL, EAGER)
_LORA_FAST = tuple({**way, **_LORA} for way in _FAST)
_LORA_LONG = tuple({**way, **_LORA} for way in _LONG)
_RL_16K = Upstream(16_450, 11_900, 12.5)

SCENARIOS = {
    "rl-16k": Scenario(SMALL, 16 * _K, 16 * _K, _FAST, goal=33_000, most_gib=60, upstream=_RL_16K),
    "rl-16k-publish": Scenario(
        SMALL, 16 * _K, 16 * _K, _FAST, publish=True, goal=28_000, most_gib=60, upstream=_RL_16K
    ),
    "rl-packed": Scenario(SMALL, 16 * _K, 512, _FAST, goal=33_000, most_gib=60),
    "rl-16k-low-memory": Scenario(
        SMALL, 16 * _K, 16 * _K,
        ({**FULL, "optim_cpu_offload": True}, {**FULL, "optim_cpu_offload": True, "ac_offloading": {}}),
        goal=16_450, most_gib=12.5, upstream=_RL_16K,
    ),
    "rl-64k": Scenario(SMALL, 64 * _K, 64 * _K, _LONG, upstream=Upstream(10_770, 10_150, 19.6)),
    "lora-16k": Scenario(SMALL, 16 * _K, 16 * _K, _LORA_FAST, upstream=Upstream(13_360, 13_340, 5.1)),
    "lora-64k": Scenario(SMALL, 64 * _K, 64 * _K, _LORA_LONG, upstream=Upstream(9_960, 9_970, 11.5)),
    "4b-lora-16k": Scenario(LARGE, 16 * _K, 16 * _K, _LORA_LONG, upstream=Upstream(6_230, 6_230, 23.3)),
    "sft-8k": Scenario(SMALL, 8 * _K, 8 * _K, _FAST, kind="sft", upstream=Upstream(26_300, 26_010, 31.7)),
    "sft-16k": Scenario(SMALL, 16 * _K, 16 * _K, _FAST, kind="sft", upstream=Upstream(25_600, 25_490, 52.8)),
}  # fmt: skip


def tiny(scenario: Scenario) -> Scenario:
    """Return a variant for a CPU: 1/128 of the tokens, a model of 0.1 M parameters, no goals."""
    small = replace(scenario, shape=TINY, row=scenario.row // 128, sequence=max(4, scenario.sequence // 128))
    return replace(small, goal=None, most_gib=None, upstream=None)
