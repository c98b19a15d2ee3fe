"""The batch: what the orchestrator ships and the trainer trains on, as flat arrays over packed rows.

It does not know the trainer's world size. Every rank reads the whole batch and takes its rows by
`prime_rl.run.assign.assign_rows`, a pure function that all ranks call with the same arguments.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save

from prime_rl.run.artifact import ArtifactError, Incomplete, publish, read_manifest
from prime_rl.run.paths import RunPaths, steps_in
from prime_rl.run.surroundings import told
from prime_rl.run.tensors import content_hash, hash_tensors

FORMAT = "prime_rl.batch/1"
ROWS_FILE = "rows.safetensors"


@dataclass(frozen=True, slots=True)
class Batch:
    """Packed rows, concatenated; T tokens in R rows and S samples.

    Entry t describes token t: the trainer's log-probability at t is that of `tokens[t]` given the tokens before it in
    the same segment. The first token of a segment has none and is masked.

    Attributes:
        tokens: int32 [T].
        loss_mask: uint8 [T], 1 where the token is trained on.
        logprobs: float32 [T], the sampler's processed log-probability (temperature applied).
        advantages: float32 [T].
        versions: int32 [T], step of the policy version that sampled the token, -1 where none did.
        temperature: float32 [T], the sampler's temperature.
        segment_ids: int32 [T], index of the token's sample within its row.
        row_offsets: int64 [R + 1], row r is tokens row_offsets[r] to row_offsets[r + 1].
        row_cost: float32 [R], estimated cost of the row, in any unit.
        seq_lens: int32 [S], lengths of the samples in the order of the tokens.
        sample_group: int64 [S], stream position (group_id) of each sample.
        sample_rollout: int32 [S], rollout of that group.

    Streams that only some runs need; None where a batch has none, and then not in the file:
        top_k: int32 [T], 0 where the sampler kept all tokens.
        top_p, min_p: float32 [T], 1 and 0 where the sampler kept all.
        rl_weights, ce_weights, ref_kl_weights: float32 [T], how much the token counts in each part of the loss. Without
            them every masked token counts 1 in the first and 0 in the others.
        ref_logprobs: float32 [T], log-probability that a reference or teacher gives to the token.
    """

    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    versions: NDArray[np.int32]
    temperature: NDArray[np.float32]
    segment_ids: NDArray[np.int32]
    row_offsets: NDArray[np.int64]
    row_cost: NDArray[np.float32]
    seq_lens: NDArray[np.int32]
    sample_group: NDArray[np.int64]
    sample_rollout: NDArray[np.int32]
    top_k: NDArray[np.int32] | None = None
    top_p: NDArray[np.float32] | None = None
    min_p: NDArray[np.float32] | None = None
    rl_weights: NDArray[np.float32] | None = None
    ce_weights: NDArray[np.float32] | None = None
    ref_kl_weights: NDArray[np.float32] | None = None
    ref_logprobs: NDArray[np.float32] | None = None

    @property
    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """The arrays that are there, by name."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def rows(self) -> int:
        """Number of packed rows R."""
        return len(self.row_offsets) - 1

    @property
    def loss_tokens(self) -> int:
        """Number of tokens trained on, before any loss-specific mask."""
        return int(self.loss_mask.sum())

    def row(self, index: int) -> slice:
        """Return where the tokens of row `index` lie."""
        return slice(int(self.row_offsets[index]), int(self.row_offsets[index + 1]))

    def validate(self) -> None:
        """Raise ValueError, naming the field, where an array has another type, length or meaning than documented."""
        arrays = self.arrays
        for field, array in arrays.items():
            if array.dtype != _DTYPES[field]:
                raise ValueError(f"{field} is {array.dtype}, not {_DTYPES[field]}")
        tokens, samples = len(self.tokens), len(self.seq_lens)
        lengths = {"sample_group": samples, "sample_rollout": samples, "row_cost": self.rows}
        lengths |= dict.fromkeys(PER_TOKEN & arrays.keys(), tokens)
        for name, length in lengths.items():
            if arrays[name].shape != (length,):
                raise ValueError(f"{name} has shape {arrays[name].shape}, not ({length},)")
        if self.row_offsets[0] != 0 or self.row_offsets[-1] != tokens or (np.diff(self.row_offsets) <= 0).any():
            raise ValueError("row_offsets do not cut the tokens into non-empty rows")
        if self.seq_lens.sum() != tokens or not np.isin(self.row_offsets[1:], np.cumsum(self.seq_lens)).all():
            raise ValueError("seq_lens do not cut the rows into samples")
        starts = np.cumsum(self.seq_lens) - self.seq_lens
        if self.loss_mask[starts].any():
            raise ValueError("loss_mask is set on the first token of a segment, which has no log-probability")
        if not (np.isfinite(self.temperature).all() and (self.temperature > 0).all()):
            raise ValueError("temperature is not a number above 0 for every token: the logits are divided by it")


