"""Writing whole tensors: a file's owner gathers what it needs of the other ranks' buffers, and hashes as it writes."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from prime_rl.errors import RunError
from prime_rl.run.artifact import fsync
from prime_rl.run.surroundings import describe
from prime_rl.run.tensors import RawTensor
from prime_rl.trainer.publication.plan import FilePlan, Plan, Source, view
from prime_rl.trainer.publication.sources import Sources

_DTYPES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
Hashes = dict[str, dict[str, str]]
"""File name -> tensor name -> hash."""


def write_files(
    directory: Path,
    plan: Plan,
    sources: Sources,
    buffer: Tensor,
    rank: int,
    group: dist.ProcessGroup,
    write: Callable[[Path, Mapping[str, Tensor]], dict[str, str]],
) -> Hashes:
    """Write the files that this rank owns to `directory`. All ranks call it together.

    Args:
        directory: there already.
        plan: of the publication.
        sources: makes of whole tensors what is written.
        buffer: this rank's copies.
        rank: this one.
        group: of all ranks, which nothing else uses at the same time.
        write: writes a file of contiguous CPU tensors, or what stands for it; returns their hashes.

    Returns:
        Under the names of the files of a full version, whatever `write` has made of them.

    Raises:
        RunError: of `write`, whose OSError becomes one; after the last exchange, so that no rank waits for this one.
    """
    hashes: Hashes = {}
    error: RunError | None = None
    ranks = len(plan.buffer_bytes)
    for begin in range(0, len(plan.files), ranks):
        mine = exchange(plan.files[begin : begin + ranks], buffer, rank, group)
        number = begin + rank
        if mine is None or error is not None:
            continue
        name = sources.file_name(number, len(plan.files))
        try:
            hashes[name] = write(directory / name, dict(finished(plan.files[number], mine, sources)))
        except RunError as caught:
            error = caught
        except OSError as caught:  # a write says what, but not to which file
            error = RunError(describe(caught, directory / name))
    if error is not None:
        raise error
    return hashes


def exchange(
    files: tuple[FilePlan, ...], buffer: Tensor, rank: int, group: dist.ProcessGroup
) -> dict[int, tuple[Tensor, int]] | None:
    """Send every owner its stretch of this rank's buffer, and receive what this rank's own file needs.

    Args:
        files: at most one of each owner.
        buffer: this rank's copies.
        rank: this one.
        group: of all ranks.

    Returns:
        By rank, the stretch and where in that rank's buffer it begins; None where no file is this rank's.
    """
    pending, mine = list[dist.Work | None](), None
    for file in files:
        if file.owner == rank:
            begin, end = file.stretches[rank]
            mine = {rank: (buffer[begin:end], begin)}
            for source, (begin, end) in enumerate(file.stretches):
                if source != rank and end > begin:
                    mine[source] = (torch.empty(end - begin, dtype=torch.uint8), begin)
                    pending.append(dist.irecv(mine[source][0], source, group=group))
        else:
            begin, end = file.stretches[rank]
            if end > begin:
                pending.append(dist.isend(buffer[begin:end], file.owner, group=group))
    for work in pending:
        if work is not None:
            work.wait()
    return mine


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Write contiguous CPU tensors to `path`, durably, without a second copy in memory.

    Returns:
        Tensor name -> hash.

    Raises:
        OSError: the disk is full ...
    """
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


def raw_tensors(tensors: Mapping[str, Tensor]) -> dict[str, RawTensor]:
    """View contiguous CPU tensors as their bytes, those with the largest elements first: that keeps all aligned."""
    return {
        name: RawTensor(_DTYPES[t.dtype], tuple(t.shape), t.reshape(-1).view(torch.uint8).numpy())
        for name, t in sorted(tensors.items(), key=lambda item: -item[1].element_size())
    }


def write_index(directory: Path, hashes: Hashes) -> None:
    """Write the index of several files, as transformers and vLLM read it; none for one file."""
    if len(hashes) > 1:
        total = sum((directory / name).stat().st_size for name in hashes)
        weight_map = {tensor: name for name in sorted(hashes) for tensor in hashes[name]}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def finished(
    file: FilePlan, stretches: Mapping[int, tuple[Tensor, int]], sources: Sources
) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of a file as they are published, made of the stretches that `exchange` returned."""
    for block in file.blocks:
        for name, tensor in sources.finish({source.name: _whole(source, stretches) for source in block}).items():
            yield name, tensor.contiguous()


def _whole(source: Source, stretches: Mapping[int, tuple[Tensor, int]]) -> Tensor:
    """Put the pieces together; a view of the buffer where there is only one."""
    whole: Tensor | None = None
    for piece in source.pieces:
        stretch, begin = stretches[piece.rank]
        part = view(stretch, source.dtype, piece.box[1], piece.begin - begin)
        if piece.box[1] == source.shape:
            return part
        whole = torch.empty(source.shape, dtype=source.dtype) if whole is None else whole
        whole[tuple(slice(at, at + extent) for at, extent in zip(*piece.box, strict=True))] = part
    return torch.empty(source.shape, dtype=source.dtype) if whole is None else whole
