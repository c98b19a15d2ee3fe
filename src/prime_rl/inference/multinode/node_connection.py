"""A connection between a node and the head of its server, on which silence is an error."""

import socket
import time
from typing import Any

from prime_rl.storage.weights.transfer_channel import LENGTH_BYTES, ChannelError, Message, TransferChannel

SEND_TIMEOUT_S = 5.0
_MAX_MESSAGE_BYTES = 2**20


class NodeConnection(TransferChannel):
    """One end of the connection. Its methods raise RunError (ChannelError, DeadlineError) if the other side is lost."""

    def __init__(self, connection: socket.socket, peer: str) -> None:
        super().__init__(connection, peer)
        self.address: str = connection.getpeername()[0]  # of the other side
        self._last_message = time.monotonic()
        self._partial = bytearray()

    def fileno(self) -> int:
        """For `select`."""
        return self._socket.fileno()

    def send_message(self, kind: str, **content: Any) -> None:
        """Send one message."""
        self._socket.settimeout(SEND_TIMEOUT_S)
        self.send({"kind": kind, **content})

    def receive_message(self) -> Message:
        """Read what has arrived, without blocking: the next message, or a beat if it is not complete yet.

        One thread serves all nodes, so a peer that stops in the middle of a message must not block it. Later messages
        stay in the kernel's buffer: `select` reports the connection as readable again.
        """
        self._socket.settimeout(0)
        try:
            while missing := self._num_missing_bytes():
                if not (part := self._socket.recv(missing)):
                    raise ConnectionError("connection closed")
                self._partial += part
                self._last_message = time.monotonic()
        except OSError as error:
            if isinstance(error, BlockingIOError):
                return {"kind": "beat"}
            raise self._disconnected(error) from None
        message = self._parse(self._partial[LENGTH_BYTES:])
        self._partial.clear()
        if "kind" not in message:
            raise ChannelError(f"{self.peer} sent a malformed message (is it a prime-rl node?)")
        return message

    def beat(self, silence_s: float) -> None:
        """Send a beat; raises if the other side has sent nothing for `silence_s` seconds."""
        silent = time.monotonic() - self._last_message
        if silent > silence_s:
            raise ChannelError(f"{self.peer} has sent nothing for {silent:.0f} s (heartbeat.dead_after_seconds)")
        self.send_message("beat")

    def _num_missing_bytes(self) -> int:
        """Return how many bytes of the header, or of the message after it, have not arrived yet."""
        if len(self._partial) < LENGTH_BYTES:
            return LENGTH_BYTES - len(self._partial)
        length = self._parse_length(self._partial[:LENGTH_BYTES], _MAX_MESSAGE_BYTES)
        return LENGTH_BYTES + length - len(self._partial)
