"""torch's distributed checkpoint format, read without running code that a file brings along.

The format keeps its table of contents as a pickle. Reading one may call anything that the pickle names; here it may
name only what such a table consists of.
"""

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, Metadata

from prime_rl.errors import RunError

_ALLOWED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}


class TensorReader(FileSystemReader):
    """Reads checkpoints that hold tensors and nothing else."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the table of contents.

        Raises:
            RunError: it is damaged, or holds more than tensors.
        """
        file = Path(self.path) / ".metadata"
        try:
            with file.open("rb") as content:
                metadata = _Unpickler(content).load()
        except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ValueError, TypeError, IndexError) as error:
            raise RunError(f"{file} cannot be read: {error}") from None
        if not isinstance(metadata, Metadata):
            raise RunError(f"{file} is not the table of contents of a checkpoint")
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) not in _ALLOWED and not is_dtype:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no table of contents needs")
        return super().find_class(module, name)