_DTYPES: dict[str, type[np.generic]] = {
    "tokens": np.int32, "loss_mask": np.uint8, "logprobs": np.float32, "advantages": np.float32,
    "versions": np.int32, "temperature": np.float32, "segment_ids": np.int32, "row_offsets": np.int64,
    "row_cost": np.float32, "seq_lens": np.int32, "sample_group": np.int64, "sample_rollout": np.int32,
    "top_k": np.int32, "top_p": np.float32, "min_p": np.float32, "rl_weights": np.float32,
    "ce_weights": np.float32, "ref_kl_weights": np.float32, "ref_logprobs": np.float32,
}  # fmt: skip
PER_TOKEN = _DTYPES.keys() - {"row_offsets", "row_cost", "seq_lens", "sample_group", "sample_rollout"}
"""Names of the arrays of T entries."""
STREAMS = ("top_k", "top_p", "min_p", "rl_weights", "ce_weights", "ref_kl_weights", "ref_logprobs")
"""Names of the arrays that a batch may have or not, all of T entries."""


def write_batch(
    path: Path,
    batch: Batch,
    fields: Mapping[str, Any],
    before_rename: Callable[[Path], None] = lambda temporary: None,
) -> dict[str, Any]:
    """Publish `batch` as the artifact `path`; returns its manifest.

    Args:
        path: `rollouts/step_n`.
        batch: what to train on; checked first (ValueError).
        fields: branch, step, async_level and whatever else the manifest shall say.
        before_rename: as `publish` has it.

    Raises:
        SurroundingsError: the disk is full, the directory not writable ...; nothing is left behind.
    """
    batch.validate()

    def write(directory: Path) -> dict[str, Any]:
        # Not by save_file, whose errors say neither file nor reason.
        (directory / ROWS_FILE).write_bytes(save(batch.arrays))
        sampled = batch.versions[batch.versions >= 0]
        return {
            "format": FORMAT,
            **fields,
            "group_ids": [int(group) for group in np.unique(batch.sample_group)],
            "min_version": int(sampled.min()) if len(sampled) else None,
            "max_version": int(sampled.max()) if len(sampled) else None,
            "loss_tokens": batch.loss_tokens,
            "sequences": len(batch.seq_lens),
            "hash": content_hash(hash_tensors(directory)),
        }

    with told(f"write batch {path}", path.parent):
        return publish(path, write, before_rename)


def read_batch(path: Path, step: int | None = None) -> tuple[Batch, dict[str, Any]]:
    """Read a batch and its manifest.

    Args:
        path: `rollouts/step_n`.
        step: the step that the manifest must tell; None takes any.

    Raises:
        Incomplete: something is missing, or the rows are not those that were hashed.
        ArtifactError: it is of another step, or its arrays are not as `Batch` says.
    """
    manifest = read_manifest(path, FORMAT)
    if step is not None and manifest["step"] != step:
        raise ArtifactError(f"{path} holds step {manifest['step']}, not {step}")
    try:
        found = content_hash(hash_tensors(path))
    except ArtifactError as error:
        raise Incomplete(str(error)) from None  # of the right size: what is in it may yet be to come
    if found != manifest.get("hash"):
        raise Incomplete(f"{path / ROWS_FILE} is not what was shipped: its hash is not the one in its manifest")
    try:
        batch = Batch(**load_file(path / ROWS_FILE))
        batch.validate()
    except (TypeError, ValueError) as error:
        raise ArtifactError(f"{path / ROWS_FILE} is not a batch: {error}") from None
    return batch, manifest


def delete_rows(paths: RunPaths, below: int) -> None:
    """Delete the rows of batches before `below`; their manifests stay and tell what was shipped.

    Raises:
        OSError: the directory cannot be written.
    """
    for step in steps_in(paths.rollouts_dir):
        if step < below:
            (paths.rollouts(step) / ROWS_FILE).unlink(missing_ok=True)
