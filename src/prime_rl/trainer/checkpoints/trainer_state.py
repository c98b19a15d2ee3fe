"""The state of a trainer as tensors by name, independent of the number of ranks and the sharding.

model/<parameter or buffer>          trained parameters and persistent buffers; frozen weights are those of `model.name`
optim/<parameter>/<name of state>    sharded like the parameter, if it has the parameter's shape
rng/<rank>                           generators of one rank, used only with the same number of ranks

Checkpoints are loaded without running code from their files.
"""

import base64
import json
import pickle
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import BytesStorageMetadata, FileSystemReader, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.optim import Optimizer

from prime_rl.core.errors import ConfigError, RunError, summarize_exception
from prime_rl.core.os_errors import summarize_os_error
from prime_rl.trainer.parallel.process_group import World

_ALLOWED = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
}  # fmt: skip


def model_tensors(policy: nn.Module) -> dict[str, Tensor]:
    """Trained parameters and persistent buffers, sharing storage with the policy."""
    everything = policy.state_dict()
    parameters = dict(policy.named_parameters())
    tied = {name for name, _ in policy.named_parameters(remove_duplicate=False)} - parameters.keys()
    frozen = {name for name, parameter in parameters.items() if not parameter.requires_grad}
    return {f"model/{name}": t.detach() for name, t in everything.items() if name not in tied | frozen}


def optimizer_tensors(policy: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Optimizer state by parameter: tensors and numbers. Settings of groups come from the configuration."""
    tensors = dict[str, Tensor]()
    for name, parameter in _trained(policy):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, (int, float)):
                value = torch.tensor(value)
            if value is not None and not isinstance(value, Tensor):
                raise TypeError(f"the optimizer keeps {key} of {name} as {type(value).__name__}, not as a tensor")
            if value is not None:
                tensors[f"optim/{name}/{key}"] = value.detach()
    return tensors


def empty_optimizer_tensors(policy: nn.Module, metadata: Metadata) -> dict[str, Tensor]:
    """Allocate the optimizer state of a checkpoint, sharded like the current parameters."""
    saved = metadata.state_dict_metadata
    tensors = dict[str, Tensor]()
    for name, parameter in _trained(policy):
        for key in (key for key in saved if key.startswith(f"optim/{name}/")):
            entry = saved[key]
            assert isinstance(entry, TensorStorageMetadata)
            if entry.size == parameter.shape:
                tensors[key] = torch.zeros_like(parameter.detach(), dtype=entry.properties.dtype)
            else:
                tensors[key] = torch.zeros(entry.size, dtype=entry.properties.dtype, device=parameter.device)
    return tensors


def restore_optimizer(policy: nn.Module, optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Load the tensors of `empty_optimizer_tensors` into the optimizer."""
    names = {parameter: name for name, parameter in _trained(policy)}
    states = dict[str, dict[str, Tensor]]()
    for key, tensor in tensors.items():
        name, entry = key.removeprefix("optim/").rsplit("/", 1)
        states.setdefault(name, {})[entry] = tensor
    packed = optimizer.state_dict()
    numbers = [number for group in packed["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    packed["state"] = {n: states[names[p]] for n, p in zip(numbers, parameters, strict=True) if names[p] in states}
    optimizer.load_state_dict(packed)


def check_model(tensors: Mapping[str, Tensor], metadata: Metadata, where: str, hint: str) -> None:
    """Raise ConfigError if a tensor of the checkpoint is missing, unexpected, or of another shape."""
    saved = {key: entry for key, entry in metadata.state_dict_metadata.items() if key.startswith("model/")}
    missing, extra = sorted(tensors.keys() - saved.keys()), sorted(saved.keys() - tensors.keys())
    if missing or extra:
        what = f"does not have {missing[0]}" if missing else f"has {extra[0]}, which the model does not have"
        raise ConfigError(f"{where} {what} ({len(missing)} missing, {len(extra)} unexpected){hint}")
    for key, tensor in tensors.items():
        entry = saved[key]
        if isinstance(entry, BytesStorageMetadata) or entry.size != tensor.shape:
            found = "no tensor" if isinstance(entry, BytesStorageMetadata) else tuple(entry.size)
            raise ConfigError(f"{where} has {key} of shape {found}, the model {tuple(tensor.shape)}{hint}")


def seed_rng(world: World, seed: int) -> None:
    """Seed this rank's random generators; each rank draws different numbers."""
    words = np.random.SeedSequence((seed % 2**64, world.rank)).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))
    torch.manual_seed(int(words[2]))


def rng_tensors(world: World) -> dict[str, Tensor]:
    """The state of this rank's random generators, as bytes of JSON."""
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "torch": _text(torch.get_rng_state()),
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, cached],
        "python": random.getstate(),
    }
    if world.device.type == "cuda":
        state["cuda"] = _text(torch.cuda.get_rng_state(world.device))
    return {_rng_key(world): torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)}


