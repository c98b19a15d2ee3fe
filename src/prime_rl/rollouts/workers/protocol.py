"""The protocol between the orchestrator and an environment worker: msgpack frames over a Unix socket.

The orchestrator sends `LoadEnvironment` once, then any number of `RunGroup` and `CancelGroup`. The worker answers
`LoadEnvironment` with `EnvironmentReady` or `EnvironmentUnloadable`, and each `RunGroup` with exactly one
`GroupFinished` or `GroupFailed`, perhaps after `ScoringStarted`. It may send `EnvironmentWarning` at any time. Arrays
travel as raw bytes. The reports name what each group has cost: `DiscardedWork` and `RolloutSeconds` add it up.

Beside the socket, both share a page of memory (`CrashRecord`), to find the cause of the death of a worker.
"""

import asyncio
import functools
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

import msgspec
import numpy as np
from pydantic import BaseModel

from prime_rl.configs.client import Api
from prime_rl.configs.environment import EnvConfig
from prime_rl.configs.rendering import RenderingConfig
from prime_rl.configs.sandbox import SandboxConfig
from prime_rl.core.framing import FrameReader, pack_frame
from prime_rl.core.terminal_escape import replace_surrogates
from prime_rl.core.types import Conversation, EvalSplit, Rollout, Split
from prime_rl.rollouts.clients.inference_client import InferenceError, InferenceServerLost
from prime_rl.rollouts.group_attempts import EnvironmentFailed, SampleTooLong, UnsupportedEnvironment

_MAX_FRAME_BYTES = 2**30
"""Limit of a message: code of the environment shares the process of the worker."""

FailureKind = Literal["environment", "too_long", "engine_lost", "engine_error", "unsupported", "defect", "cancelled"]

FAILURES: dict[FailureKind, type[Exception]] = {
    "environment": EnvironmentFailed,
    "too_long": SampleTooLong,
    "unsupported": UnsupportedEnvironment,
    "engine_lost": InferenceServerLost,
    "engine_error": InferenceError,
}
"""Exceptions that the orchestrator raises for a failed group as the worker did."""


@dataclass(frozen=True, slots=True)
class ModelAccess:
    """How workers access the model; the same for all environments of a run.

    Attributes:
        model: name of the served model.
        tokenizer: directory or Hugging Face id.
        trust_remote_code: run code that the tokenizer brings along.
        rendering: conversion between messages and tokens.
        trajectory_strategy: how the turns of a rollout become samples.
        api_key: bearer token for the servers, if any.
        request_timeout_seconds: timeout of a request, seconds.
        api: `generate` for our own servers; `chat` for servers with OpenAI's chat completions, which render the prompts
            themselves, so rollouts have no samples.
        keep_messages: make every rollout a `Conversation`.
        sandbox: how the environment runs code of the model.
        vocabulary: exclusive upper bound of sampled token ids; None: unknown.
    """

    model: str
    tokenizer: str
    trust_remote_code: bool = False
    rendering: RenderingConfig = field(default_factory=RenderingConfig)
    trajectory_strategy: Literal["interleaved", "branching"] = "interleaved"
    api_key: str | None = field(default=None, repr=False)
    request_timeout_seconds: float = 1200
    api: Api = "generate"
    keep_messages: bool = False
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    vocabulary: int | None = None


class LoadEnvironment(msgspec.Struct, tag="load", frozen=True):
    """Load one split of an environment; fail if one of the first prompts has `check_seq_len` tokens or more.

    With `env.long_prompts = "skip"` report those that have; fail if all have.
    """

    env: EnvConfig
    split: Split
    access: ModelAccess
    check_seq_len: int | None = None


class EnvironmentReady(msgspec.Struct, tag="ready", frozen=True):
    """The environment is loaded.

    Attributes:
        examples: their number.
        backend: the module of its class, to preload for further workers.
        eval_split: source of its evaluation examples.
        columns: of each example, those of `env.breakdown`; empty in training.
        content_hash: `EnvironmentBackend.content_hash`.
        skipped: examples whose prompt is too long, in order.
    """

    examples: int
    backend: str
    eval_split: EvalSplit
    columns: list[dict[str, str]] = []
    content_hash: str = ""
    skipped: list[int] = []


