"""The tensors of a published version: the policy's tensors by block, and their conversion to the published form."""

import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion

from prime_rl.trainer.model.lora import adapted_layers
from prime_rl.trainer.model.policy_model import PolicyModel
from prime_rl.trainer.weights.adapter_files import ADAPTER_WEIGHTS, adapter_config, peft_name

_FACTORS = ("lora_A", "lora_B")


class PublishedStateDict:
    """Lists the policy's tensors and converts them to those of a version: a model, merged weights, or an adapter.

    Conversion works block by block: transformers stores some weights differently from their checkpoints (fused
    experts), but never across blocks.

    Attributes:
        blocks: names of the tensors, block by block, the same on all ranks.
        adapters_alone: the version is an adapter, not a model.
    """

    def __init__(self, policy: PolicyModel, dtype: torch.dtype) -> None:
        """List the tensors of a sharded policy; `dtype` is that of the published floating-point tensors."""
        self._policy, self._dtype = policy, dtype
        self._adapted = adapted_layers(policy)
        self.adapters_alone = any(layer.config.publish == "adapter" for layer in self._adapted.values())
        self._needs_no_conversion = getattr(policy.causal_lm, "_weight_conversions", None) == []
        # An adapter is added in full precision; only the sum is cast to the published dtype.
        parts = (("weight", *_FACTORS) if not self.adapters_alone else ()) if self._adapted else ()
        self._exact = {_part(name, part) for name in self._adapted for part in parts}
        if self.adapters_alone:
            self.blocks: list[list[str]] = [[_part(name, factor) for factor in _FACTORS] for name in self._adapted]
        else:
            self.blocks = self._model_blocks()

    def tensors(self) -> dict[str, Tensor]:
        """Return the current tensors of all blocks: DTensors, and plain tensors that are equal on all ranks."""
        state = _state(self._policy)
        return {name: state[name].detach() for names in self.blocks for name in names}

    def host_dtype(self, name: str, tensor: Tensor) -> torch.dtype:
        """Return the dtype in which a tensor is copied to the host."""
        return self._dtype if tensor.is_floating_point() and name not in self._exact else tensor.dtype

    def convert(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert the full tensors of a block to the published tensors and names."""
        if self.adapters_alone:
            return {peft_name(*name.rsplit(".", 2)[:2]): tensor for name, tensor in whole.items()}
        merged = {name: tensor for name, tensor in whole.items() if name not in self._exact}
        for name in (name for name in self._adapted if _part(name, "weight") in whole):
            weight, a, b = (whole[_part(name, part)] for part in ("weight", *_FACTORS))
            sum_ = torch.addmm(weight.float(), b, a, alpha=self._adapted[name].scale)
            merged[_part(name, "weight")] = sum_.to(self._dtype)
        ordered = {name: merged[name] for name in whole if name in merged}
        return ordered if self._needs_no_conversion else revert_weight_conversion(self._policy.causal_lm, ordered)

    def file_name(self, number: int, count: int) -> str:
        """Return the name of the file `number` of `count`, from 0."""
        if self.adapters_alone:
            return ADAPTER_WEIGHTS
        return "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"

    def companions(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, bytes]:
        """Return the files of config (with the published dtype) and tokenizer, or of an adapter's config."""
        if self.adapters_alone:
            return adapter_config(self._policy, self._adapted)
        causal_lm = self._policy.causal_lm
        with tempfile.TemporaryDirectory() as scratch:
            before = causal_lm.config.dtype
            causal_lm.config.dtype = self._dtype
            causal_lm.config.save_pretrained(scratch)
            causal_lm.config.dtype = before
            if causal_lm.generation_config is not None:
                causal_lm.generation_config.save_pretrained(scratch)
            tokenizer.save_pretrained(scratch)
            return {path.name: path.read_bytes() for path in sorted(Path(scratch).iterdir()) if path.is_file()}

    def _model_blocks(self) -> list[list[str]]:
        """Split by the number in the name (`model.layers.7.`); a name without a number is a block."""
        factors = {_part(name, factor) for name in self._adapted for factor in _FACTORS}
        of_weight = {_part(name, "weight"): [_part(name, f) for f in _FACTORS] for name in self._adapted}
        blocks: dict[str, list[str]] = {}
        for name in _state(self._policy):
            if name not in factors:
                parts = name.split(".")
                number = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
                blocks.setdefault(".".join(parts[: number + 1]), []).extend([name, *of_weight.get(name, [])])
        return list(blocks.values())


def _part(layer: str, part: str) -> str:
    return f"{layer}.weight" if part == "weight" else f"{layer}.{part}.weight"


def _state(policy: PolicyModel) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; a tied output head is listed once."""
    causal_lm = policy.causal_lm
    parameters = dict(causal_lm.named_parameters())
    with_tied = {name for name, _ in causal_lm.named_parameters(remove_duplicate=False)}
    buffers = {name: value for name, value in causal_lm.state_dict().items() if name not in with_tied}
    return {**parameters, **buffers}
