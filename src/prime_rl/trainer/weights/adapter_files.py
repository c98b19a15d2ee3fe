"""LoRA adapters in peft's file format, and a command that merges one into the weights of its base model.

    python -m prime_rl.trainer.weights.adapter_files --adapter RUN/weights/step_20 --base MODEL --output MERGED

The result has the base model's tensors under their names, in their dtypes and files; adapted weights are W + scale B A,
computed in float32.
"""

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from prime_rl.core.entry_point import run_main
from prime_rl.core.errors import ConfigError
from prime_rl.trainer.model.lora import AdaptedLinear
from prime_rl.trainer.model.policy_model import PolicyModel

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
_PREFIX = "base_model.model."
# Options of peft that would change the result; they are not supported.
_OTHER_KINDS = ("use_dora", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "modules_to_save")


def peft_name(layer: str, factor: str) -> str:
    """Return the name of `lora_A` or `lora_B` of a layer in peft's files."""
    return f"{_PREFIX}{layer}.{factor}.weight"


def adapter_config(policy: PolicyModel, adapted: Mapping[str, AdaptedLinear]) -> dict[str, bytes]:
    """Return peft's configuration file: name -> content."""
    config = next(iter(adapted.values())).config
    values: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": policy.causal_lm.config.name_or_path,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "target_modules": _target_modules(policy, adapted),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "modules_to_save": None,
        "inference_mode": True,
    }
    return {ADAPTER_CONFIG: json.dumps(values, indent=2).encode()}


def merge_adapter(adapter: Path, base: Path, output: Path) -> None:
    """Write the model in `base` with the adapter in the directory `adapter` merged into it to the new `output`.

    Raises:
        ConfigError: a file is missing, `output` exists, or the adapter does not match the base model.
    """
    factors, scale = _read_adapter(adapter)
    files = sorted(base.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"--base: {base} contains no .safetensors file")
    if output.exists():
        raise ConfigError(f"--output: {output} already exists; give a new directory")
    _check_layers(factors, files, adapter, base)
    output.mkdir(parents=True)
    for file in files:
        tensors = load_file(file)
        for name in tensors.keys() & {f"{layer}.weight" for layer in factors}:
            a, b = factors[name.removesuffix(".weight")]
            weight = tensors[name]
            tensors[name] = weight.float().addmm(b.float(), a.float(), alpha=scale).to(weight.dtype)
        save_file(tensors, output / file.name, metadata={"format": "pt"})
    for path in base.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and path.name != "manifest.json":
            shutil.copy(path, output / path.name)


def _target_modules(policy: PolicyModel, adapted: Mapping[str, AdaptedLinear]) -> list[str]:
    """Return the last parts of the layers' names if they are unambiguous, else the full names."""
    short = {name.rpartition(".")[2] for name in adapted}
    matching = {name for name, _ in policy.causal_lm.named_modules() if name.rpartition(".")[2] in short}
    return sorted(short) if matching == set(adapted) else sorted(adapted)


def _read_adapter(directory: Path) -> tuple[dict[str, tuple[Tensor, Tensor]], float]:
    """Return A and B by layer, and the scale."""
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (directory / name).is_file():
            raise ConfigError(f"--adapter: {directory} contains no {name}")
    try:
        values = json.loads((directory / ADAPTER_CONFIG).read_text())
        tensors = load_file(directory / ADAPTER_WEIGHTS)
        layers = sorted({name.removeprefix(_PREFIX).rpartition(".lora_")[0] for name in tensors})
        pairs = {
            name: (tensors.pop(peft_name(name, "lora_A")), tensors.pop(peft_name(name, "lora_B"))) for name in layers
        }
        scale = values["lora_alpha"] / (values["r"] ** 0.5 if values.get("use_rslora") else values["r"])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ConfigError(f"--adapter: {directory} is not a valid peft adapter: {error!r}") from None
    if others := [key for key in _OTHER_KINDS if values.get(key)] + sorted(tensors):
        raise ConfigError(f"--adapter: {directory} uses {others[0]}, which is not supported here; merge it with peft")
    return pairs, scale


def _check_layers(factors: Mapping[str, Any], files: list[Path], adapter: Path, base: Path) -> None:
    shapes: dict[str, list[int]] = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            shapes |= {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118  not a dict
    for layer, (a, b) in factors.items():
        if shapes.get(f"{layer}.weight") != [b.shape[0], a.shape[1]]:
            raise ConfigError(
                f"--base: the adapter in {adapter} does not match {base}: the shape of {layer}.weight differs"
            )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Merge an adapter into the weights of its base model.")
    for name in ("adapter", "base", "output"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    merge_adapter(**vars(parser.parse_args()))


if __name__ == "__main__":
    run_main(main)
