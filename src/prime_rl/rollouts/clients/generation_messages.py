"""Messages of the token stream between rollout workers and an inference server; both sides use this module.

A client opens the stream by an HTTP request of `PATH` with the header `Upgrade: prime-rl-generation-1`. After the
response 101 both sides send frames: the length (4 bytes, big-endian), then a msgpack array. One stream carries many
requests at a time.

    client -> server   ClientFrame   samples to start, and samples to end
    server -> client   ServerFrame   completions and errors, in the order in which they occur

Token ids are int32 and log-probabilities are float32, both little-endian.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import msgspec

PATH = "/inference/v1/stream"
PROTOCOL = "prime-rl-generation-1"
MAX_FRAME_BYTES = 64 * 2**20
"""A side that receives a longer frame closes the stream."""

_USUAL_FRAME_BYTES = 2**20
"""Messages of one turn of the event loop are sent in frames of about this size."""
_LENGTH_BYTES = 4

_T = TypeVar("_T")


class SampleRequest(msgspec.Struct, array_like=True, gc=False):
    """Samples of one prompt that differ only in their seeds.

    Attributes:
        ids: one per sample, unique among the samples in progress on the stream.
        seeds: one per sample; None: unseeded.
        model: name of the policy, or of an adapter.
        token_ids: the prompt.
        sampling: vLLM sampling parameters without `seed` and `logprobs`, a msgpack map.
        cache_salt: additional salt of the prefix cache.
    """

    ids: list[int]
    seeds: list[int | None]
    model: str
    token_ids: bytes
    sampling: msgspec.Raw
    cache_salt: str | None = None


class ClientFrame(msgspec.Struct, array_like=True):
    """Samples to start, then the ids of samples to end."""

    requests: list[SampleRequest] = []
    aborts: list[int] = []


class Completion(msgspec.Struct, array_like=True, gc=False):
    """One completed sample.

    Attributes:
        versions: (policy version, first token, end) of each span of tokens that one version sampled.
    """

    id: int
    token_ids: bytes
    logprobs: bytes
    versions: list[tuple[str, int, int]]
    finish_reason: str | None


class Refusal(msgspec.Struct, array_like=True, gc=False):
    """A sample that was refused or has failed, with the status that the HTTP route would return."""

    id: int
    status: int
    message: str


class ServerFrame(msgspec.Struct, array_like=True):
    """Ended samples. `closing` is the reason if the server closes the stream after this frame."""

    completions: list[Completion] = []
    refusals: list[Refusal] = []
    closing: str = ""


encode = msgspec.msgpack.Encoder().encode
decode_client_frame = msgspec.msgpack.Decoder(ClientFrame).decode
decode_server_frame = msgspec.msgpack.Decoder(ServerFrame).decode


def pack(frame: ClientFrame | ServerFrame) -> bytes:
    """Encode a frame with its length."""
    body = encode(frame)
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


def split(messages: Iterable[_T], num_bytes: Callable[[_T], int]) -> Iterator[list[_T]]:
    """Split messages into the contents of frames of usual size; a longer message gets its own frame."""
    batch, total = list[_T](), 0
    for message in messages:
        size = num_bytes(message)
        if batch and total + size > _USUAL_FRAME_BYTES:
            yield batch
            batch, total = [], 0
        batch.append(message)
        total += size
    if batch:
        yield batch


class FrameReader:
    """Splits received bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the bodies of the frames that `data` completes; raises ValueError if a frame is too long."""
        buffer, frames, start = self._buffer, list[bytes](), 0
        buffer += data
        while len(buffer) >= start + _LENGTH_BYTES:
            body = start + _LENGTH_BYTES
            length = int.from_bytes(buffer[start:body], "big")
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a frame has {length} bytes, more than {MAX_FRAME_BYTES}")
            if len(buffer) < body + length:
                break
            start = body + length
            frames.append(bytes(memoryview(buffer)[body:start]))
        del buffer[:start]
        return frames
