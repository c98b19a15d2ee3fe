"""A connection between a node and the head of its server: a message is a line of JSON, and silence is noticed (I7)."""

import json
import select
import socket
import time
from collections.abc import Sequence
from typing import Any

SEND_TIMEOUT_S = 5.0
_LONGEST_MESSAGE = 2**20


class LinkLost(Exception):
    """The other side is gone, or says nothing; the message says which."""


class Link:
    """One connection between a node and the head.

    Attributes:
        peer: address of the other side.
        name: what it is called in messages.
    """

    def __init__(self, connection: socket.socket, name: str) -> None:
        """Take over a connected socket."""
        connection.settimeout(SEND_TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.name = name
        self.peer: str = connection.getpeername()[0]
        self._connection = connection
        self._buffer = b""
        self._heard = time.monotonic()

    def fileno(self) -> int:
        """For select."""
        return self._connection.fileno()

    def send(self, kind: str, **content: Any) -> None:
        """Send one message.

        Raises:
            LinkLost: the connection is gone.
        """
        try:
            self._connection.sendall(json.dumps({"kind": kind, **content}, default=str).encode() + b"\n")
        except OSError as error:
            raise LinkLost(f"{self.name} is gone ({error})") from None

    def receive(self) -> list[dict[str, Any]]:
        """Read what has arrived, without its beats; to be called when there is something to read.

        Raises:
            LinkLost: the connection was closed, or speaks another language.
        """
        try:
            data = self._connection.recv(2**16)
        except OSError as error:
            raise LinkLost(f"{self.name} is gone ({error})") from None
        if not data:
            raise LinkLost(f"{self.name} is gone")
        self._heard = time.monotonic()
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
            if len(self._buffer) > _LONGEST_MESSAGE or not all("kind" in message for message in messages):
                raise ValueError
        except (ValueError, TypeError):
            raise LinkLost(f"{self.name} does not speak as a node does") from None
        return [message for message in messages if message["kind"] != "beat"]

    def beat(self, silence_s: float) -> None:
        """Show that this side lives.

        Raises:
            LinkLost: the other side has not for `silence_s` seconds.
        """
        silent = time.monotonic() - self._heard
        if silent > silence_s:
            raise LinkLost(f"{self.name} has said nothing for {silent:.0f} s (heartbeat.timeout)")
        self.send("beat")

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def wait_readable(links: Sequence[Link], other: socket.socket, timeout_s: float) -> tuple[list[Link], bool]:
    """Wait for the first of them; return the links that have something to read, and whether `other` has."""
    by_number: dict[int, Link] = {link.fileno(): link for link in links}
    numbers, _, _ = select.select([*by_number, other.fileno()], [], [], timeout_s)
    return [by_number[number] for number in numbers if number in by_number], other.fileno() in numbers
