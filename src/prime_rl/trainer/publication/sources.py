"""What a version consists of: tensors of the policy by block, and what becomes of a block before it is written.

A block at a time, because transformers keeps some weights in another form than their checkpoints do (fused experts),
and what belongs together is inside one block. Of a policy with adapters a version holds the merged weights, or the
adapters alone.
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion

from prime_rl.trainer.adapter_files import ADAPTER_WEIGHTS, adapter_config, peft_name
from prime_rl.trainer.lora import adapted_layers
from prime_rl.trainer.model import PolicyModel

_FACTORS = ("lora_A", "lora_B")


class Sources:
    """Names the tensors that are read, and makes of them what is published.

    Attributes:
        blocks: names of the tensors, block by block, the same on all ranks.
        adapters_alone: the version is an adapter, not a model.
    """

    def __init__(self, policy: PolicyModel, dtype: torch.dtype) -> None:
        """Look at the sharded policy; `dtype` is that of the published floating-point tensors."""
        self._policy, self._dtype = policy, dtype
        self._adapted = adapted_layers(policy)
        self.adapters_alone = any(layer.config.publish == "adapter" for layer in self._adapted.values())
        self._plain = getattr(policy.causal_lm, "_weight_conversions", None) == []
        # An adapter is added to the weight as it is; only the sum is rounded to the published type.
        parts = (("weight", *_FACTORS) if not self.adapters_alone else ()) if self._adapted else ()
        self._exact = {_part(name, part) for name in self._adapted for part in parts}
        self.blocks = self._adapter_blocks() if self.adapters_alone else self._model_blocks()

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of all blocks as the policy has them now: DTensors, and plain ones equal on all ranks."""
        state = _state(self._policy)
        return {name: state[name].detach() for names in self.blocks for name in names}

    def host_dtype(self, name: str, tensor: Tensor) -> torch.dtype:
        """Return the type in which a tensor is copied to the host."""
        return self._dtype if tensor.is_floating_point() and name not in self._exact else tensor.dtype

    def finish(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Make of the whole tensors of a block those that are written, under the names that its readers expect."""
        if self.adapters_alone:
            return {peft_name(*_layer_and_factor(name)): tensor for name, tensor in whole.items()}
        merged = {name: tensor for name, tensor in whole.items() if name not in self._exact}
        for name in (name for name in self._adapted if _part(name, "weight") in whole):
            weight, a, b = (whole[_part(name, part)] for part in ("weight", *_FACTORS))
            sum_ = torch.addmm(weight.float(), b, a, alpha=self._adapted[name].scale)
            merged[_part(name, "weight")] = sum_.to(self._dtype)
        ordered = {name: merged[name] for name in whole if name in merged}
        return ordered if self._plain else revert_weight_conversion(self._policy.causal_lm, ordered)

    def file_name(self, number: int, count: int) -> str:
        """Return the name of the file `number` of `count`, from 0."""
        if self.adapters_alone:
            return ADAPTER_WEIGHTS
        return "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"

    def companions(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, bytes]:
        """Return the files that every version repeats."""
        if self.adapters_alone:
            return adapter_config(self._policy, self._adapted)
        return _companion_files(self._policy, tokenizer, self._dtype)

    def _adapter_blocks(self) -> list[Sequence[str]]:
        return [[_part(name, factor) for factor in _FACTORS] for name in self._adapted]

    def _model_blocks(self) -> list[Sequence[str]]:
        """Split by the number in the name (`model.layers.7.`); names without one are blocks of their own."""
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


def _layer_and_factor(name: str) -> tuple[str, str]:
    layer, factor, _ = name.rsplit(".", 2)
    return layer, factor


def _state(policy: PolicyModel) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; a tied output head is not listed a second time."""
    causal_lm = policy.causal_lm
    parameters = dict(causal_lm.named_parameters())
    with_tied = {name for name, _ in causal_lm.named_parameters(remove_duplicate=False)}
    buffers = {name: value for name, value in causal_lm.state_dict().items() if name not in with_tied}
    return {**parameters, **buffers}


def _companion_files(policy: PolicyModel, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype) -> dict[str, bytes]:
    """Config, generation config and tokenizer as files, the config saying the published dtype."""
    causal_lm = policy.causal_lm
    with tempfile.TemporaryDirectory() as scratch:
        before = causal_lm.config.dtype
        causal_lm.config.dtype = dtype
        causal_lm.config.save_pretrained(scratch)
        causal_lm.config.dtype = before
        if causal_lm.generation_config is not None:
            causal_lm.generation_config.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        return {path.name: path.read_bytes() for path in sorted(Path(scratch).iterdir()) if path.is_file()}
