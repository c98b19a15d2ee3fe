"""Training batches, which the orchestrator writes and the trainer reads, as flat arrays over packed rows.

The format is independent of the trainer's world size: every rank reads the whole batch and selects its rows with
`prime_rl.trainer.data.row_assignment.assign_rows`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save

from prime_rl.core.os_errors import wrap_os_errors
from prime_rl.storage.artifact import ArtifactError, IncompleteArtifact, publish_artifact, read_manifest
from prime_rl.storage.paths import RunPaths
from prime_rl.storage.tensor_hashes import content_hash, hash_tensors

FORMAT = "prime_rl.batch/1"
ROWS_FILE = "rows.safetensors"
TRAIN_FILE = "train.safetensors"
"""File that the trainer adds to a batch with `token_export`; it is not part of the artifact."""


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens of S samples, packed into R rows that are concatenated.

    Entry t describes token t: the trainer's log-probability at t is that of `tokens[t]` given the preceding tokens of
    the same segment. The first token of a segment has no log-probability and is masked.

    Attributes:
        tokens: int32 [T].
        loss_mask: uint8 [T], 1 where the token is trained on.
        logprobs: float32 [T], the sampler's processed log-probability (temperature applied).
        advantages: float32 [T].
        versions: int32 [T], step of the policy version that sampled the token, -1 if none did.
        temperature: float32 [T], the sampler's temperature.
        segment_ids: int32 [T], index of the token's sample within its row.
        row_offsets: int64 [R + 1], row r is tokens row_offsets[r] to row_offsets[r + 1].
        row_cost: float32 [R], estimated cost of the row in an arbitrary unit.
        seq_lens: int32 [S], lengths of the samples in token order.
        sample_group: int64 [S], stream position (group_id) of each sample.
        sample_rollout: int32 [S], index of the rollout in its group.

    Optional arrays, absent from the file if None:
        top_k: int32 [T], 0 if the sampler kept all tokens.
        top_p, min_p: float32 [T], 1 and 0 if the sampler kept all tokens.
        rl_weights, ce_weights, ref_kl_weights: float32 [T], weight of the token in each part of the loss. By default 1
            in the first part for every token of the mask, and 0 in the others.
        ref_logprobs: float32 [T], log-probability of the token under a reference or teacher model.
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
        """The arrays that are not None, by name."""
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
        """Return the slice of the tokens of row `index`."""
        return slice(int(self.row_offsets[index]), int(self.row_offsets[index + 1]))

    def validate(self) -> None:
        """Raise ValueError, naming the field, if an array violates the documented type, length or meaning."""
        arrays = self.arrays
        for field, array in arrays.items():
            if array.dtype != (expected := _INTEGERS.get(field, np.float32)):
                raise ValueError(f"{field} is {array.dtype}, not {expected}")
        tokens, samples = len(self.tokens), len(self.seq_lens)
        lengths = {"sample_group": samples, "sample_rollout": samples, "row_cost": self.rows}
        lengths |= dict.fromkeys(TOKEN_ARRAYS & arrays.keys(), tokens)
        for name, length in lengths.items():
            if arrays[name].shape != (length,):
                raise ValueError(f"{name} has shape {arrays[name].shape}, not ({length},)")
        if self.row_offsets[0] != 0 or self.row_offsets[-1] != tokens or (np.diff(self.row_offsets) <= 0).any():
            raise ValueError("row_offsets do not divide the tokens into non-empty rows")
        if self.seq_lens.sum() != tokens or not np.isin(self.row_offsets[1:], np.cumsum(self.seq_lens)).all():
            raise ValueError("seq_lens do not divide the rows into samples")
        starts = np.cumsum(self.seq_lens) - self.seq_lens
        if self.loss_mask[starts].any():
            raise ValueError("loss_mask is set on the first token of a segment, which has no log-probability")
        if not (np.isfinite(self.temperature).all() and (self.temperature > 0).all()):
            raise ValueError("temperature must be positive and finite for every token")


_INTEGERS = {"loss_mask": np.uint8, "row_offsets": np.int64, "sample_group": np.int64}
_INTEGERS |= dict.fromkeys(("tokens", "versions", "segment_ids", "seq_lens", "sample_rollout", "top_k"), np.int32)
_FIELDS = {field.name: field for field in dataclasses.fields(Batch)}
TOKEN_ARRAYS = _FIELDS.keys() - {"row_offsets", "row_cost", "seq_lens", "sample_group", "sample_rollout"}
"""Names of the arrays with T entries."""
OPTIONAL_ARRAYS = tuple(name for name, field in _FIELDS.items() if field.default is None)
"""Names of the optional arrays, all with T entries."""


def write_batch(
    path: Path,
    batch: Batch,
    fields: Mapping[str, Any],
    before_rename: Callable[[Path], None] = lambda temporary: None,
) -> dict[str, Any]:
    """Validate `batch`, publish it as the artifact `path`, and return the manifest, with additional `fields`.

    Raises:
        ValueError: the batch is invalid.
        SystemResourceError: the write failed; no files remain.
    """
    batch.validate()

    def write(directory: Path) -> dict[str, Any]:
        # The errors of save_file contain neither the file nor the reason.
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
            "hash": content_hash(hash_tensors(directory, ROWS_FILE)),
        }

    with wrap_os_errors(f"write batch {path}", path.parent):
        return publish_artifact(path, write, before_rename)


def read_batch(path: Path, step: int | None = None) -> tuple[Batch, dict[str, Any]]:
    """Read a batch and its manifest. A `step` of None accepts any.

    Raises:
        IncompleteArtifact: a file is missing, or the hash of the rows is wrong.
        ArtifactError: the batch belongs to another step, or its arrays are invalid.
    """
    manifest = read_manifest(path, FORMAT)
    if step is not None and manifest["step"] != step:
        raise ArtifactError(f"{path} holds step {manifest['step']}, not {step}")
    if content_hash(hash_tensors(path, ROWS_FILE)) != manifest.get("hash"):  # the contents may still be in transfer
        raise IncompleteArtifact(f"the hash of {path / ROWS_FILE} differs from the one in its manifest")
    try:
        batch = Batch(**load_file(path / ROWS_FILE))
        batch.validate()
    except (TypeError, ValueError) as error:
        raise ArtifactError(f"{path / ROWS_FILE} is not a valid batch: {error}") from None
    return batch, manifest


def delete_rows(paths: RunPaths, below: int, first: int = 0, keeps: Callable[[int], bool] = lambda step: False) -> None:
    """Delete the rows of batches `first` to `below` - 1, except those that something else `keeps`.

    The manifests remain as the record of shipped batches.
    """
    for step in (step for step in range(first, below) if not keeps(step)):
        (paths.rollouts(step) / ROWS_FILE).unlink(missing_ok=True)
