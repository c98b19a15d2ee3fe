"""Messages of the token stream between rollout workers and an inference server; both sides use this module.

A client opens the stream by an HTTP request of `PATH` with the header `Upgrade: prime-rl-generation-1`. After the
response 101 both sides send frames (`core.framing`) with a msgpack array. One stream carries many
requests at a time.

    client -> server   ClientFrame   samples to start, and samples to end
    server -> client   ServerFrame   completions and errors, in the order in which they occur

Token ids are int32 and log-probabilities are float32, both little-endian. A server that records routes adds them.
"""

import asyncio
import socket
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, TypeVar

import msgspec

from prime_rl.core.framing import pack_frame
from prime_rl.core.types import Routes

PATH = "/inference/v1/stream"
PROTOCOL = "prime-rl-generation-1"
MAX_FRAME_BYTES = 64 * 2**20
"""A server that receives a longer frame closes the stream."""
MAX_ANSWER_BYTES = 2**30
"""A client closes the stream at a longer frame: the routes of a long sample in a large mixture have 100 MB."""
MAX_SAMPLES = 2**14
"""Samples of a frame, as of one HTTP request (VLLM_MAX_N_SEQUENCES)."""
MAX_SAMPLING_BYTES = 2**20
"""A request with longer sampling parameters is refused."""

_USUAL_FRAME_BYTES = 2**20
"""Messages of one turn of the event loop are sent in frames of about this size."""
ID_BYTES = _USUAL_FRAME_BYTES // MAX_SAMPLES
"""Counted for an id, so that a frame of usual size has not more than MAX_SAMPLES of them."""
_LOST_SECONDS = 60
"""After this time a connection is closed if the other machine is lost, or if the other side does not read."""

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
        routes_start: number of tokens of the prompt whose routes are not needed.
    """

    ids: Annotated[list[int], msgspec.Meta(min_length=1, max_length=MAX_SAMPLES)]
    seeds: Annotated[list[int | None], msgspec.Meta(max_length=MAX_SAMPLES)]
    model: Annotated[str, msgspec.Meta(max_length=4096)]
    token_ids: bytes
    sampling: msgspec.Raw
    cache_salt: Annotated[str, msgspec.Meta(max_length=4096)] | None = None
    routes_start: int = 0


class ClientFrame(msgspec.Struct, array_like=True):
    """Samples to start, then the ids of samples to end."""

    requests: list[SampleRequest] = []
    aborts: list[int] = []


class _UnreadClientFrame(msgspec.Struct, array_like=True):
    requests: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MAX_SAMPLES)] = []
    aborts: Annotated[list[int], msgspec.Meta(max_length=MAX_SAMPLES)] = []


class Completion(msgspec.Struct, array_like=True, gc=False):
    """One completed sample.

    Attributes:
        versions: (policy version, first token, end) of each span of tokens that one version sampled.
        routes: of the prompt's tokens from `routes_start` on, and of all sampled tokens except the last.
    """

    id: int
    token_ids: bytes
    logprobs: bytes
    versions: list[tuple[str, int, int]]
    finish_reason: str | None
    routes: Routes | None = None


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
_decode_unread = msgspec.msgpack.Decoder(_UnreadClientFrame).decode
_decode_request = msgspec.msgpack.Decoder(SampleRequest).decode
decode_server_frame = msgspec.msgpack.Decoder(ServerFrame).decode


def decode_client_frame(body: bytes) -> ClientFrame:
    """Decode a frame of a client. Raises ValueError, or RecursionError for one that is nested too deep.

    The requests are decoded one by one, so that no more samples are decoded than a frame may have.
    """
    unread = _decode_unread(body)
    frame, num_samples = ClientFrame([], unread.aborts), 0
    for raw in unread.requests:
        request = _decode_request(raw)
        num_samples += len(request.ids)
        if num_samples > MAX_SAMPLES:
            raise ValueError(f"a frame has more than {MAX_SAMPLES} samples")
        frame.requests.append(request)
    return frame


def pack(frame: ClientFrame | ServerFrame) -> bytes:
    """Encode a frame with its length."""
    return pack_frame(encode(frame))


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


def detect_lost_peer(transport: asyncio.BaseTransport) -> None:
    """Close a connection about a minute after the other machine is lost, with or without bytes in transit."""
    connection = transport.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    seconds = {"TCP_KEEPIDLE": _LOST_SECONDS // 2, "TCP_KEEPINTVL": _LOST_SECONDS // 6, "TCP_KEEPCNT": 3}
    # Without the last one, sent bytes that are not acknowledged keep the connection open for a quarter of an hour.
    for name, value in {**seconds, "TCP_USER_TIMEOUT": _LOST_SECONDS * 1000}.items():
        if (option := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
