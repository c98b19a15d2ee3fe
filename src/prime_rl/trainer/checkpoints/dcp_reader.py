"""Loads torch's distributed checkpoints without running code from the files."""

import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, Metadata
from torch.optim import Optimizer

from prime_rl.core.errors import RunError, summarize_exception
from prime_rl.core.os_errors import summarize_os_error
from prime_rl.trainer.checkpoints import trainer_state

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


class TensorReader(FileSystemReader):
    """Reads checkpoints that contain only tensors.

    The metadata file is a pickle, and unpickling calls everything that a pickle names. The unpickler therefore accepts
    only the classes of checkpoint metadata.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the metadata file.

        Raises:
            RunError: it is damaged, or contains more than tensors.
        """
        file = Path(self.path) / ".metadata"
        try:
            with file.open("rb") as content:
                metadata = _Unpickler(content).load()
        except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ValueError, TypeError, IndexError) as error:
            raise RunError(f"{file} cannot be read: {error}") from None
        if not isinstance(metadata, Metadata):
            raise RunError(f"{file} is not the metadata of a checkpoint")
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if name not in _ALLOWED.get(module, ()) and not is_dtype:
            raise pickle.UnpicklingError(f"it contains {module}.{name}, which checkpoint metadata does not use")
        return super().find_class(module, name)


def load_model_and_optimizer(
    part: Path, policy: nn.Module, optimizer: Optimizer | None, group: dist.ProcessGroup | None = None, hint: str = ""
) -> None:
    """Load a policy, and its optimizer unless None, from the trainer's part of a checkpoint, in place.

    Raises:
        ConfigError: the checkpoint is of another model; `hint` is appended to the message.
        RunError: it is damaged.
    """
    reader = TensorReader(part)
    metadata = reader.read_metadata()
    model = trainer_state.model_tensors(policy)
    trainer_state.check_model(model, metadata, str(part), hint)
    moments = trainer_state.empty_optimizer_tensors(policy, metadata) if optimizer is not None else {}
    try:
        dcp.load({**model, **moments}, storage_reader=reader, process_group=group)
    except dcp.CheckpointException as error:
        raise RunError(f"cannot load {part}: {summarize_dcp_error(error)}") from error
    if optimizer is not None:
        trainer_state.restore_optimizer(policy, optimizer, moments)


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
