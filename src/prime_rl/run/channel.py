"""I7: messages between two processes of a run. Whoever waits knows for whom, how long at most, and at once if it died.

A message is a JSON object after its length (u32, big-endian) on a TCP connection. The end of a process closes its
connections; that of a machine is noticed by the kernel's probes.
"""

import json
import selectors
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from prime_rl.errors import RunError
from prime_rl.run.wait import DeadlineError

Message = dict[str, Any]

_LENGTH = struct.Struct(">I")
_LONGEST = 2**28
_RECHECK_S = 0.25
_PROBES = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Seconds of silence until the first probe, seconds between two, and how many unanswered ones are a death."""


class ChannelError(RunError):
    """The other side has ended, or does not speak this language; the message names it."""


class Channel:
    """One end of a connection. One thread sends and receives; any thread may hang up.

    Attributes:
        peer: who is at the other end, for messages.
    """

    def __init__(self, connection: socket.socket, peer: str) -> None:
        """Take over a connection."""
        self.peer = peer
        self._socket = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _PROBES.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message.

        Raises:
            ChannelError: the other side has ended.
        """
        data = json.dumps(message, separators=(",", ":")).encode()
        try:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise self._lost(error) from None

    def receive(self, timeout_s: float | None, check: Callable[[], None] = lambda: None) -> Message:
        """Wait for the next message; arguments and errors as `receive_all`."""
        return receive_all([self], timeout_s, check)[0]

    def has_news(self) -> bool:
        """Tell whether `receive` would return, or raise, at once."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            return bool(selector.select(0))

    def hang_up(self) -> None:
        """End the conversation; whoever waits at either end gets a ChannelError."""
        with suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up and forget the connection; only where no other thread waits."""
        self.hang_up()
        self._socket.close()

    def _read(self, timeout_s: float | None) -> Message:
        try:
            self._socket.settimeout(timeout_s)
            (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
            if length > _LONGEST:
                raise ChannelError(f"{self.peer} sent what is no message")
            message = json.loads(self._exactly(length))
        except TimeoutError:
            raise DeadlineError(f"{self.peer} stopped in the middle of a message") from None
        except OSError as error:
            raise self._lost(error) from None
        except ValueError:
            raise ChannelError(f"{self.peer} sent what is no message") from None
        finally:
            with suppress(OSError):  # another thread has closed it
                self._socket.settimeout(None)
        if not isinstance(message, dict):
            raise ChannelError(f"{self.peer} sent what is no message")
        return message

    def _exactly(self, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            part = self._socket.recv(min(length - len(data), 2**20))
            if not part:
                raise ConnectionError("connection closed")
            data += part
        return bytes(data)

    def _lost(self, error: OSError) -> ChannelError:
        return ChannelError(f"{self.peer} has gone ({error.strerror or error})")


def connect(host: str, port: int, timeout_s: float, peer: str) -> Channel:
    """Call whoever listens at `host` and `port`.

    Raises:
        ChannelError: nobody does.
    """
    try:
        connection = socket.create_connection((host, port), timeout=timeout_s)
    except OSError as error:
        raise ChannelError(f"{peer} cannot be reached at {host}:{port} ({error.strerror or error})") from None
    connection.settimeout(None)
    return Channel(connection, peer)


def receive_all(
    channels: Sequence[Channel], timeout_s: float | None, check: Callable[[], None] = lambda: None
) -> list[Message]:
    """Wait for one message of each channel.

    Args:
        channels: of this thread alone.
        timeout_s: longest wait, seconds; None waits until they come or a side ends.
        check: called at least four times a second; raises what makes waiting pointless.

    Raises:
        ChannelError: one of them has ended.
        DeadlineError: names those that have not answered.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    messages: dict[Channel, Message] = {}
    with selectors.DefaultSelector() as selector:
        for channel in channels:
            selector.register(channel._socket, selectors.EVENT_READ, channel)
        while len(messages) < len(channels):
            for key, _ in selector.select(_RECHECK_S):
                messages[key.data] = key.data._read(timeout_s)
                selector.unregister(key.fileobj)
            check()
            if deadline is not None and time.monotonic() > deadline and len(messages) < len(channels):
                silent = ", ".join(channel.peer for channel in channels if channel not in messages)
                raise DeadlineError(f"waited {timeout_s:.0f} s for {silent}")
    return [messages[channel] for channel in channels]
