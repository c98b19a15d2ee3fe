"""JSON messages between two processes over TCP; every wait has a deadline and names the peer (I7).

A message is a JSON object after its length (u32, big-endian).
"""

import selectors
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from prime_rl.core.errors import RunError, translate_error
from prime_rl.core.ports import join_host_port
from prime_rl.storage.wait_for import DeadlineError

Message = dict[str, Any]

_LENGTH = struct.Struct(">I")
LENGTH_BYTES = _LENGTH.size
"""Size of the header of a message."""
_MAX_BYTES = 2**28
"""Default limit of the size of a message."""
_RECHECK_SECONDS = 0.25
_GRACE_SECONDS = 1.0
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Keep-alive: a machine that does not answer counts as dead after about 25 s."""


class ChannelError(RunError):
    """The peer has disconnected or sent a malformed message; the error names the peer."""


class TransferChannel:
    """One end of a connection. One thread sends and receives; any thread may disconnect.

    Attributes:
        peer: description of the other end, for errors.
    """

    def __init__(self, connection: socket.socket, peer: str) -> None:
        """Use an established connection."""
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
            self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(
        self, timeout_s: float | None, check: Callable[[], None] = lambda: None, max_bytes: int = _MAX_BYTES
    ) -> Message:
        """Wait for the next message; see `receive_all`."""
        return receive_all([self], timeout_s, check, max_bytes)[0]

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
        try:
            length = self._parse_length(self._read_exactly(_LENGTH.size, deadline), max_bytes)
            return self._parse(self._read_exactly(length, deadline))
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise DeadlineError(f"{self.peer} stopped in the middle of a message") from None
            raise self._disconnected(error) from None
        finally:
            with suppress(OSError):  # another thread has closed it
                self._socket.settimeout(None)

    def _parse_length(self, header: bytes | bytearray, max_bytes: int) -> int:
        (length,) = _LENGTH.unpack(header)
        if length > max_bytes:
            raise ChannelError(f"{self.peer} sent a malformed message: {length} bytes (limit {max_bytes})")
        return int(length)

    def _parse(self, data: bytes | bytearray) -> Message:
        try:
            return msgspec.json.decode(data, type=Message)
        except msgspec.DecodeError as error:
            raise ChannelError(f"{self.peer} sent a malformed message: {error}") from None

    def _read_exactly(self, length: int, deadline: float | None) -> bytes:
        data = bytearray()
        while len(data) < length:
            if deadline is not None:
                if (left := deadline - time.monotonic()) <= 0:
                    raise TimeoutError
                self._socket.settimeout(left)
            part = self._socket.recv(min(length - len(data), 2**20))
            if not part:
                raise ConnectionError("connection closed")
            data += part
        return bytes(data)

    def _disconnected(self, error: OSError) -> ChannelError:
        return ChannelError(f"{self.peer} disconnected ({error.strerror or error})")


def connect(host: str, port: int, timeout_s: float, peer: str) -> TransferChannel:
    """Connect to `host` and `port`. Raises ChannelError if that fails."""
    try:
        connection = socket.create_connection((host, port), timeout=timeout_s)
    except OSError as error:
        place = join_host_port(host, port)
        raise ChannelError(f"{peer} cannot be reached at {place} ({error.strerror or error})") from None
    connection.settimeout(None)
    return TransferChannel(connection, peer)


def receive_all(
    channels: Sequence[TransferChannel],
    timeout_s: float | None,
    check: Callable[[], None] = lambda: None,
    max_bytes: int = _MAX_BYTES,
) -> list[Message]:
    """Wait for one message from each channel.

    Args:
        channels: channels that no other thread uses.
        timeout_s: longest wait for all messages; None waits until they arrive or a peer disconnects.
        check: called at least four times a second between messages; raises to abort the wait.
        max_bytes: limit of the size of a message.

    Raises:
        ChannelError: a peer has disconnected.
        DeadlineError: a message did not arrive in time; names the peers.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
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
                raise DeadlineError(f"waited {timeout_s:.0f} s for {silent}")
    return [messages[channel] for channel in channels]
