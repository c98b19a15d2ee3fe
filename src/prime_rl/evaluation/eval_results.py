"""Rows of evaluated examples, and the JSONL file that stores them and lets an evaluation resume."""

import fcntl
import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Self

import msgspec

from prime_rl.core.errors import RunError, translate_error, unwritable
from prime_rl.core.types import Conversation, Rollout
from prime_rl.storage.artifact import replace_file

ROLLOUTS = "rollouts.jsonl"
SETTINGS = "settings.json"
SUMMARY = "summary.json"

EvalFailureKind = Literal["environment", "overlong", "refused"]


class ExampleFailure(msgspec.Struct, frozen=True):
    """Why an example has no rollouts: the environment failed, a prompt did not fit, or the server refused a request."""

    kind: EvalFailureKind
    message: str


class RolloutRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """One rollout.

    Attributes:
        metrics: the environment's named scores.
        tokens: sampled tokens. A chat server reports the number itself.
        messages: the conversation in the form that chat templates read. Model output: untrusted.
        tools: definitions of the tools that the model was offered.
        min_version: oldest policy version that sampled a token, if the server reports versions.
        answer: the reference answer of the example, if it has one.
    """

    reward: float
    metrics: dict[str, float]
    is_truncated: bool
    tokens: int
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []
    min_version: int | None = None
    max_version: int | None = None
    answer: str | None = None

    @classmethod
    def of(cls, rollout: Rollout) -> "RolloutRow":
        """Make a row of a rollout. Its token ids are not kept."""
        sampled = [sample.versions[sample.versions >= 0] for sample in rollout.samples]
        versions = [int(end) for array in sampled if len(array) for end in (array.min(), array.max())]
        if isinstance(rollout, Conversation):
            versions += rollout.versions or ()
        return cls(
            reward=rollout.reward,
            metrics=rollout.metrics,
            is_truncated=rollout.is_truncated,
            tokens=rollout.sampled_tokens,
            messages=rollout.conversation,
            tools=list(rollout.tools),
            min_version=min(versions, default=None),
            max_version=max(versions, default=None),
            answer=rollout.answer,
        )


class ExampleRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """One example: either its rollouts, or why there are none; and its columns of `env.breakdown`."""

    example: int
    rollouts: list[RolloutRow] = []
    failure: ExampleFailure | None = None
    columns: dict[str, str] = {}


class ResultFile:
    """A file of example rows, one JSON line each. The last row of an example counts. Use as a context manager.

    `rows` holds them by example.
    """

    def __init__(self, path: Path, fresh: bool = False) -> None:
        """Open `path` for appending and read its rows; `fresh` empties it. Raises OSError.

        Raises RunError if another process has it open.
        """
        self.path = path
        self.rows: dict[int, ExampleRow] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise RunError(f"{path} is being written by another process") from None
        if fresh:
            self._file.truncate(0)
        self._read()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, row: ExampleRow) -> None:
        """Append the row of an example to the file, so that an interrupted evaluation keeps it."""
        self._file.write(msgspec.json.encode(row) + b"\n")
        self._file.flush()
        self.rows[row.example] = row

    def _read(self) -> None:
        self._file.seek(0)
        complete, decode = 0, msgspec.json.Decoder(ExampleRow).decode
        with suppress(msgspec.DecodeError):  # a crash of the machine damaged a line: drop it and what follows
            for line in self._file:
                if not line.endswith(b"\n"):
                    break  # a kill cut the line off
                row = decode(line)
                self.rows[row.example] = row
                complete += len(line)
        self._file.truncate(complete)


def open_results(parent: Path, settings: Mapping[str, Any]) -> ResultFile:
    """Open the results of the evaluation with these settings, `parent/<digest>/rollouts.jsonl`.

    The digest covers everything that the rollouts depend on, so results of different configurations never mix.
    Raises ConfigError if the folder cannot be written, RunError if another process is writing there.
    """
    folder = parent / digest(settings)
    with translate_error(OSError, unwritable(f"output_dir: {folder} cannot be written")):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / SETTINGS, settings)
        return ResultFile(folder / ROLLOUTS)


def digest(settings: Mapping[str, Any]) -> str:
    """Return twelve hexadecimal digits that identify the settings of an evaluation."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.blake2s(text.encode(), digest_size=6).hexdigest()


def first_error(rows: Sequence[ExampleRow]) -> str | None:
    """Return why the first failed example failed; None if none did."""
    return next((row.failure.message for row in rows if row.failure is not None), None)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(value, indent=2, default=str) + "\n")
