"""One rollout for the page: its group, its conversation, and its tokens joined with the trainer's values."""

import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from prime_rl.core.json_lines import decode_object
from prime_rl.core.os_errors import wrap_os_errors
from prime_rl.storage.batch import ROWS_FILE, SHOWN_FILE, TRAIN_FILE
from prime_rl.storage.paths import RunPaths, steps_in
from prime_rl.supervisor.doctor.collect import read_run_config
from prime_rl_page.run_data.sample_index import SampleIndex

MAX_MESSAGE_CHARACTERS = 200_000
MAX_TOKENS = 20_000
"""Tokens of a rollout that the page shows at most."""
_MAX_HISTORY = 7
_MAX_REPLY_CHARACTERS = 20_000
_MAX_COMPARED = 1_000_000  # pairs of words
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
        config = read_run_config(self._paths)
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
    answer = row.get("answer")
    return {
        **index.describe(entry),
        **{key: value if isinstance(value := row.get(key), dict) else {} for key in ("metrics", "weights")},
        "answer": None if answer is None else str(answer)[:MAX_MESSAGE_CHARACTERS],
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


def prompt_history(index: SampleIndex, step: int, group_id: int, rollout: int) -> list[dict[str, Any]]:
    """The replies to the same prompt in at most 8 steps, each with its changes from the one before.

    The reply of a step is that with the median reward, and in `step` that of `rollout`. [] without an example id.
    """
    own = next((one for one in index.find(step, group_id) if int(one["rollout"]) == rollout), None)
    if own is None or own["example"] < 0:
        return []
    entries = index.entries()
    entries = entries[(entries["example"] == own["example"]) & (entries["env"] == own["env"])]
    steps = np.unique(entries["step"])
    steps = steps[np.unique(np.linspace(0, len(steps) - 1, min(_MAX_HISTORY, len(steps))).round().astype(int))]
    found, last = list[dict[str, Any]](), None
    for one in np.unique([*steps, step]).tolist():
        same = entries[entries["step"] == one]
        median = same[np.argsort(same["reward"], kind="stable")[len(same) // 2]]
        entry = own if one == step else median
        text = _reply(index.read(entry) or {})
        changes = [("same", text)] if last is None else list(text_changes(last, text))
        mean = float(np.nan_to_num(same["reward"]).mean())
        found.append({**index.describe(entry), "mean_reward": mean, "num_rollouts": len(same), "changes": changes})
        last = text
    return found


def text_changes(old: str, new: str) -> Iterator[tuple[str, str]]:
    """The parts of both texts in order, by words, each `same`, `removed` or `added`."""
    before, after = (re.findall(r"\S+\s*|\s+", text) for text in (old, new))
    if len(before) * len(after) > _MAX_COMPARED:  # a hostile reply would take minutes
        before, after = [old], [new]
    for kind, i, j, k, m in SequenceMatcher(None, before, after).get_opcodes():
        if kind == "equal":
            yield "same", "".join(after[k:m])
            continue
        parts = ("removed", "".join(before[i:j])), ("added", "".join(after[k:m]))
        yield from (part for part in parts if part[1])


def _reply(row: dict[str, Any]) -> str:
    replies = [message["content"] for message in _messages(row.get("messages")) if message["role"] == "assistant"]
    return "\n\n".join(replies)[:_MAX_REPLY_CHARACTERS]


class RolloutNote(BaseModel):
    """What a reader notes about a rollout; no flag and no text remove the note."""

    evaluation: str | None = None
    step: int
    group: int
    rollout: int
    is_flagged: bool = False
    text: str = Field("", max_length=4000)


class RolloutNotes:
    """Notes in samples/notes.jsonl, one line per rollout with a copy of it, which outlives the sample file.

    {"time": unix s, "evaluation", "step", "group", "rollout", "is_flagged", "text", "sample": {...}}
    """

    def __init__(self, paths: RunPaths) -> None:
        self.path = paths.samples_dir / "notes.jsonl"
        self._read: tuple[object, dict[tuple[Any, ...], dict[str, Any]]] = None, {}

    def read(self) -> dict[tuple[Any, ...], dict[str, Any]]:
        """The notes, by evaluation (None: training), step, group and rollout."""
        try:
            status = self.path.stat()
        except OSError:
            return {}
        if (status.st_mtime_ns, status.st_size) != self._read[0]:
            lines = self.path.read_bytes().split(b"\n")  # written by this class: a line is as long as its rollout
            rows = filter(None, (decode_object(line, math.inf) for line in lines))
            keys = ("evaluation", "step", "group", "rollout")
            by_key = {tuple(map(row.get, keys)): row for row in rows}
            self._read = (status.st_mtime_ns, status.st_size), by_key
        return self._read[1]

    def write(self, note: RolloutNote, index: SampleIndex) -> bool:
        """Add, replace or remove a note; False if there is no such rollout. Raises SystemResourceError."""
        key, notes = (note.evaluation, note.step, note.group, note.rollout), dict(self.read())
        entry = next((one for one in index.find(note.step, note.group) if int(one["rollout"]) == note.rollout), None)
        sample = notes[key].get("sample") if key in notes else None if entry is None else index.read(entry)
        if sample is None:
            return False
        notes.pop(key, None)
        if note.is_flagged or note.text.strip():
            notes[key] = {"time": time.time(), **note.model_dump(), "sample": sample}
        with wrap_os_errors("write a note", self.path):
            self.path.parent.mkdir(exist_ok=True)
            temporary = self.path.with_name(".tmp-notes.jsonl")
            temporary.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in notes.values()))
            temporary.replace(self.path)
        return True


def token_detail(paths: RunPaths, texts: TokenTexts, step: int, group_id: int, rollout: int) -> dict[str, Any]:
    """The samples of a rollout as columns of values per token; `token_note` says which are missing, and why."""
    folder = paths.rollouts(step)
    is_whole = (folder / ROWS_FILE).exists()
    try:
        rows, train = (folder / ROWS_FILE, folder / TRAIN_FILE) if is_whole else (folder / SHOWN_FILE, None)
        samples = read_samples(rows, train, group_id, rollout)
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
        which = "contains no" if is_whole else "is trained, and what is kept of it has no"
        notes.append(f"Batch {step} {which} tokens of this rollout.")
    return {"samples": samples, "token_note": " ".join(notes) or None}


def read_samples(rows: Path, train: Path | None, group_id: int, rollout: int) -> list[dict[str, Any]]:
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
            columns |= _columns(batch, {f"train.{old}": new for old, new in _FROM_TRAINER.items()}, place)
            columns["num_omitted"] = int(ends[sample]) - place.stop
            found.append(columns | {"_place": place})
    values: dict[int, dict[str, Any]] = {}
    if train is not None:  # otherwise the file of the rows has them
        with suppress(OSError), safe_open(train, framework="numpy") as trained:
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
