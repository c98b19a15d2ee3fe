"""Weights as safetensors files in the run directory: each rank writes some of the files."""

import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from prime_rl.core.errors import RunError
from prime_rl.core.os_errors import summarize_os_error
from prime_rl.storage.artifact import fsync
from prime_rl.trainer.weight_sync.transport import Hashes, WeightTransport, raw_tensors


class FilesystemTransport(WeightTransport):
    """Writes versions as safetensors files.

    Attributes:
        num_versions: how many full versions must fit into the directory: the current one and the one being written.
    """

    num_versions = 2

    def deliver(self, directory: Path, buffer: Tensor, name: str) -> list[Hashes]:
        """Write the version's files to `directory`; the hashes are by the names of a full version's files."""
        return self._ranks.gather(lambda: self._write_files(directory, buffer))

    def write_tensors(self, path: Path, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Write contiguous CPU tensors to `path`; return their hashes. Raises OSError."""
        return write_safetensors(path, tensors)

    def _write_files(self, directory: Path, buffer: Tensor) -> Hashes:
        hashes: Hashes = {}
        error: RunError | None = None
        plan, world = self._exchange.plan, self._exchange.world
        files = plan.files
        for begin in range(0, len(files), plan.num_writers):
            tensors = self._exchange.collect(files[begin : begin + plan.num_writers], buffer)
            if tensors is None or error is not None:
                continue
            name = self._exchange.state_dict.file_name(begin + world.rank, len(files))
            try:
                hashes[name] = self.write_tensors(directory / name, dict(tensors))
            except (RunError, OSError) as caught:
                if isinstance(caught, OSError):  # an error of write() does not name the file
                    caught = RunError(summarize_os_error(caught, directory / name))
                error = caught
        if error is not None:
            raise error  # only after the last exchange: the other ranks take part in all of them
        return hashes


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Write contiguous CPU tensors to `path` and fsync it, without a second copy in memory; return hashes by name."""
    raw = raw_tensors(tensors)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in raw.items():
        begin, end = end, end + tensor.data.size
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    hashes = {}
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in raw.items():
            file.write(tensor.data.data)
            hashes[name] = tensor.digest(name)
    fsync(path)
    return hashes


def write_index(directory: Path, hashes: Hashes) -> None:
    """Write the index that transformers and vLLM read for several files."""
    if len(hashes) > 1:
        total = sum((directory / name).stat().st_size for name in hashes)
        weight_map = {tensor: name for name in sorted(hashes) for tensor in hashes[name]}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