class EnvironmentUnloadable(msgspec.Struct, tag="unloadable", frozen=True):
    """The environment cannot be loaded because of the configuration; the worker exits."""

    message: str


class RunGroup(msgspec.Struct, tag="run_group", frozen=True):
    """Run one group; see `EnvironmentPool.run_group`. `request` is at least 1 and unique in one worker."""

    request: int
    example: int
    count: int
    url: str
    sampling: dict[str, Any]
    seq_len: int
    seed: list[int] | None


class CancelGroup(msgspec.Struct, tag="cancel", frozen=True):
    """Cancel a group. The worker reports what the group has cost, and no rollouts."""

    request: int


REASONS = ("retried", "failed", "replayed", "unused", "cancelled")
"""Why rollouts are discarded that are neither trained on nor dropped by a filter.

retried: an infrastructure failure; the rollout was retried in the same group.
failed: the rollout failed, or another one did and the whole group was dropped.
replayed: the worker or server was lost; the group was run again.
unused: model calls that are no turn of a rollout. They count as no rollout.
cancelled: the group was cancelled.
"""


@dataclass(slots=True)
class DiscardedWork:
    """Discarded rollouts and sampled tokens, by reason (`REASONS`)."""

    rollouts: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)

    def add(self, reason: str, rollouts: int, tokens: int) -> None:
        """Add to the counts of a reason."""
        self.rollouts[reason] += rollouts
        self.tokens[reason] += tokens

    @classmethod
    def total(cls, parts: Iterable["DiscardedWork"]) -> "DiscardedWork":
        """Return the sum."""
        total = cls()
        for part in parts:
            total.rollouts.update(part.rollouts)
            total.tokens.update(part.tokens)
        return total

    def metrics(self) -> dict[str, float]:
        """Return `rollouts/<reason>` and `tokens/lost/<reason>` for every reason."""
        rollouts = {f"rollouts/{reason}": float(self.rollouts[reason]) for reason in REASONS if reason != "unused"}
        return rollouts | {f"tokens/lost/{reason}": float(self.tokens[reason]) for reason in REASONS}


ACTIVITIES = ("environment", "engine", "scoring")
"""What a rollout takes time for.

environment: its turns, without the wait for the engine.
engine: waiting for completions.
scoring: the reward functions, if the environment scores groups after their rollouts; else part of `environment`.
"""


@dataclass(slots=True)
class RolloutSeconds:
    """Seconds by activity (`ACTIVITIES`) of the rollouts that finished."""

    rollouts: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(ACTIVITIES, 0.0))

    def add(self, rollouts: int, seconds: Mapping[str, float]) -> None:
        """Add a group."""
        self.rollouts += rollouts
        for activity, value in seconds.items():
            self.seconds[activity] += value

    def take_means(self) -> dict[str, float]:
        """Return the seconds per rollout by activity, and start again; {} without rollouts."""
        means = {activity: value / self.rollouts for activity, value in self.seconds.items()} if self.rollouts else {}
        self.rollouts, self.seconds = 0, dict.fromkeys(ACTIVITIES, 0.0)
        return means


DiscardCounts = dict[str, tuple[int, int]]
"""Discarded rollouts and sampled tokens by reason (`REASONS`)."""


class GroupFinished(msgspec.Struct, tag="finished", frozen=True):
    """The rollouts of a finished group, either kind; `sampled` tokens in total, including the discarded ones.

    `seconds` are those of its rollouts by activity (`ACTIVITIES`).
    """

    request: int
    rollouts: list[Rollout]
    conversations: list[Conversation]
    sampled: int = 0
    discarded: DiscardCounts = {}
    seconds: dict[str, float] = {}


