"""Training batches, which the orchestrator writes and the trainer reads, as flat arrays over packed rows.

The format is independent of the trainer's world size: every rank gets the whole batch and selects its rows with
`prime_rl.trainer.micro_batch.assign_rows`.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save

from prime_rl.core.os_errors import wrap_os_errors
from prime_rl.storage.artifact import MANIFEST, ArtifactError, IncompleteArtifact, publish_artifact, read_manifest
from prime_rl.storage.paths import RunPaths
from prime_rl.storage.tensor_hashes import content_hash, hash_tensors

FORMAT = "prime_rl.batch/1"
ROWS_FILE = "rows.safetensors"
TRAIN_FILE = "train.safetensors"
"""File that the trainer adds to a batch with `token_export`; it is not part of the artifact."""
SHOWN_FILE = "shown.safetensors"
"""What stays of a batch when its rows are deleted, for the page: see `keep_shown_tokens`."""
MAX_SHOWN_TOKENS = 32_768
"""About 1 MB per batch, with the trainer's values."""
_MAX_GAP = 4096
"""Tokens between two samples that are read with them."""
_SHOWN_ARRAYS = ("tokens", "loss_mask", "logprobs", "advantages", "versions")


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
        routed_experts: uint8 (up to 256 experts) or uint16 [T, L, k], the k > 1 experts that the sampler chose for the
            token in each of the model's L layers; layers without experts hold zeros. If the ids of a token in a layer
            are equal, there is no record, as for the last token of each sample, which the sampler did not process.

    From the manifest:
        sources: group_ids by environment and inference server, if there are several (`group_sources`).
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
    routed_experts: NDArray[np.uint8 | np.uint16] | None = None
    sources: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)

    @property
    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """The arrays that are not None, by name."""
        values = {name: getattr(self, name) for name in _FIELDS}
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
            if field == "routed_experts":
                if array.dtype not in (np.uint8, np.uint16):
                    raise ValueError(f"{field} is {array.dtype}, not uint8 or uint16")
                if array.ndim != 3 or array.shape[0] != len(self.tokens) or array.shape[2] < 2:
                    raise ValueError(f"{field} has shape {array.shape}, not ({len(self.tokens)}, layers, experts > 1)")
            elif array.dtype != (expected := _INTEGERS.get(field, np.float32)):
                raise ValueError(f"{field} is {array.dtype}, not {expected}")
        tokens, samples = len(self.tokens), len(self.seq_lens)
        lengths = {"sample_group": samples, "sample_rollout": samples, "row_cost": self.rows}
        lengths |= dict.fromkeys(TOKEN_ARRAYS & arrays.keys() - {"routed_experts"}, tokens)
        for name, length in lengths.items():
            if arrays[name].shape != (length,):
                raise ValueError(f"{name} has shape {arrays[name].shape}, not ({length},)")
        if self.row_offsets[0] != 0 or self.row_offsets[-1] != tokens or (np.diff(self.row_offsets) <= 0).any():
            raise ValueError("row_offsets do not divide the tokens into non-empty rows")
        if self.seq_lens.sum() != tokens or not np.isin(self.row_offsets[1:], np.cumsum(self.seq_lens)).all():
            raise ValueError("seq_lens do not divide the rows into samples")
        starts = np.cumsum(self.seq_lens) - self.seq_lens
        first = np.searchsorted(starts, self.row_offsets[:-1])  # sample of each row
        number = np.arange(samples) - np.repeat(first, np.diff(np.append(first, samples)))
        if not np.array_equal(self.segment_ids, np.repeat(number, self.seq_lens)):
            raise ValueError("segment_ids are not the indices 0, 1, ... of the samples within each row, by seq_lens")
        if self.loss_mask[starts].any():
            raise ValueError("loss_mask is set on the first token of a segment, which has no log-probability")
        if self.routed_experts is not None:
            last = self.routed_experts[starts + self.seq_lens - 1]
            if (last != last[..., :1]).any():
                raise ValueError("routed_experts has a record for the last token of a sample")
        if not (np.isfinite(self.temperature).all() and (self.temperature > 0).all()):
            raise ValueError("temperature must be positive and finite for every token")


_INTEGERS = {"loss_mask": np.uint8, "row_offsets": np.int64, "sample_group": np.int64}
_INTEGERS |= dict.fromkeys(("tokens", "versions", "segment_ids", "seq_lens", "sample_rollout", "top_k"), np.int32)
_FIELDS = {field.name: field for field in dataclasses.fields(Batch) if field.name != "sources"}
TOKEN_ARRAYS = _FIELDS.keys() - {"row_offsets", "row_cost", "seq_lens", "sample_group", "sample_rollout"}
"""Names of the arrays with T entries or, of `routed_experts`, rows."""
OPTIONAL_ARRAYS = tuple(name for name, field in _FIELDS.items() if field.default is None)
"""Names of the optional arrays, all of T tokens."""


