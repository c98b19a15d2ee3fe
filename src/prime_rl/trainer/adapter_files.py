"""Adapters on disk as peft writes them, and merged into the weights of their base model without building it.

    python -m prime_rl.trainer.adapter_files --adapter RUN/weights/step_20 --base MODEL --output MERGED

Every tensor of the base model is in the result under its own name, in its own dtype and in a file of the same name; the
adapted ones are W + scale B A, computed in float32.
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

from prime_rl.errors import ConfigError, run_main
from prime_rl.trainer.lora import AdaptedLinear
from prime_rl.trainer.model import PolicyModel

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
_PREFIX = "base_model.model."
# What peft can also do with an adapter: it would change the result, and none of it is written here.
_OTHER_KINDS = ("use_dora", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "modules_to_save")


def peft_name(layer: str, factor: str) -> str:
    """Name of `lora_A` or `lora_B` of a layer in peft's files."""
    return f"{_PREFIX}{layer}.{factor}.weight"


def adapter_config(policy: PolicyModel, adapted: Mapping[str, AdaptedLinear]) -> dict[str, bytes]:
    """Return the file that describes the adapters, by its name."""
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
    """Write `base` with the adapter merged into it to `output`.

    Args:
        adapter: a directory with adapter_config.json and adapter_model.safetensors.
        base: the directory of the model it was trained on.
        output: made by this.

    Raises:
        ConfigError: a file is missing, `output` exists, or the adapter belongs to another model.
    """
    factors, scale = _read_adapter(adapter)
    files = sorted(base.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"--base: {base} holds no .safetensors file")
    if output.exists():
        raise ConfigError(f"--output: {output} exists already")
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
    """Name the layers by the last parts of their names where these say it all, else in full."""
    short = {name.rpartition(".")[2] for name in adapted}
    called_so = {name for name, _ in policy.causal_lm.named_modules() if name.rpartition(".")[2] in short}
    return sorted(short) if called_so == set(adapted) else sorted(adapted)


def _read_adapter(directory: Path) -> tuple[dict[str, tuple[Tensor, Tensor]], float]:
    """Return A and B by layer, and the scale."""
    try:
        values = json.loads((directory / ADAPTER_CONFIG).read_text())
        tensors = load_file(directory / ADAPTER_WEIGHTS)
        layers = sorted({name.removeprefix(_PREFIX).rpartition(".lora_")[0] for name in tensors})
        pairs = {
            name: (tensors.pop(peft_name(name, "lora_A")), tensors.pop(peft_name(name, "lora_B"))) for name in layers
        }
        scale = values["lora_alpha"] / (values["r"] ** 0.5 if values.get("use_rslora") else values["r"])
    except FileNotFoundError as error:
        raise ConfigError(f"--adapter: {directory} holds no {Path(error.filename or ADAPTER_WEIGHTS).name}") from None
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ConfigError(f"--adapter: {directory} is not an adapter as peft writes them: {error!r}") from None
    if others := [key for key in _OTHER_KINDS if values.get(key)] + sorted(tensors):
        raise ConfigError(
            f"--adapter: {directory} is more than products of two matrices ({others[0]}); merge it with peft"
        )
    return pairs, scale


def _check_layers(factors: Mapping[str, Any], files: list[Path], adapter: Path, base: Path) -> None:
    shapes: dict[str, list[int]] = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            shapes |= {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118  not a dict
    for layer, (a, b) in factors.items():
        if shapes.get(f"{layer}.weight") != [b.shape[0], a.shape[1]]:
            raise ConfigError(
                f"--base: the adapter in {adapter} is of another model than {base}: {layer}.weight differs"
            )


def main() -> None:
    """Merge what the command line names."""
    parser = argparse.ArgumentParser(description="Merge an adapter into the weights of its base model.")
    for name in ("adapter", "base", "output"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    merge_adapter(**vars(parser.parse_args()))


if __name__ == "__main__":
    run_main(main)
