"""One rollout for the page: its group, its conversation, and its tokens joined with the trainer's values."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prime_rl.doctor.collect import read_toml
from prime_rl.page.run_data.sample_index import SampleIndex
from prime_rl.storage.batch import ROWS_FILE, TRAIN_FILE
from prime_rl.storage.paths import RunPaths, steps_in

MAX_MESSAGE_CHARACTERS = 200_000
MAX_TOKENS = 20_000
"""Tokens of a rollout that the page shows at most."""
_FROM_BATCH = {"logprobs": "sampler_logprob", "advantages": "advantage", "versions": "version", "loss_mask": "mask"}
_FROM_TRAINER = {
    "logprobs": "trainer_logprob", "ratio": "ratio", "clipped": "clipped", "masked": "masked", "entropy": "entropy",
}  # fmt: skip


class TokenTexts:
    """Decodes token ids with the tokenizer that the run publishes beside its weights, or that of a local model."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._file: Path | None = None
        self._tokenizer: Any = None

    def decode(self, ids: Sequence[int]) -> list[str] | None:
        """The text of each token; None if the run has no tokenizer file."""
        if (file := self._find()) is None:
            return None
        if file != self._file:
            from tokenizers import Tokenizer

            self._file, self._tokenizer = None, None
            try:
                self._tokenizer = Tokenizer.from_file(str(file))
            except Exception:  # noqa: BLE001 - the library raises plain Exception for a damaged file
                return None
            self._file = file
        return [self._text(token) for token in ids]

    def _text(self, token: int) -> str:
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        if not text or "\ufffd" in text:  # a part of a character
            text = self._tokenizer.id_to_token(token) or f"<{token}>"
        return text

    def _find(self) -> Path | None:
        if self._file is not None and self._file.is_file():
            return self._file
        folders = [self._paths.weights(step) for step in reversed(steps_in(self._paths.weights_dir))]
        config = read_toml(self._paths.run_toml)
        for table in (config.get("model"), config.get("orchestrator", {}).get("model")):
            if isinstance(table, dict) and isinstance(name := table.get("name"), str):
                folders.append(Path(name))
        return next((file for folder in folders if (file := folder / "tokenizer.json").is_file()), None)


def rollout_detail(index: SampleIndex, step: int, group_id: int, rollout: int) -> dict[str, Any] | None:
    """One rollout with its group, without tokens; None if the index does not contain it."""
    group = index.find(step, group_id)
    entry = next((entry for entry in group if int(entry["rollout"]) == rollout), None)
    if entry is None or (row := index.read(entry)) is None:
        return None
    metrics = row.get("metrics")
    return {
        **index.describe(entry),
        "metrics": {str(name): value for name, value in metrics.items()} if isinstance(metrics, dict) else {},
        "messages": list(_messages(row.get("messages"))),
        "all_rollouts": [index.describe(one) for one in group],
    }


def _messages(messages: object) -> Iterator[dict[str, Any]]:
    for message in messages if isinstance(messages, list) else []:
        if not isinstance(message, dict):
            continue
        content = message.get("content")
        text = content if isinstance(content, str) else "" if content is None else str(content)
        reasoning = message.get("reasoning_content")
        yield {
            "role": str(message.get("role", "?")),
            "content": text[:MAX_MESSAGE_CHARACTERS],
            "num_omitted": max(0, len(text) - MAX_MESSAGE_CHARACTERS),
            "reasoning": reasoning[:MAX_MESSAGE_CHARACTERS] if isinstance(reasoning, str) else None,
            "tool_calls": list(_tool_calls(message.get("tool_calls"))),
        }


def _tool_calls(calls: object) -> Iterator[dict[str, str]]:
    for call in calls if isinstance(calls, list) else []:
        function = call.get("function", call) if isinstance(call, dict) else None
        if isinstance(function, dict):
            arguments = str(function.get("arguments", ""))[:MAX_MESSAGE_CHARACTERS]
            yield {"name": str(function.get("name", "?")), "arguments": arguments}


def token_detail(paths: RunPaths, texts: TokenTexts, step: int, group_id: int, rollout: int) -> dict[str, Any]:
    """The samples of a rollout as columns of values per token; `token_note` says which are missing, and why."""
    folder = paths.rollouts(step)
    try:
        samples = read_samples(folder / ROWS_FILE, folder / TRAIN_FILE, group_id, rollout)
    except FileNotFoundError:
        return {"samples": [], "token_note": f"The rows of batch {step} are deleted, so its tokens cannot be shown."}
    except Exception as error:  # noqa: BLE001 - safetensors raises its own error for a damaged file
        return {"samples": [], "token_note": f"The rows of batch {step} cannot be read: {type(error).__name__}."}
    notes = []
    if samples and "trainer_logprob" not in samples[0]:
        notes.append("The trainer's values per token were not written for this step.")
    for sample in samples:
        sample["text"] = texts.decode(sample["token"])
    if samples and samples[0]["text"] is None:
        notes.append("The run has no tokenizer file, so tokens are shown as numbers.")
    if not samples:
        notes.append(f"Batch {step} contains no tokens of this rollout.")
    return {"samples": samples, "token_note": " ".join(notes) or None}


def read_samples(rows: Path, train: Path, group_id: int, rollout: int) -> list[dict[str, Any]]:
    """Read the token sequences of one rollout without reading the rest of the batch.

    Raises:
        FileNotFoundError: the batch has no rows.
    """
    from safetensors import safe_open

    found: list[dict[str, Any]] = []
    with safe_open(rows, framework="numpy") as batch:
        lengths = batch.get_tensor("seq_lens").astype(np.int64)
        is_wanted = (batch.get_tensor("sample_group") == group_id) & (batch.get_tensor("sample_rollout") == rollout)
        ends, left = np.cumsum(lengths), MAX_TOKENS
        for sample in np.flatnonzero(is_wanted).tolist():
            begin = int(ends[sample] - lengths[sample])
            place = slice(begin, min(int(ends[sample]), begin + left))
            left -= place.stop - place.start
            columns = {"token": batch.get_slice("tokens")[place].tolist()}
            columns |= _columns(batch, _FROM_BATCH, place)
            columns["num_omitted"] = int(ends[sample]) - place.stop
            found.append(columns | {"_place": place})
    values: dict[int, dict[str, Any]] = {}
    with suppress(FileNotFoundError, OSError), safe_open(train, framework="numpy") as trained:
        for number, columns in enumerate(found):
            with suppress(Exception):  # other names or lengths, of another version
                part = _columns(trained, _FROM_TRAINER, columns["_place"])
                if all(len(column) == len(columns["token"]) for column in part.values()):
                    values[number] = part
    for number, columns in enumerate(found):
        del columns["_place"]
        columns.update(values.get(number, {}))
    return found


def _columns(file: Any, names: Mapping[str, str], place: slice) -> dict[str, list[Any]]:
    present = set(file.keys())
    return {new: _plain(file.get_slice(old)[place]) for old, new in names.items() if old in present}


def _plain(values: NDArray[Any]) -> list[Any]:
    if values.dtype.kind == "f":
        return [round(value, 5) if np.isfinite(value) else None for value in values.astype(np.float64).tolist()]
    return values.astype(np.int64).tolist()
