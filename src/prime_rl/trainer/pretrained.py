"""Weights as Hugging Face stores them, read tensor by tensor into a policy that is sharded already.

Memory: a rank reads from the files what it holds and no more, at most one tensor (or, where transformers keeps several
of the file's tensors as one, such as the experts of a layer, one such group) at a time. What the files must hold is
checked against the model before the first byte of a weight is read.
"""

import json
import re
from collections.abc import Mapping
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
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

from prime_rl.errors import ConfigError
from prime_rl.trainer.placement import fill, local_runs

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_SAME_ELEMENTS = 1 << 24


@dataclass(slots=True)
class Group:
    """Tensors of the files that become one or, after a split, several tensors of the model.

    Attributes:
        target: the first of the model's names.
        sources: the file's names by the converter's pattern, in the order in which they are laid together.
        converter: how; None copies the one source to the one target.
    """

    target: str
    sources: dict[str, list[str]] = field(default_factory=dict)
    converter: WeightConverter | None = None


class Pretrained:
    """The weights of one model in safetensors files, and where each of them goes."""

    def __init__(self, directory: Path, causal_lm: PreTrainedModel, layers: int | None = None) -> None:
        """Read the files' headers and plan; all ranks come to the same answer.

        Args:
            directory: holds model.safetensors, or several files and their index.
            causal_lm: not sharded yet and without adapters; on the meta device or not.
            layers: the model has only the first so many of the layers in the files.

        Raises:
            ConfigError: names the file and the tensor that is missing, not expected, of another shape or unreadable.
        """
        self._directory, self._files = directory, weight_files(directory)
        self._where = _tensor_files(directory, self._files)
        self._mapping = get_model_conversion_mapping(causal_lm)
        self._groups, covered, unexpected = self._plan(causal_lm)
        self._check_unexpected(causal_lm, unexpected, layers)
        self.names = covered
        self.missing = self._check_missing(causal_lm, covered)
        self._check_plain_shapes(causal_lm)
        self._check_tied(causal_lm)
        # What publishing has to undo; transformers' own from_pretrained leaves the same note.
        causal_lm._weight_conversions = [entry for entry in self._mapping if entry.was_used()]

    def load(self, causal_lm: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
        """Fill the model's tensors, each rank its part.

        Args:
            causal_lm: the model, for what conversions read of its configuration.
            tensors: its parameters and buffers by the names that they had when this object was made.

        Raises:
            ConfigError: a file cannot be read, or a converted tensor has another shape than the model's.
        """
        with _Reader(self._where) as reader:
            for group in self._groups:
                if group.converter is None:
                    (name,) = group.sources[group.target]
                    fill(tensors[group.target], reader.lazy(name))
                else:
                    self._load_converted(causal_lm, tensors, group, reader)

    def _plan(self, causal_lm: PreTrainedModel) -> tuple[list[Group], set[str], list[str]]:
        """Group the files' tensors by what they become, as transformers' own loading does."""
        renamings = [entry for entry in self._mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in self._mapping if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
        expected, prefix = causal_lm.state_dict(), causal_lm.base_model_prefix
        groups, covered, unexpected = dict[str, Group](), set[str](), list[str]()
        for name in sorted(self._where, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, prefix, expected)
            if target not in expected and name in expected:
                target, pattern = rename_source_key(name, [], [], prefix, expected)
            if target not in expected:
                unexpected.append(name)
                continue
            converter = by_pattern[pattern] if pattern is not None else None
            group = groups.setdefault(target, Group(target, converter=converter))
            group.sources.setdefault(pattern or target, []).append(name)
            covered.add(target)
            if converter is not None:
                first, *others = converter.target_patterns
                covered.update(target.replace(first, other) for other in others)
        return list(groups.values()), covered, unexpected

    def _load_converted(
        self, causal_lm: PreTrainedModel, tensors: Mapping[str, Tensor], group: Group, reader: "_Reader"
    ) -> None:
        assert group.converter is not None
        target = tensors[group.target]
        begin, end = _own_experts(group.converter, target)
        converter = deepcopy(group.converter)
        for pattern, names in group.sources.items():
            for name in names[begin:end]:
                converter.add_tensor(group.target, name, pattern, partial(reader.whole, name))
        if begin == end:
            return
        made = converter.convert(group.target, model=causal_lm, config=causal_lm.config)
        for name, value in made.items():
            whole = value[0] if isinstance(value, list) else value
            part = tensors[name]
            runs = local_runs(part)
            if end is not None:  # only this rank's experts were read, all of what was read is its own
                runs[0], shape = [(0, end - begin)], [end - begin, *part.shape[1:]]
            else:
                shape = list(part.shape)
            if list(whole.shape) != shape:
                raise ConfigError(self._wrong_shape(group, name, list(whole.shape), shape))
            fill(part, whole, runs)

    def _check_missing(self, causal_lm: PreTrainedModel, covered: set[str]) -> set[str]:
        """Return the missing names that the model is known to make up for itself."""
        missing = causal_lm.state_dict().keys() - covered
        shared = _shared_names(causal_lm)
        missing = {name for name in missing if not any(other in covered for other in shared.get(name, ()))}
        allowed = _matching(missing, causal_lm._keys_to_ignore_on_load_missing)
        if lost := sorted(missing - allowed, key=dot_natural_key):
            where = _described(self._directory, self._files)
            raise ConfigError(f"model.name: {where} lacks {_listed(lost)}, which the model needs")
        return allowed

    def _check_unexpected(self, causal_lm: PreTrainedModel, unexpected: list[str], layers: int | None) -> None:
        # Older files hold what is computed today.
        known = [*(causal_lm._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"]
        extra = set(unexpected) - _matching(set(unexpected), known)
        if layers is not None:
            extra = {name for name in extra if not any(int(n) >= layers for n in re.findall(r"\.(\d+)\.", name))}
        if extra:
            names = sorted(extra, key=dot_natural_key)
            raise ConfigError(
                f"model.name: {self._where[names[0]]} holds {_listed(names)}, which a "
                f"{type(causal_lm).__name__} does not have; is config.json that of these weights?"
            )

    def _check_plain_shapes(self, causal_lm: PreTrainedModel) -> None:
        expected = causal_lm.state_dict()
        with _Reader(self._where) as reader:
            for group in self._groups:
                if group.converter is None:
                    (name, *twice) = group.sources[group.target]
                    if twice:
                        raise ConfigError(f"model.name: {name} and {twice[0]} in {self._directory} are the same tensor")
                    shape, wanted = reader.lazy(name).get_shape(), list(expected[group.target].shape)
                    if shape != wanted:
                        raise ConfigError(self._wrong_shape(group, group.target, shape, wanted))

    def _check_tied(self, causal_lm: PreTrainedModel) -> None:
        """Refuse files whose output head differs from the embedding that the configuration says it shares.

        transformers would untie the two, an inference engine would not: the sampler would be another policy.
        """
        plain = {group.target: group.sources[group.target][0] for group in self._groups if group.converter is None}
        pairs = [(name, other) for name, others in _shared_names(causal_lm).items() for other in others]
        with _Reader(self._where) as reader:
            for name, other in pairs:
                both = name < other and name in plain and other in plain
                if both and not _equal(reader.lazy(plain[name]), reader.lazy(plain[other])):
                    raise ConfigError(
                        f"model.name: config.json in {self._directory} ties {name} and {other}, but the files hold two "
                        "that differ; set tie_word_embeddings to false there"
                    )

    def _wrong_shape(self, group: Group, name: str, shape: list[int], wanted: list[int]) -> str:
        sources = [source for names in group.sources.values() for source in names]
        return (
            f"model.name: {_listed(sources)} in {self._where[sources[0]]} gives {name} the shape {shape}, but "
            f"config.json says {wanted}"
        )


def weight_files(directory: Path) -> list[Path]:
    """List the safetensors files of a model.

    Raises:
        ConfigError: there are none, or the index names one that is not there.
    """
    index = directory / _INDEX
    if index.is_file():
        try:
            names = sorted({str(name) for name in json.loads(index.read_text())["weight_map"].values()})
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ConfigError(f"model.name: {index} is not an index of weights: {error!r}") from None
        files = [directory / name for name in names]
    else:
        files = [directory / _SINGLE]
    lost = [file for file in files if not file.is_file()]
    if not lost:
        return files
    if index.is_file():
        raise ConfigError(f"model.name: {index} names {lost[0].name}, which is not there")
    raise ConfigError(
        f"model.name: {directory} has neither {_SINGLE} nor {_INDEX}; weights in another format (.bin) are not read, "
        "rewrite them: AutoModelForCausalLM.from_pretrained(NAME).save_pretrained(DIRECTORY)"
    )


def _tensor_files(directory: Path, files: list[Path]) -> dict[str, Path]:
    """Name of each tensor -> its file, from the files' headers."""
    where: dict[str, Path] = {}
    for file in files:
        try:
            with safe_open(file, "pt", backend="pread") as opened:
                where.update(dict.fromkeys(opened.keys(), file))
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"model.name: {file} cannot be read: {error}") from None
    return where


class _Reader:
    """Opens each file once and closes all at the end."""

    def __init__(self, where: Mapping[str, Path]) -> None:
        self._where, self._open, self._stack = where, dict[Path, Any](), ExitStack()

    def __enter__(self) -> "_Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()
        self._stack.close()

    def lazy(self, name: str) -> Any:
        """The tensor, of which nothing is read before it is sliced."""
        file = self._where[name]
        if file not in self._open:
            self._open[file] = self._stack.enter_context(safe_open(file, "pt", backend="pread"))
        return self._open[file].get_slice(name)

    def whole(self, name: str) -> Tensor:
        """The tensor in the file's dtype: conversions only move elements."""
        value: Tensor = self.lazy(name)[...]
        return value


def _own_experts(converter: WeightConverter, target: Tensor) -> tuple[int, int | None]:
    """Which of the listed tensors make up this rank's part: experts [begin, end), (0, None) if all are needed."""
    stacked = all(
        (isinstance(operation, MergeModulelist) and operation.dim == 0)
        or (isinstance(operation, Concatenate) and operation.dim > 0)
        for operation in converter.operations
    )
    merged = any(isinstance(operation, MergeModulelist) for operation in converter.operations)
    runs = local_runs(target)[0] if target.ndim else []
    if not (stacked and merged) or len(runs) > 1:
        return 0, None
    return runs[0] if runs else (0, 0)


def _shared_names(causal_lm: PreTrainedModel) -> dict[str, list[str]]:
    """The other names of each parameter that has several."""
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


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _described(directory: Path, files: list[Path]) -> str:
    return str(files[0]) if len(files) == 1 else f"{directory} ({len(files)} files)"
