"""Write a quantized checkpoint in bfloat16, so that it can be trained and served:

    uv run --extra cpu python scripts/dequantize.py openai/gpt-oss-20b gpt-oss-20b-bf16
    uv run --extra cpu rl @ rl.toml --model.name gpt-oss-20b-bf16

For models that exist in no other form. Reads the formats fp8 (as in DeepSeek V3), mxfp4 (gpt-oss) and
compressed-tensors. Converts one file after the other, with the memory of one; names of weights do not change. Uses the
package compressed_tensors, which comes with vLLM.
"""

import argparse
import json
import shutil
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from prime_rl.core.entry_point import ArgumentParser, command
from prime_rl.core.errors import ConfigError, summarize_exception, translate_error
from prime_rl.core.import_utils import require_packages
from prime_rl.storage.model_files import READABLE_QUANTIZATION, find_model

if TYPE_CHECKING:
    from compressed_tensors.entrypoints.convert import Converter

DOWNLOAD_SECONDS = 24 * 3600.0
PAIRS = {"_scale_inv": "", "_scale": "", "_scales": "_blocks"}
"""Endings of names: those of scales, and those of their weights."""
UNUSED = ("input_scale", "activation_scale")
"""Scales of activations, without a meaning for weights in bfloat16."""


@command
def main() -> None:
    """Write the model."""
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="directory, or name on the Hugging Face hub")
    parser.add_argument("directory", metavar="DIR", type=Path, help="directory to write; it must be new or empty")
    arguments = parser.parse_args()
    require_packages("compressed_tensors")
    name, directory = arguments.model, arguments.directory
    if directory.exists() and not (directory.is_dir() and next(directory.iterdir(), None) is None):
        raise ConfigError(f"{directory} exists and is not an empty directory; name a new one")
    source = find_model(name, None, DOWNLOAD_SECONDS)
    if directory.resolve().is_relative_to(source.resolve()):
        raise ConfigError(f"{directory} is inside of {name}; set a DIR outside of it")
    is_new = not directory.exists()
    # The library raises these for what is missing or does not fit.
    errors = (ValueError, LookupError, RuntimeError, TypeError, AttributeError, OSError, SafetensorError)
    try:
        with translate_error(errors, partial(_explain, name)):
            dequantize(name, source, directory)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        if not is_new:
            directory.mkdir()
        raise
    print(f"wrote {directory} in bfloat16")


def dequantize(name: str, source: Path, directory: Path) -> None:
    """Write the checkpoint of a directory. Raises ConfigError for other formats, and what the library raises."""
    from compressed_tensors.entrypoints.convert import convert_checkpoint
    from compressed_tensors.utils.safetensors_load import get_checkpoint_files, get_weight_map

    if not (source / "config.json").is_file():
        raise ConfigError(f"MODEL: {name} is not a model: it has no config.json")
    config = json.loads((source / "config.json").read_text())
    quantization = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    if not quantization:
        raise ConfigError(f"MODEL: {name} is not quantized; train it as it is")
    method = quantization.get("quant_method")
    if method not in READABLE_QUANTIZATION:
        raise ConfigError(f"MODEL: {name} has the format {method}, which cannot be read; use the original checkpoint")
    files = get_checkpoint_files(source)
    names = get_weight_map(files)
    with TemporaryDirectory() as folder:
        # A second copy of the weights, such as consolidated.safetensors, is in no index.
        for file, path in files.items():
            if not file.endswith(".safetensors") or file in names.values():
                link = Path(folder, file)
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(Path(path).resolve())
        convert_checkpoint(folder, directory, make_converter(source, quantization, names))


