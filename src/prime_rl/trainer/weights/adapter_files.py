"""LoRA adapters in peft's file format, and their merge into the weights of the base model.

A merged model has the base model's tensors under their names, in their dtypes and files; adapted weights are
W + scale B A, computed in float32.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from prime_rl.core.errors import ConfigError
from prime_rl.trainer.model.lora import AdaptedLinear
from prime_rl.trainer.model.policy_model import PolicyModel

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
_PREFIX = "base_model.model."
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight")
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
        "revision": policy.revision,
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
    adapted = _adapted_tensors(factors, files, adapter, base)
    output.mkdir(parents=True)
    for file in files:
        tensors = load_file(file)
        for layer, name in adapted.items():
            if name in tensors:
                (a, b), weight = factors[layer], tensors[name]
                merged = weight.float().addmm(b.float(), a.float(), alpha=scale).to(weight.dtype)
                tensors[f"{layer}.weight"] = merged
        save_file(tensors, output / file.name, metadata={"format": "pt"})
    for path in base.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and path.name != "manifest.json":
            shutil.copy(path, output / path.name)
    for layer, name in adapted.items():
        if name != f"{layer}.weight":
            _untie(output, f"{layer}.weight", name)


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


def _adapted_tensors(factors: Mapping[str, Any], files: list[Path], adapter: Path, base: Path) -> dict[str, str]:
    """Return layer -> name of the tensor that it adapts: a tied output head has that of the input embedding."""
    shapes: dict[str, list[int]] = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            shapes |= {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118  not a dict
    names = {layer: f"{layer}.weight" for layer in factors}
    if absent := [layer for layer, name in names.items() if name not in shapes]:
        config = AutoConfig.from_pretrained(base).get_text_config()
        embeddings = [name for name in shapes if name.endswith(_EMBEDDINGS)]
        if config.tie_word_embeddings and len(absent) == len(embeddings) == 1:
            names[absent[0]] = embeddings[0]
    for layer, (a, b) in factors.items():
        if shapes.get(names[layer]) != [b.shape[0], a.shape[1]]:
            raise ConfigError(
                f"--base: the adapter in {adapter} does not match {base}: the shape of {layer}.weight differs"
            )
    return names


def _untie(model: Path, head: str, embedding: str) -> None:
    """Record that the output head of a model on disk has a tensor of its own, in the file of the embedding."""
    file = model / "config.json"
    values = json.loads(file.read_text())
    for part in (values, values.get("text_config", {})):
        part["tie_word_embeddings"] = False
    file.write_text(json.dumps(values, indent=2))
    if (index := model / "model.safetensors.index.json").is_file():
        listed = json.loads(index.read_text())
        listed["weight_map"][head] = listed["weight_map"][embedding]
        index.write_text(json.dumps(listed, indent=2))
