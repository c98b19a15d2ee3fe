"""What main and an environment worker say to each other: msgpack frames over a Unix socket, arrays as raw bytes.

Main sends `Load` once, then any number of `Play` and `Cancel`; the worker answers `Load` with `Ready` or `Unloadable`,
and each `Play` that is not cancelled with exactly one `Played` or `Failed`. No token is ever a Python object of its own
on the way.
"""

import asyncio
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from prime_rl.orchestrator.workers.conversation import Conversation
from prime_rl.types import Rollout, Sample

_LENGTH = struct.Struct("<I")

FailureKind = Literal["environment", "too_long", "engine_lost", "engine_error", "defect"]


class Load(msgspec.Struct, tag="load", frozen=True):
    """Load one environment and serve it.

    Attributes:
        env: its `EnvConfig` as JSON.
        split: `train` or `eval`.
        tokenizer: directory or Hugging Face id.
        trust_remote_code: run code that the tokenizer brings along.
        rendering: the `RenderingConfig` as JSON.
        trajectory_strategy: `interleaved` or `branching`.
        api: `generate` for our own servers, `chat` for any that speak OpenAI's protocol.
        keep_messages: answer with conversations.
        model: name that the inference servers serve.
        api_key: their key.
        request_timeout_s: longest time for one request to them.
        timeout_s: longest time for one group, from its start to its scores; None sets no limit.
        check_seq_len: fail if one of the first prompts has so many tokens or more; None checks none.
        vocabulary: token ids that the servers sample lie below it; None is not known.
    """

    env: bytes
    split: Literal["train", "eval"]
    tokenizer: str
    trust_remote_code: bool
    rendering: bytes
    trajectory_strategy: Literal["interleaved", "branching"]
    api: Literal["generate", "chat"]
    keep_messages: bool
    model: str
    api_key: str | None
    request_timeout_s: float
    timeout_s: float | None
    check_seq_len: int | None
    vocabulary: int | None = None

    def __repr__(self) -> str:
        """Without the key: whatever shows an order must not tell it."""
        return f"Load(env={self.env!r}, split={self.split!r}, model={self.model!r})"


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """The environment is loaded.

    Attributes:
        examples: how many the split has.
        adapter: module that plays it, for the next workers to have imported beforehand.
    """

    examples: int
    adapter: str


class Unloadable(msgspec.Struct, tag="unloadable", frozen=True):
    """The environment cannot be loaded, by fault of the input; the worker ends."""

    message: str


class Play(msgspec.Struct, tag="play", frozen=True):
    """Play one group.

    Attributes:
        request: number of this request, 1 or more, unique among those of one worker.
        example: index in the split.
        count: rollouts G.
        url: root of the server that samples all of them.
        sampling: vLLM sampling parameters.
        seq_len: longest sample, tokens.
        seed: what sampling is seeded from, if it is.
    """

    request: int
    example: int
    count: int
    url: str
    sampling: dict[str, Any]
    seq_len: int
    seed: list[int] | None


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    """Stop playing a group; it is not answered any more."""

    request: int


class _Sample(msgspec.Struct, frozen=True, array_like=True):
    tokens: bytes
    loss_mask: bytes
    logprobs: bytes
    versions: bytes


class _Messages(msgspec.Struct, frozen=True, array_like=True):
    """What makes a rollout a conversation."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    completion_tokens: int
    versions: tuple[int, int] | None = None


class _Rollout(msgspec.Struct, frozen=True, array_like=True):
    samples: list[_Sample]
    reward: float
    metrics: dict[str, float]
    is_truncated: bool
    text: list[tuple[str, str]]
    kept: _Messages | None = None


class Played(msgspec.Struct, tag="played", frozen=True):
    """The rollouts of a finished group."""

    request: int
    rollouts: list[_Rollout]

    @classmethod
    def pack(cls, request: int, rollouts: Sequence[Rollout]) -> "Played":
        """Turn arrays into bytes."""
        return cls(request, [_pack(rollout) for rollout in rollouts])

    def unpack(self) -> list[Rollout]:
        """Turn bytes into arrays, read-only."""
        return [_unpack(rollout) for rollout in self.rollouts]


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """Why a group has no rollouts; `status` and `late` are those of an `EngineError`."""

    request: int
    kind: FailureKind
    message: str
    status: int | None = None
    late: bool = False


Order = Load | Play | Cancel
Report = Ready | Unloadable | Played | Failed

decode_order: Callable[[bytes], Order] = msgspec.msgpack.Decoder(Order).decode
decode_report: Callable[[bytes], Report] = msgspec.msgpack.Decoder(Report).decode
_encode_into = msgspec.msgpack.Encoder().encode_into


def frame(message: Order | Report) -> bytearray:
    """Encode a message with its length in front."""
    buffer = bytearray(_LENGTH.size)
    _encode_into(message, buffer, _LENGTH.size)
    _LENGTH.pack_into(buffer, 0, len(buffer) - _LENGTH.size)
    return buffer


def receive(connection: socket.socket) -> Order | None:
    """Read one order from a blocking socket; None if the other side is gone."""
    head = connection.recv(_LENGTH.size, socket.MSG_WAITALL)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    body = connection.recv(length, socket.MSG_WAITALL)
    return decode_order(body) if len(body) == length else None


class Frames(asyncio.Protocol):
    """Cuts a stream into frames."""

    def __init__(self, received: Callable[[bytes], None], lost: Callable[[], None]) -> None:
        """Call `received` with the body of each frame, and `lost` once when the other side is gone."""
        self._received = received
        self._lost = lost
        self._buffer = bytearray()

    def data_received(self, data: bytes) -> None:
        """Take what has arrived."""
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
        """Tell the owner."""
        self._lost()


def _pack(rollout: Rollout) -> _Rollout:
    samples = [
        _Sample(
            sample.tokens.astype(np.int32, copy=False).tobytes(),
            sample.loss_mask.astype(np.bool_, copy=False).tobytes(),
            sample.logprobs.astype(np.float32, copy=False).tobytes(),
            sample.versions.astype(np.int32, copy=False).tobytes(),
        )
        for sample in rollout.samples
    ]
    kept = None
    if isinstance(rollout, Conversation):
        kept = _Messages(list(rollout.messages), list(rollout.tools), rollout.completion_tokens, rollout.versions)
    return _Rollout(samples, rollout.reward, rollout.metrics, rollout.is_truncated, list(rollout.text), kept)


def _unpack(rollout: _Rollout) -> Rollout:
    samples = tuple(
        Sample(
            tokens=np.frombuffer(sample.tokens, np.int32),
            loss_mask=np.frombuffer(sample.loss_mask, np.bool_),
            logprobs=np.frombuffer(sample.logprobs, np.float32),
            versions=np.frombuffer(sample.versions, np.int32),
        )
        for sample in rollout.samples
    )
    fields = (samples, rollout.reward, rollout.metrics, rollout.is_truncated, tuple(rollout.text))
    if (kept := rollout.kept) is None:
        return Rollout(*fields)
    return Conversation(*fields, tuple(kept.messages), tuple(kept.tools), kept.completion_tokens, kept.versions)