class GroupFailed(msgspec.Struct, tag="failed", frozen=True):
    """A group without rollouts; `status` and `timed_out` are those of an `InferenceError`."""

    request: int
    kind: FailureKind
    message: str
    status: int | None = None
    timed_out: bool = False
    sampled: int = 0
    discarded: DiscardCounts = {}

    def exception(self) -> Exception:
        """Return the exception that this report of a worker stands for."""
        if self.kind == "engine_error":
            return InferenceError(self.message, self.status, timed_out=self.timed_out)
        if self.kind in FAILURES:
            return FAILURES[self.kind](self.message)
        return RuntimeError(f"internal error in an environment worker: {self.message}")


class EnvironmentWarning(msgspec.Struct, tag="warned", frozen=True):
    """A warning about the environment for the user."""

    message: str


class ScoringStarted(msgspec.Struct, tag="scoring", frozen=True):
    """All rollouts of the group have ended; its reward functions run."""

    request: int


class RolloutStuck(msgspec.Struct, tag="stuck", frozen=True):
    """A cancelled rollout of the group does not end: the worker must be killed."""

    request: int


WorkerCommand = LoadEnvironment | RunGroup | CancelGroup
WorkerReport = (
    EnvironmentReady
    | EnvironmentUnloadable
    | ScoringStarted
    | GroupFinished
    | GroupFailed
    | EnvironmentWarning
    | RolloutStuck
)


def _encode(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump_json()
    if isinstance(value, np.ndarray):
        return value.tobytes()
    raise TypeError(f"a message to or from a worker cannot contain a {type(value).__name__}")


def _decode(expected: type, value: Any) -> Any:
    if expected in (EnvConfig, RenderingConfig, SandboxConfig):
        return expected.model_validate_json(value)
    return np.frombuffer(value, _dtype(expected))  # read-only


@functools.cache
def _dtype(array: Any) -> type:
    """Return the element type of an array type."""
    (dtype,) = get_args(get_args(array)[1])
    return cast(type, dtype)


decode_command: Callable[[bytes], WorkerCommand] = msgspec.msgpack.Decoder(WorkerCommand, dec_hook=_decode).decode
decode_report: Callable[[bytes], WorkerReport] = msgspec.msgpack.Decoder(WorkerReport, dec_hook=_decode).decode
_encode_into = msgspec.msgpack.Encoder(enc_hook=_encode).encode_into


def frame(message: WorkerCommand | WorkerReport) -> bytes:
    """Encode a message as a frame."""
    body = bytearray()
    try:
        _encode_into(message, body)
    # Half of a surrogate pair, from broken bytes or from JSON in a completion, or an integer of more than 64 bits.
    except (UnicodeEncodeError, OverflowError):
        plain = msgspec.to_builtins(message, builtin_types=(bytes,), enc_hook=_encode)
        _encode_into(_large_integers_as_text(replace_surrogates(plain)), body)
    return pack_frame(body)


def _large_integers_as_text(value: Any) -> Any:
    match value:
        case int() if not -(2**63) <= value < 2**64:
            return str(value)
        case dict():
            return {key: _large_integers_as_text(inner) for key, inner in value.items()}
        case list():
            return [_large_integers_as_text(inner) for inner in value]
        case _:
            return value


def receive(connection: socket.socket) -> WorkerCommand | None:
    """Read one command from a blocking socket; None if the other side is closed."""
    reader = FrameReader(_MAX_FRAME_BYTES)
    while part := connection.recv(reader.num_missing):
        for body in reader.feed(part):
            return decode_command(body)
    return None


class Frames(asyncio.Protocol):
    """Splits a stream into frames. One that is too long closes the connection, as a malformed message does."""

    def __init__(self, received: Callable[[bytes], None], lost: Callable[[], None]) -> None:
        """Call `received` with the body of each frame, and `lost` when the connection closes."""
        self._received = received
        self._lost = lost
        self._reader = FrameReader(_MAX_FRAME_BYTES)

    def data_received(self, data: bytes) -> None:
        """Called by asyncio with received data."""
        for body in self._reader.feed(data):
            self._received(body)

    def connection_lost(self, error: Exception | None) -> None:
        """Called by asyncio when the connection closes."""
        self._lost()
