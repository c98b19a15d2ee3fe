"""JSON messages between two processes over TCP; every wait has a deadline and names the peer (I7).

A message is a JSON object in a frame (`core.framing`).
"""

import selectors
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from prime_rl.core.errors import RunError, translate_error
from prime_rl.core.framing import FrameReader, pack_frame
from prime_rl.core.ports import join_host_port
from prime_rl.storage.tensor_hashes import ITEM_BYTES
from prime_rl.storage.wait_for import DeadlineError

Message = dict[str, Any]
_MAX_BYTES = 2**28
"""Default limit of the size of a message."""
_RECEIVE_BYTES = 2**20
_RECHECK_SECONDS = 0.25
_GRACE_SECONDS = 1.0
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Keep-alive: a machine that does not answer counts as dead after about 25 s."""


@dataclass(frozen=True, slots=True)
class TransferDescriptor:
    """The entry `transfer` of the manifest of a version that was published without weight files.

    `weights/step_n` then contains only manifest, configuration and tokenizer, and the tensors stay in the trainer's
    memory. The manifest also contains their hashes (I5); docs/design/weight_sync.md.

    Attributes:
        type: transport of the tensors.
        host: host of the trainer.
        port: port on which the trainer listens.
        session: secret identifier of the trainer process.
        timeout_s: longest wait for the trainer.
        tensors: tensor name -> safetensors dtype and shape.
    """

    type: Literal["nccl", "ipc"]
    host: str
    port: int
    session: str = field(repr=False)
    timeout_s: float
    tensors: Mapping[str, tuple[str, tuple[int, ...]]] = field(repr=False)

    @classmethod
    def parse(cls, entry: Mapping[str, Any]) -> "TransferDescriptor":
        """Parse the output of `fields` after a JSON round trip; raises ValueError if it is malformed."""
        descriptor = msgspec.convert({"transfer": entry}, _TransferField).transfer
        if unknown := {dtype for dtype, _ in descriptor.tensors.values()} - ITEM_BYTES.keys():
            raise ValueError(f"transfer: unknown dtype {min(unknown)!r}")
        return descriptor

    def fields(self) -> dict[str, Any]:
        """Return the descriptor as JSON-serializable values."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return fields


class _TransferField(msgspec.Struct):
    transfer: TransferDescriptor


class ChannelError(RunError):
    """The peer has disconnected or sent a malformed message; the error names the peer."""


class TransferChannel:
    """One end of a connection. One thread sends and receives; any thread may disconnect.

    Attributes:
        peer: description of the other end, for errors.
    """

    def __init__(self, connection: socket.socket, peer: str) -> None:
        """Wrap an established connection; `peer` names the other side in errors."""
        self.peer = peer
        self._socket = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message. Raises ChannelError if the peer has disconnected."""
        data = msgspec.json.encode(message)
        with translate_error(OSError, self._disconnected):
            self._socket.sendall(pack_frame(data))

    def receive(
        self, timeout_seconds: float | None, check: Callable[[], None] = lambda: None, max_bytes: int = _MAX_BYTES
    ) -> Message:
        """Wait for the next message; see `receive_all`."""
        return receive_all([self], timeout_seconds, check, max_bytes)[0]

    def has_message(self) -> bool:
        """Return whether `receive` would return or raise immediately."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            return bool(selector.select(0))

    def disconnect(self) -> None:
        """Shut down the connection; waiting threads at both ends get a ChannelError."""
        with suppress(OSError):  # already disconnected
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Disconnect and close the socket. No other thread may be waiting on it."""
        self.disconnect()
        self._socket.close()

    def _read(self, deadline: float | None, max_bytes: int) -> Message:
        """Read a complete message before `deadline` (monotonic clock; None is unlimited)."""
        reader = FrameReader(max_bytes)
        try:
            while True:
                if deadline is not None:
                    if (left := deadline - time.monotonic()) <= 0:
                        raise TimeoutError
                    self._socket.settimeout(left)
                if (message := self._receive_part(reader)) is not None:
                    return message
        except TimeoutError:
            raise DeadlineError(f"{self.peer} stopped in the middle of a message") from None
        except OSError as error:
            raise self._disconnected(error) from None
        finally:
            with suppress(OSError):  # another thread has closed it
                self._socket.settimeout(None)

    def _receive_part(self, reader: FrameReader) -> Message | None:
        """Receive a part of a message, nothing after it; return the message once it is complete."""
        malformed = f"{self.peer} sent a malformed message"
        with translate_error(ValueError, lambda error: ChannelError(f"{malformed}: {error}")):
            part = self._socket.recv(min(reader.num_missing, _RECEIVE_BYTES))
            if not part:
                raise ConnectionError("connection closed")
            for body in reader.feed(part):
                return msgspec.json.decode(body, type=Message)
            return None

    def _disconnected(self, error: OSError) -> ChannelError:
        return ChannelError(f"{self.peer} disconnected ({error.strerror or error})")


def connect(host: str, port: int, timeout_seconds: float, peer: str) -> TransferChannel:
    """Connect to `host` and `port`. Raises ChannelError if that fails."""
    try:
        connection = socket.create_connection((host, port), timeout=timeout_seconds)
    except OSError as error:
        place = join_host_port(host, port)
        raise ChannelError(f"{peer} cannot be reached at {place} ({error.strerror or error})") from None
    connection.settimeout(None)
    return TransferChannel(connection, peer)


def receive_all(
    channels: Sequence[TransferChannel],
    timeout_seconds: float | None,
    check: Callable[[], None] = lambda: None,
    max_bytes: int = _MAX_BYTES,
) -> list[Message]:
    """Wait for one message from each channel.

    Args:
        channels: channels that no other thread uses.
        timeout_seconds: longest wait for all messages; None waits until they arrive or a peer disconnects.
        check: called at least four times a second between messages; raises to abort the wait.
        max_bytes: limit of the size of a message.

    Raises:
        ChannelError: a peer has disconnected.
        DeadlineError: a message did not arrive in time; names the peers.
    """
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    messages: dict[TransferChannel, Message] = {}
    with selectors.DefaultSelector() as selector:
        for channel in channels:
            selector.register(channel._socket, selectors.EVENT_READ, channel)
        while len(messages) < len(channels):
            for key, _ in selector.select(_RECHECK_SECONDS):
                # A message that arrives at the deadline is still read: it may explain why others are missing.
                until = None if deadline is None else max(deadline, time.monotonic() + _GRACE_SECONDS)
                messages[key.data] = key.data._read(until, max_bytes)
                selector.unregister(key.fileobj)
            check()
            if deadline is not None and time.monotonic() > deadline and len(messages) < len(channels):
                silent = ", ".join(channel.peer for channel in channels if channel not in messages)
                raise DeadlineError(f"waited {timeout_seconds:.0f} s for {silent}")
    return [messages[channel] for channel in channels]
