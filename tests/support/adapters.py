"""Random adapters in peft's format, and their publication as policy versions."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from safetensors.numpy import save_file

from prime_rl.inference.policy.weight_checks import read_shapes
from tests.support.tiny_model import publish_weights

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(
    path: Path, base: Path, seed: int, rank: int = 4, alpha: float = 8, targets: Sequence[str] = TARGETS
) -> Path:
    """Write an adapter that clearly changes the outputs of the model in `base`.

    Args:
        path: the directory to write.
        base: the model's directory.
        seed: of the random weights.
        rank: rank of the factors.
        alpha: the scale is alpha / rank.
        targets: last parts of the names of the adapted layers.

    Returns:
        `path`.
    """
    rng = np.random.default_rng(seed)
    factors = {}
    for name, shape in sorted(read_shapes(base).items()):
        layer = name.removesuffix(".weight")
        if layer.rpartition(".")[2] in targets:
            rows, columns = shape
            a, b = rng.normal(0, columns**-0.5, (rank, columns)), rng.normal(0, 0.3, (rows, rank))
            factors[f"base_model.model.{layer}.lora_A.weight"] = a.astype(np.float32)
            factors[f"base_model.model.{layer}.lora_B.weight"] = b.astype(np.float32)
    path.mkdir(parents=True)
    save_file(factors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(targets), "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def publish_adapter(run_dir: Path, adapter: Path, step: int, *, overrides: Mapping[str, Any] | None = None) -> Path:
    """Publish an adapter as version (0, step) of the run at `run_dir`, like a trainer; see `publish_weights`."""
    digest = xxhash.xxh3_128_hexdigest((adapter / "adapter_config.json").read_bytes())
    return publish_weights(run_dir, adapter, step, overrides={"adapter": digest, **(overrides or {})})