def empty_rng_tensors(world: World, metadata: Metadata) -> dict[str, Tensor]:
    """Allocate the state of this rank's generators; empty if the checkpoint has none."""
    entry = metadata.state_dict_metadata.get(_rng_key(world))
    return {_rng_key(world): torch.empty(entry.size, dtype=torch.uint8)} if entry is not None else {}


def restore_rng(world: World, tensors: Mapping[str, Tensor]) -> None:
    """Restore the random generators of this rank, if the checkpoint has them for this number of ranks."""
    if _rng_key(world) not in tensors:
        return
    state = json.loads(bytes(tensors[_rng_key(world)].tolist()))
    torch.set_rng_state(_bytes(state["torch"]))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), position, has_gauss, cached))
    version, numbers, following = state["python"]
    random.setstate((version, tuple(numbers), following))
    if "cuda" in state and world.device.type == "cuda":
        torch.cuda.set_rng_state(_bytes(state["cuda"]), world.device)


def _trained(policy: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in policy.named_parameters() if p.requires_grad)


def _rng_key(world: World) -> str:
    return f"rng/{world.rank}"


def _text(state: Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


class TensorReader(FileSystemReader):
    """Reads checkpoints that contain only tensors; the metadata, which grows with the number of ranks, only once.

    The metadata file is a pickle, and unpickling calls everything that a pickle names. The unpickler therefore accepts
    only the classes of checkpoint metadata.
    """

    _metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the contents of the metadata file.

        Raises:
            RunError: it is damaged, or contains more than tensors.
        """
        if self._metadata is None:
            self._metadata = _read_metadata(Path(self.path) / ".metadata")
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata


def _read_metadata(file: Path) -> Metadata:
    try:
        with file.open("rb") as content:
            metadata = _Unpickler(content).load()
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ValueError, TypeError, IndexError) as error:
        raise RunError(f"{file} cannot be read: {error}") from None
    if not isinstance(metadata, Metadata):
        raise RunError(f"{file} is not the metadata of a checkpoint")
    return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):  # Python 3.11.0 to 3.11.3 pickle members of enumerations with it
            return _memory_format
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if name not in _ALLOWED.get(module, ()) and not is_dtype:
            raise pickle.UnpicklingError(f"it contains {module}.{name}, which checkpoint metadata does not use")
        return super().find_class(module, name)


def _memory_format(enumeration: Any, name: Any) -> Any:
    """Stand in for `getattr`, which would give a pickle every function of a module."""
    if enumeration is not _MEM_FORMAT_ENCODING or name not in _MEM_FORMAT_ENCODING.__members__:
        raise pickle.UnpicklingError(f"it reads {name!r} of {enumeration!r}, which checkpoint metadata does not use")
    return _MEM_FORMAT_ENCODING[name]


def load_model_and_optimizer(
    part: Path, policy: nn.Module, optimizer: Optimizer | None, group: dist.ProcessGroup | None = None, hint: str = ""
) -> TensorReader:
    """Load a policy, and its optimizer unless None, from the trainer's part of a checkpoint, in place.

    Returns the reader, for other tensors of the part.

    Raises:
        ConfigError: the checkpoint is of another model; `hint` is appended to the message.
        RunError: it is damaged.
    """
    reader = TensorReader(part)
    metadata = reader.read_metadata()
    model = model_tensors(policy)
    check_model(model, metadata, str(part), hint)
    moments = empty_optimizer_tensors(policy, metadata) if optimizer is not None else {}
    try:
        dcp.load({**model, **moments}, storage_reader=reader, process_group=group)
    except dcp.CheckpointException as error:
        raise RunError(f"cannot load {part}: {summarize_dcp_error(error)}") from error
    if optimizer is not None:
        restore_optimizer(policy, optimizer, moments)
    return reader


def summarize_dcp_error(error: BaseException) -> str:
    """Summarise an error of torch's reader or writer in one line: the first cause on the first failed rank."""
    if isinstance(error, dcp.CheckpointException):
        rank, (cause, _) = next(iter(sorted(error.failures.items())))
        return f"rank {rank}: {summarize_dcp_error(cause)}"
    if isinstance(error, OSError):
        return summarize_os_error(error)
    line = summarize_exception(error)
    # torch's writer reports an incomplete write in these words and hides the error of the disk.
    return f"a file could not be written completely ({line})" if "inline_container" in line else line
