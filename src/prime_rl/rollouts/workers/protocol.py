"""The protocol between the orchestrator and an environment worker: msgpack frames over a Unix socket.

The orchestrator sends `LoadEnvironment` once, then any number of `RunGroup` and `CancelGroup`. The worker answers
`LoadEnvironment` with `EnvironmentReady` or `EnvironmentUnloadable`, and each `RunGroup` with exactly one
`GroupFinished` or `GroupFailed`. It may send `EnvironmentWarning` at any time. Arrays travel as raw bytes.
"""

import asyncio
import functools
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

import msgspec
import numpy as np
from pydantic import BaseModel

from prime_rl.configs.rollouts.eval_common import Api
from prime_rl.configs.rollouts.options import RenderingConfig
from prime_rl.configs.rollouts.sandbox import SandboxConfig
from prime_rl.configs.shared.blocks import EnvConfig
from prime_rl.core.terminal_escape import replace_surrogates
from prime_rl.core.types import Conversation, EvalSplit, Rollout, Split
from prime_rl.rollouts.clients.inference_client import InferenceError, InferenceServerLost
from prime_rl.rollouts.group_failures import EnvironmentFailed, SampleTooLong, UnsupportedEnvironment

_LENGTH = struct.Struct("<I")

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
        request_timeout_s: timeout of a request, seconds.
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
    request_timeout_s: float = 1200
    api: Api = "generate"
    keep_messages: bool = False
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    vocabulary: int | None = None


class LoadEnvironment(msgspec.Struct, tag="load", frozen=True):
    """Load one split of an environment; fail if one of the first prompts has `check_seq_len` tokens or more."""

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
    """

    examples: int
    backend: str
    eval_split: EvalSplit
    columns: list[dict[str, str]] = []


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


DiscardCounts = dict[str, tuple[int, int]]
"""Discarded rollouts and sampled tokens by reason (`token_accounting.REASONS`)."""


class GroupFinished(msgspec.Struct, tag="finished", frozen=True):
    """The rollouts of a finished group, either kind; `sampled` tokens in total, including the discarded ones.

    `seconds` are those of its rollouts by activity (`token_accounting.ACTIVITIES`).
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
        """Return the exception of the worker."""
        if self.kind == "engine_error":
            return InferenceError(self.message, self.status, timed_out=self.timed_out)
        if self.kind in FAILURES:
            return FAILURES[self.kind](self.message)
        return RuntimeError(f"internal error in an environment worker: {self.message}")


class EnvironmentWarning(msgspec.Struct, tag="warned", frozen=True):
    """A warning about the environment for the user."""

    message: str


class RolloutStuck(msgspec.Struct, tag="stuck", frozen=True):
    """A cancelled rollout of the group does not end: the worker must be killed."""

    request: int


WorkerCommand = LoadEnvironment | RunGroup | CancelGroup
WorkerReport = (
    EnvironmentReady | EnvironmentUnloadable | GroupFinished | GroupFailed | EnvironmentWarning | RolloutStuck
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


def frame(message: WorkerCommand | WorkerReport) -> bytearray:
    """Encode a message with its length in front."""
    buffer = bytearray(_LENGTH.size)
    try:
        _encode_into(message, buffer, _LENGTH.size)
    except UnicodeEncodeError:  # half of a surrogate pair, from broken bytes or from JSON in a completion
        plain = msgspec.to_builtins(message, builtin_types=(bytes,), enc_hook=_encode)
        _encode_into(replace_surrogates(plain), buffer, _LENGTH.size)
    _LENGTH.pack_into(buffer, 0, len(buffer) - _LENGTH.size)
    return buffer


def receive(connection: socket.socket) -> WorkerCommand | None:
    """Read one command from a blocking socket; None if the other side is closed."""
    head = connection.recv(_LENGTH.size, socket.MSG_WAITALL)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    body = connection.recv(length, socket.MSG_WAITALL)
    return decode_command(body) if len(body) == length else None


class Frames(asyncio.Protocol):
    """Splits a stream into frames."""

    def __init__(self, received: Callable[[bytes], None], lost: Callable[[], None]) -> None:
        """Call `received` with the body of each frame, and `lost` when the connection closes."""
        self._received = received
        self._lost = lost
        self._buffer = bytearray()

    def data_received(self, data: bytes) -> None:
        """Called by asyncio with received data."""
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            end = start + _LENGTH.size + length
            if len(buffer) < end:
                break
            self._received(bytes(memoryview(buffer)[start + _LENGTH.size : end]))
            start = end
        del buffer[:start]

    def connection_lost(self, error: Exception | None) -> None:
        """Called by asyncio when the connection closes."""
        self._lost()
