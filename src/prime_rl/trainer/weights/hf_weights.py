"""Reads Hugging Face weights tensor by tensor into a sharded policy.

A rank reads only the part of the files that it holds, one tensor at a time (or one group that transformers merges, such
as the experts of a layer). The headers are checked against the model before any weight is read.
"""

import json
import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from prime_rl.core.errors import ConfigError
from prime_rl.trainer.parallel.device_mesh import fill_tensor, local_ranges, local_tensor, read_ranges

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_SAME_ELEMENTS = 1 << 24


@dataclass(slots=True)
class TensorGroup:
    """Tensors of the files that are converted together to one or several tensors of the model.

    Attributes:
        target: the model's name of the first result.
        sources: names in the files by the converter's pattern, in the order of their concatenation.
        converter: None copies the only source to the target.
    """

    target: str
    sources: dict[str, list[str]] = field(default_factory=dict)
    converter: WeightConverter | None = None


class HFWeights:
    """The weights of one model in safetensors files, and their mapping to the model's tensors."""

    def __init__(self, directory: Path, causal_lm: PreTrainedModel, layers: int | None = None) -> None:
        """Read the headers of the files and check them against the model; all ranks get the same result.

        Args:
            directory: contains model.safetensors, or several files and their index.
            causal_lm: the model before sharding and without adapters; may be on the meta device.
            layers: number of layers of the model, if it has fewer than the files.

        Raises:
            ConfigError: a tensor is missing, unexpected, unreadable or has another shape.
        """
        self._directory, self._files = directory, weight_files(directory)
        self._where, self._opened = _open_files(self._files)
        self._mapping = get_model_conversion_mapping(causal_lm)
        self._groups, covered, unexpected = self._plan(causal_lm)
        self._check_unexpected(causal_lm, unexpected, layers)
        self.names = covered
        self.missing = self._check_missing(causal_lm, covered)
        self._check_plain_shapes(causal_lm)
        self._check_tied(causal_lm)
        # Publication reverts these conversions; from_pretrained of transformers sets the same attribute.
        causal_lm._weight_conversions = [entry for entry in self._mapping if entry.was_used()]

    def load(self, causal_lm: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
        """Fill this rank's part of `tensors`, the model's tensors by their names when this object was created.

        Raises:
            ConfigError: the shape of a converted tensor differs from the model's.
        """
        for group in self._groups:
            if group.converter is None:
                (name,) = group.sources[group.target]
                fill_tensor(tensors[group.target], self._lazy(name))
            elif (joined := _joined_along(group.converter)) is not None:
                self._load_joined(tensors[group.target], group, group.converter, *joined)
            else:
                self._load_converted(causal_lm, tensors, group, group.converter)

    def _lazy(self, name: str) -> Any:
        """Return a lazy tensor, which reads the slices that are taken."""
        return self._opened[self._where[name]].get_slice(name)

    def _whole(self, name: str) -> Tensor:
        """Read the whole tensor in the file's dtype."""
        value: Tensor = self._lazy(name)[...]
        return value

    def _plan(self, causal_lm: PreTrainedModel) -> tuple[list[TensorGroup], set[str], list[str]]:
        """Group the files' tensors by their targets, as transformers does; also return covered and unexpected names."""
        renamings = [entry for entry in self._mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in self._mapping if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
        expected, prefix = causal_lm.state_dict(), causal_lm.base_model_prefix
        groups, covered, unexpected = dict[str, TensorGroup](), set[str](), list[str]()
        for name in sorted(self._where, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, prefix, expected)
            if target not in expected and name in expected:
                target, pattern = rename_source_key(name, [], [], prefix, expected)
            if target not in expected:
                unexpected.append(name)
                continue
            converter = by_pattern[pattern] if pattern is not None else None
            group = groups.setdefault(target, TensorGroup(target, converter=converter))
            group.sources.setdefault(pattern or target, []).append(name)
            covered.add(target)
            if converter is not None:
                first, *others = converter.target_patterns
                covered.update(target.replace(first, other) for other in others)
        return list(groups.values()), covered, unexpected

    def _load_converted(
        self, causal_lm: PreTrainedModel, tensors: Mapping[str, Tensor], group: TensorGroup, converter: WeightConverter
    ) -> None:
        """Convert whole tensors of the files, then fill this rank's part of the results."""
        converter = deepcopy(converter)
        for pattern, names in group.sources.items():
            for name in names:
                converter.add_tensor(group.target, name, pattern, partial(self._whole, name))
        made = converter.convert(group.target, model=causal_lm, config=causal_lm.config)
        for name, value in made.items():
            whole = value[0] if isinstance(value, list) else value
            if whole.shape != tensors[name].shape:
                raise ConfigError(self._wrong_shape(group, name, list(whole.shape), list(tensors[name].shape)))
            fill_tensor(tensors[name], whole)

    def _load_joined(
        self, target: Tensor, group: TensorGroup, converter: WeightConverter, stacked: bool, dim: int
    ) -> None:
        """Fill this rank's part of tensors that the converter only stacks and concatenates, from slices of the files.

        The stack of the experts' gate_up_proj, for example: one tensor per expert, each of two tensors of the files.
        """
        by_pattern = [group.sources[pattern] for pattern in converter.source_patterns if pattern in group.sources]
        names = [list(row) for row in zip(*by_pattern, strict=False)] if stacked else [[*chain(*by_pattern)]]
        shapes = [self._lazy(name).get_shape() for name in names[0]]
        whole = [*shapes[0][:dim], sum(shape[dim] for shape in shapes), *shapes[0][dim + 1 :]]
        shape = [max(map(len, by_pattern)), *whole] if stacked else whole
        if shape != list(target.shape):
            raise ConfigError(self._wrong_shape(group, group.target, shape, list(target.shape)))
        local, ranges = local_tensor(target).detach(), local_ranges(target)
        parts = list(local) if stacked else [local]
        mine = [row for begin, end in ranges.pop(0) for row in names[begin:end]] if stacked else names
        for part, row in zip(parts, mine, strict=True):
            offset = filled = 0
            for name, wanted in zip(row, shapes, strict=True):
                source = self._lazy(name)
                if source.get_shape() != wanted:
                    raise ConfigError(self._wrong_shape(group, name, source.get_shape(), wanted))
                inside = [(max(begin - offset, 0), min(end - offset, wanted[dim])) for begin, end in ranges[dim]]
                inside = [(begin, end) for begin, end in inside if begin < end]
                length = sum(end - begin for begin, end in inside)
                if length and part.numel():
                    piece = part.narrow(dim, filled, length)
                    piece.copy_(read_ranges(source, [*ranges[:dim], inside, *ranges[dim + 1 :]]))
                offset, filled = offset + wanted[dim], filled + length

    def _check_missing(self, causal_lm: PreTrainedModel, covered: set[str]) -> set[str]:
        """Return the missing names that the model is allowed to initialise itself."""
        missing = causal_lm.state_dict().keys() - covered
        shared = _tied_names(causal_lm)
        missing = {name for name in missing if not any(other in covered for other in shared.get(name, ()))}
        allowed = _matching(missing, causal_lm._keys_to_ignore_on_load_missing)
        if names := sorted(missing - allowed, key=dot_natural_key):
            files, directory = self._files, self._directory
            where = files[0] if len(files) == 1 else f"{directory} ({len(files)} files)"
            raise ConfigError(f"model.name: {where} lacks {_summarize_names(names)}, which config.json requires")
        return allowed

    def _check_unexpected(self, causal_lm: PreTrainedModel, unexpected: list[str], layers: int | None) -> None:
        # Files of older versions contain buffers that are computed now.
        known = [*(causal_lm._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"]
        extra = set(unexpected) - _matching(set(unexpected), known)
        if layers is not None:
            extra = {name for name in extra if not any(int(n) >= layers for n in re.findall(r"\.(\d+)\.", name))}
        if extra:
            names = sorted(extra, key=dot_natural_key)
            raise ConfigError(
                f"model.name: {self._where[names[0]]} contains {_summarize_names(names)}, which a "
                f"{type(causal_lm).__name__} does not have; check that config.json belongs to these weights"
            )

    def _check_plain_shapes(self, causal_lm: PreTrainedModel) -> None:
        expected = causal_lm.state_dict()
        for group in self._groups:
            if group.converter is None:
                (name, *twice) = group.sources[group.target]
                if twice:
                    raise ConfigError(f"model.name: {name} and {twice[0]} in {self._directory} are the same tensor")
                shape, wanted = self._lazy(name).get_shape(), list(expected[group.target].shape)
                if shape != wanted:
                    raise ConfigError(self._wrong_shape(group, group.target, shape, wanted))

    def _check_tied(self, causal_lm: PreTrainedModel) -> None:
        """Refuse files in which an output head differs from the embedding that it is tied to.

        transformers would untie the two, but an inference engine would not, so sampler and trainer would differ.
        """
        plain = {group.target: group.sources[group.target][0] for group in self._groups if group.converter is None}
        pairs = [(name, other) for name, others in _tied_names(causal_lm).items() for other in others]
        for name, other in pairs:
            both = name < other and name in plain and other in plain
            if both and not _equal(self._lazy(plain[name]), self._lazy(plain[other])):
                raise ConfigError(
                    f"model.name: config.json in {self._directory} ties {name} and {other}, but the files contain "
                    "two different tensors; set tie_word_embeddings to false in config.json"
                )

    def _wrong_shape(self, group: TensorGroup, name: str, shape: list[int], wanted: list[int]) -> str:
        sources = [source for names in group.sources.values() for source in names]
        return (
            f"model.name: {_summarize_names(sources)} in {self._where[sources[0]]} gives {name} the shape {shape}, but "
            f"config.json says {wanted}"
        )


def weight_files(directory: Path) -> list[Path]:
    """List the safetensors files of a model.

    Raises:
        ConfigError: there are none, one of the index is missing, or a single file contradicts the index.
    """
    index = directory / _INDEX
    if index.is_file():
        try:
            names = sorted({str(name) for name in json.loads(index.read_text())["weight_map"].values()})
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ConfigError(f"model.name: {index} is not a valid index of weight files: {error!r}") from None
        files = [directory / name for name in names]
        if (directory / _SINGLE).is_file() and _SINGLE not in names:
            raise ConfigError(
                f"model.name: {directory} has two models, {_SINGLE} and the shards that {_INDEX} lists; remove one"
            )
    else:
        files = [directory / _SINGLE]
    missing = [file for file in files if not file.is_file()]
    if not missing:
        return files
    if index.is_file():
        raise ConfigError(f"model.name: {index} lists {missing[0].name}, which does not exist")
    raise ConfigError(
        f"model.name: {directory} has neither {_SINGLE} nor {_INDEX}; other formats (.bin) are not supported, "
        "convert them: AutoModelForCausalLM.from_pretrained(NAME).save_pretrained(DIRECTORY)"
    )


def _open_files(files: list[Path]) -> tuple[dict[str, Path], dict[Path, Any]]:
    """Open the files; return the file of each tensor, and the opened files."""
    where: dict[str, Path] = {}
    opened: dict[Path, Any] = {}
    for file in files:
        try:
            opened[file] = safe_open(file, "pt", backend="pread")
            where.update(dict.fromkeys(opened[file].keys(), file))
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"model.name: {file} cannot be read: {error}") from None
    return where, opened


def _joined_along(converter: WeightConverter) -> tuple[bool, int] | None:
    """Return how a converter joins the files' tensors; None if it does something else.

    Whether it stacks them along dimension 0 of one target (experts), and along which of their dimensions it
    concatenates them.
    """
    stacks = [operation for operation in converter.operations if isinstance(operation, MergeModulelist)]
    cats = [operation for operation in converter.operations if isinstance(operation, Concatenate)]
    dim = (cats[0].dim if cats else len(stacks)) - len(stacks)
    known = [*stacks, *cats] == converter.operations and max(len(stacks), len(cats)) == 1
    if not known or dim < 0 or any(stack.dim for stack in stacks) or len(converter.target_patterns) > 1:
        return None
    return bool(stacks), dim


def _tied_names(causal_lm: PreTrainedModel) -> dict[str, list[str]]:
    """Return name -> other names, for each parameter with several names."""
    names: dict[int, list[str]] = {}
    for name, parameter in causal_lm.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: [o for o in same if o != name] for same in names.values() if len(same) > 1 for name in same}


def _equal(one: Any, other: Any) -> bool:
    shape = one.get_shape()
    if shape != other.get_shape():
        return False
    rows = max(1, _SAME_ELEMENTS // max(1, torch.Size(shape[1:]).numel()))
    parts = (slice(begin, min(begin + rows, shape[0])) for begin in range(0, shape[0], rows))
    return all(torch.equal(one[part].float(), other[part].float()) for part in parts)


def _matching(names: set[str], patterns: Any) -> set[str]:
    return {name for name in names if any(re.search(pattern, name) for pattern in patterns or ())}


def _summarize_names(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