def write_batch(
    path: Path, batch: Batch, fields: Mapping[str, Any], before_rename: Callable[[Path], None] = lambda temporary: None
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
        batch = Batch(**load_file(path / ROWS_FILE), sources=manifest.get("sources", {}))
        batch.validate()
    except (TypeError, ValueError) as error:
        raise ArtifactError(f"{path / ROWS_FILE} is not a valid batch: {error}") from None
    return batch, manifest


def delete_rows(paths: RunPaths, below: int, first: int = 0, keeps: Callable[[int], bool] = lambda step: False) -> None:
    """Delete the rows of batches `first` to `below` - 1, except those that something else `keeps`.

    The manifests remain as the record of shipped batches, and the tokens of a few groups for the page.
    """
    for step in (step for step in range(first, below) if not keeps(step)):
        keep_shown_tokens(paths.rollouts(step))
        (paths.rollouts(step) / ROWS_FILE).unlink(missing_ok=True)


@dataclass(slots=True)
class Progress:
    """Progress of a run: steps done, and tokens (prompts included), sequences and groups of all batches."""

    step: int = 0
    tokens: int = 0
    samples: int = 0
    problems: int = 0

    def count(self, tokens: int, samples: int, problems: int = 0) -> None:
        """Add a step with its numbers of tokens, samples and problems to the totals."""
        self.step += 1
        self.tokens += tokens
        self.samples += samples
        self.problems += problems

    def count_batch(self, batch: Batch) -> None:
        """Add the step of a batch."""
        self.count(len(batch.tokens), len(batch.seq_lens), len(np.unique(batch.sample_group)))

    def metrics(self) -> dict[str, float]:
        """Return the totals as metrics `progress/<name>`."""
        return {f"progress/{name}": value for name, value in asdict(self).items()}


def read_progress(paths: RunPaths, step: int) -> Progress:
    """Return the progress before batch `step`; without totals if an earlier version wrote the batch before it."""
    if step > 0:
        with suppress(OSError, ValueError, KeyError, TypeError):
            return Progress(**json.loads((paths.rollouts(step - 1) / MANIFEST).read_bytes())["progress"])
    return Progress(step)


def keep_shown_tokens(folder: Path) -> None:
    """Write the tokens of a batch's groups of lowest and highest reward, at most 32,768, to a small file.

    An existing file stays. The file has the arrays that the page shows and, with the prefix `train.`, those of the
    trainer. Nothing depends on it, so a full disk or a damaged file leaves it out.
    """
    rows, target = folder / ROWS_FILE, folder / SHOWN_FILE
    samples = folder.parents[1] / "samples" / f"{folder.name}.jsonl"
    is_shown = not samples.parent.is_dir() or samples.exists()  # a relay copies no samples
    if target.exists() or not rows.exists() or not is_shown:
        return
    temporary = target.with_name(f".tmp-{SHOWN_FILE}")
    try:
        with safe_open(rows, framework="numpy") as batch:
            arrays = {name: batch.get_tensor(name) for name in ("seq_lens", "sample_group", "sample_rollout")}
            ends = np.cumsum(arrays["seq_lens"], dtype=np.int64)
            places_of = {group: place for place, group in enumerate(_groups_by_interest(samples))}
            place = [places_of.get(group, len(places_of)) for group in arrays["sample_group"].tolist()]
            order = np.lexsort((arrays["sample_rollout"], arrays["sample_group"], place))
            order = order[arrays["seq_lens"][order] <= MAX_SHOWN_TOKENS]
            fitting = np.cumsum(arrays["seq_lens"][order], dtype=np.int64) <= MAX_SHOWN_TOKENS
            chosen = np.sort(order[fitting])
            begins = ends - arrays["seq_lens"]
            places = np.concatenate([ends[:0], *(np.arange(begins[i], ends[i]) for i in chosen)])
            parts = np.split(places, np.flatnonzero(np.diff(places) > _MAX_GAP) + 1) if len(places) else []
            shown = {name: values[chosen] for name, values in arrays.items()}
            shown |= {name: _cut(batch, name, parts) for name in _SHOWN_ARRAYS} if parts else {}
        if parts and (folder / TRAIN_FILE).exists():
            with safe_open(folder / TRAIN_FILE, framework="numpy") as train:
                shown |= {f"train.{name}": _cut(train, name, parts) for name in train.keys()}  # noqa: SIM118
        temporary.write_bytes(save(shown))
        temporary.replace(target)
    except (OSError, SafetensorError, msgspec.MsgspecError):
        temporary.unlink(missing_ok=True)


class _Reward(msgspec.Struct):
    group_id: int
    reward: float


def _groups_by_interest(samples: Path) -> list[int]:
    """Return the groups of a file of rollouts, in turns those of lowest and of highest mean reward; none without it."""
    rewards = dict[int, list[float]]()
    if samples.exists():
        decoder = msgspec.json.Decoder(_Reward)
        with samples.open("rb") as lines:
            for row in map(decoder.decode, lines):
                rewards.setdefault(row.group_id, []).append(row.reward)
    ordered = sorted(rewards, key=lambda group: (np.mean(rewards[group]), group))
    return [ordered[place // 2] if place % 2 == 0 else ordered[-1 - place // 2] for place in range(len(ordered))]


def _cut(file: Any, name: str, parts: Sequence[NDArray[np.int64]]) -> NDArray[np.generic]:
    """Return the entries at ascending positions; each part is one read, which costs as much as thousands of entries."""
    values = file.get_slice(name)
    return np.concatenate([values[int(part[0]) : int(part[-1]) + 1][part - part[0]] for part in parts])
