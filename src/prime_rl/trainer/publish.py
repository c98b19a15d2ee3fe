"""I4, I5: a policy version is published whole, by one rename, with the hash of every tensor in its manifest.

All ranks take part in gathering the parameters, one at a time; rank 0 writes. Whatever goes wrong there, the gathers
run to their end, and every rank then raises. Of a policy with adapters a version holds the merged weights, or the
adapters alone.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion

from prime_rl.errors import RunError
from prime_rl.run.artifact import WEIGHTS_FORMAT, publish
from prime_rl.run.tensors import content_hash, hash_tensors
from prime_rl.trainer.adapter_files import ADAPTER_WEIGHTS, adapter_config, peft_name
from prime_rl.trainer.lora import AdaptedLinear, adapted_layers
from prime_rl.trainer.model import PolicyModel
from prime_rl.trainer.parallel import World
from prime_rl.types import PolicyVersion


class Publisher:
    """Writes versions of one policy in Hugging Face layout, or its adapters in peft's."""

    def __init__(
        self,
        policy: PolicyModel,
        tokenizer: PreTrainedTokenizerBase,
        dtype: torch.dtype,
        world: World,
        shard_bytes: int = 2 * 1024**3,
    ) -> None:
        """Read the files that every version repeats (config, tokenizer) once.

        Args:
            policy: sharded; its parameters are read at each publication.
            tokenizer: published beside the weights.
            dtype: of the published floating-point tensors.
            world: the ranks that hold the shards.
            shard_bytes: a file of weights ends when it has reached this size.
        """
        self._policy, self._dtype, self._world, self._shard_bytes = policy, dtype, world, shard_bytes
        self._adapted = adapted_layers(policy)
        self._adapters_alone = any(layer.config.publish == "adapter" for layer in self._adapted.values())
        self._companions: dict[str, bytes] = {}
        if world.leads and self._adapters_alone:
            self._companions = adapter_config(policy, self._adapted)
        elif world.leads:
            self._companions = _companion_files(policy, tokenizer, dtype)

    def publish(self, target: Path, version: PolicyVersion) -> None:
        """Publish the current weights as `version` at `target`. All ranks call it together.

        Raises:
            RunError: rank 0 could not write: the disk is full or not writable, or `target` exists already.
        """
        gather = _gathered_adapters if self._adapters_alone else _gathered
        groups = gather(self._policy, self._adapted, self._dtype)
        error: Exception | None = None
        if self._world.leads:
            try:
                publish(target, lambda directory: self._write(directory, groups, version))
            except OSError as caught:
                error = RunError(f"cannot write {target}: {caught.strerror or caught}")
            except Exception as caught:  # noqa: BLE001  raised again below, once no rank waits for this one
                error = caught
        for _ in groups:  # the other ranks' part in the gathers, and what rank 0 has left of it after an error
            pass
        self._world.fail_together(error, f"publishing {target}")

    def _write(self, directory: Path, groups: Iterator[dict[str, Tensor]], version: PolicyVersion) -> Mapping[str, Any]:
        for name, content in self._companions.items():
            (directory / name).write_bytes(content)
        if self._adapters_alone:
            save_file({k: v for group in groups for k, v in group.items()}, directory / ADAPTER_WEIGHTS)
        else:
            _save_sharded(directory, groups, self._shard_bytes)
        tensors = hash_tensors(directory)
        return {
            "format": WEIGHTS_FORMAT,
            "branch": version.branch,
            "step": version.step,
            "tensors": tensors,
            "hash": content_hash(tensors),
        }


def _gathered(
    policy: PolicyModel, adapted: Mapping[str, AdaptedLinear], dtype: torch.dtype
) -> Iterator[dict[str, Tensor]]:
    """Yield the full tensors on the CPU, block by block, under the names that the model's checkpoints use.

    A block at a time, because transformers keeps some weights in another form than their checkpoints do (fused
    experts), and what belongs together is inside one block.
    """
    causal_lm = policy.causal_lm
    plain = getattr(causal_lm, "_weight_conversions", None) == []
    layers = {f"{name}.weight": layer for name, layer in adapted.items()}
    factors = {id(factor) for layer in adapted.values() for factor in (layer.lora_A.weight, layer.lora_B.weight)}
    weights = {name: tensor for name, tensor in _state(policy).items() if id(tensor) not in factors}
    for names in _blockwise(weights):
        full = {name: _full(tensor, dtype, layers.get(name)) for name, tensor in names.items()}
        yield full if plain else revert_weight_conversion(causal_lm, full)


def _gathered_adapters(
    _: PolicyModel, adapted: Mapping[str, AdaptedLinear], dtype: torch.dtype
) -> Iterator[dict[str, Tensor]]:
    """Yield the factors of the adapters on the CPU, layer by layer, under peft's names."""
    for name, layer in adapted.items():
        factors = {"lora_A": layer.lora_A.weight, "lora_B": layer.lora_B.weight}
        yield {peft_name(name, factor): _full(tensor, dtype) for factor, tensor in factors.items()}


def _state(policy: PolicyModel) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; a tied output head is not listed a second time."""
    causal_lm = policy.causal_lm
    parameters = dict(causal_lm.named_parameters())
    with_tied = {name for name, _ in causal_lm.named_parameters(remove_duplicate=False)}
    buffers = {name: value for name, value in causal_lm.state_dict().items() if name not in with_tied}
    return {**parameters, **buffers}


def _blockwise(state: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Split by the number in the name (`model.layers.7.`); names without one are groups of their own."""
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in state.items():
        parts = name.split(".")
        number = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
        groups.setdefault(".".join(parts[: number + 1]), {})[name] = tensor
    yield from groups.values()


def _full(tensor: Tensor, dtype: torch.dtype, adapted: AdaptedLinear | None = None) -> Tensor:
    whole = tensor.detach()
    if isinstance(whole, DTensor):
        whole = whole.full_tensor()
    if adapted is not None:
        whole = adapted.merged(whole)
    return whole.to(device="cpu", dtype=dtype if whole.is_floating_point() else whole.dtype).contiguous()


def _save_sharded(directory: Path, groups: Iterator[dict[str, Tensor]], limit: int) -> None:
    """Write safetensors files of about `limit` bytes, with an index where there are several."""
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    for group in groups:
        pending.update(group)
        if sum(t.nbytes for t in pending.values()) >= limit:
            shards.append(_save_part(directory, len(shards), pending))
            pending = {}
    if pending:
        shards.append(_save_part(directory, len(shards), pending))
    if len(shards) == 1:
        _part(directory, 0).rename(directory / "model.safetensors")
        return
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for i, name in enumerate(names):
        _part(directory, i).rename(directory / name)
    weight_map = {tensor: name for name, tensors in zip(names, shards, strict=True) for tensor in tensors}
    total = sum((directory / name).stat().st_size for name in names)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _save_part(directory: Path, number: int, tensors: dict[str, Tensor]) -> list[str]:
    save_file(tensors, _part(directory, number), metadata={"format": "pt"})
    return list(tensors)


def _part(directory: Path, number: int) -> Path:
    return directory / f"part-{number}.safetensors"


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