def make_converter(source: Path, quantization: dict[str, Any], names: Iterable[str]) -> "Converter":
    """Return what converts the files of a checkpoint with weights of these names."""
    if quantization["quant_method"] != "compressed-tensors":
        return ScaledWeights(names, quantization.get("weight_block_size"))
    if any(name.endswith("_packed") for name in names):
        from compressed_tensors.entrypoints.convert.converters import CompressedTensorsDequantizer

        if any(name.endswith("_scale") and name.removesuffix("_scale") in names for name in names):
            raise ValueError("it has packed weights beside quantized ones that are not packed")
        return CompressedTensorsDequantizer(source)
    if any(name.endswith("_zero_point") for name in names):
        raise ValueError("its weights have zero points")
    blocks = [_block_size(group["weights"]) for group in quantization["config_groups"].values()]
    if any(block != blocks[0] for block in blocks):
        raise ValueError("its groups of weights have blocks of different sizes")
    return ScaledWeights(names, blocks[0])


def _block_size(weights: dict[str, Any]) -> list[int] | None:
    if weights.get("strategy") == "group":
        return [1, weights["group_size"]]
    return weights["block_structure"] if weights.get("strategy") == "block" else None


class ScaledWeights:
    """Multiplies weights by their scales: a `Converter` for the formats fp8 and mxfp4."""

    def __init__(self, names: Iterable[str], block_size: list[int] | None) -> None:
        """Pair the names of weights and scales.

        `block_size`: rows and columns of fp8 that share a scale; None if a row or a whole weight does.
        """
        names = set(names)
        pairs = (
            (name, name.removesuffix(end) + of) for name in names for end, of in PAIRS.items() if name.endswith(end)
        )
        self._scales = {weight: scale for scale, weight in pairs if weight in names}
        self._dropped = {*self._scales.values(), *(name for name in names if name.endswith(UNUSED))}
        self._block_size = block_size

    def get_dependencies(self, name: str) -> set[str]:
        """Return the name of the scale of a weight, if it has one."""
        return {self._scales[name]} if name in self._scales else set()

    def validate(self, tensors: dict[str, Tensor]) -> None:
        """Raise ValueError for a quantized weight without scales, before anything is written."""
        for name, values in tensors.items():
            if values.dtype.itemsize == 1 and name not in self._scales and name not in self._dropped:
                raise ValueError(f"{name} has the type {values.dtype} and no scales")

    def create_config(self) -> None:
        """Return no settings: the result is not quantized."""

    def process(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights of a file in bfloat16, without scales; what is not quantized stays as it is."""
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        done = {}
        for name, values in tensors.items():
            if name in self._dropped:
                continue
            scale = tensors[self._scales[name]] if name in self._scales else None
            if scale is None:
                done[name] = values
            elif name.endswith("_blocks"):
                done[name.removesuffix("_blocks")] = convert_moe_packed_tensors(values, scale)
            else:
                done[name] = (values.float() * self._spread(name, _exponents(scale), values.shape)).to(torch.bfloat16)
        return done

    def _spread(self, name: str, scale: Tensor, shape: torch.Size) -> Tensor:
        """Return the scale of each value. The last block of rows or columns may be smaller than the others."""
        if self._block_size is None or scale.numel() == 1:
            if scale.numel() == 1:
                return scale.reshape(())
            if list(scale.shape) not in ([*shape[:-1]], [*shape[:-1], 1]):
                raise ValueError(f"{name} has scales of shape {list(scale.shape)}, and rows of shape {[*shape[:-1]]}")
            return scale.reshape(*shape[:-1], 1)
        rows, columns = self._block_size
        wanted = [-(-shape[-2] // rows), -(-shape[-1] // columns)]
        if list(scale.shape[-2:]) != wanted:
            raise ValueError(f"{name} has scales of shape {list(scale.shape)}, and {wanted} blocks")
        spread = scale.repeat_interleave(rows, -2)[..., : shape[-2], :]
        return spread.repeat_interleave(columns, -1)[..., : shape[-1]]


def _exponents(scale: Tensor) -> Tensor:
    """Return scales in float32; those in bytes are exponents of 2 with a bias of 127 (OCP Microscaling, E8M0)."""
    return (scale.float() - 127).exp2() if scale.dtype == torch.uint8 else scale.float()


def _explain(name: str, error: BaseException) -> ConfigError:
    return ConfigError(f"MODEL: {name} cannot be dequantized: {summarize_exception(error)}")


if __name__ == "__main__":
    main()
