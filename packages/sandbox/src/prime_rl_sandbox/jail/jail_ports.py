"""TCP ports in the network of an execution that lead to the host: the supervisor relays their bytes.

Runs inside the jail, outside the namespaces that hide processes from the child, but in its network. Standard library
only. Nothing that a program sends is trusted: it is data.
"""

import base64
import select
import socket
from collections.abc import Callable
from typing import Any, Optional

_MAX_STREAMS = 256
WINDOW_BYTES = 2**18
"""What a connection may send, in each direction, before the other side has taken it: nothing between them can block."""
_PART_BYTES = 65536
_Send = Callable[[dict[str, Any]], None]


class _Stream:
    """A connection of a program.

    Attributes:
        waiting: bytes from the host that the program has not taken yet.
        untaken: number of bytes of the program that the host has not taken yet.
        sent_all: the program sends nothing more.
        got_all: the host sends nothing more.
        events: for which the socket is polled.
    """

    def __init__(self, connection: socket.socket, number: int) -> None:
        self.socket, self.number = connection, number
        self.waiting = bytearray()
        self.untaken = 0
        self.sent_all = self.got_all = False
        self.events = 0


class Ports:
    """The ports of one execution, and their connections.

    The host gets a `stream` number with its `port`, then `data` in base64; empty data ends a direction, and null both.
    Both sides report how many bytes they have `taken`. Programs wait while no cell runs, because the host reads nothing
    then.
    """

    def __init__(self, poller: "select.poll", send: _Send) -> None:
        self._poller, self._send = poller, send
        self._listeners: dict[int, tuple[socket.socket, int]] = {}
        self._streams: dict[int, _Stream] = {}
        self._by_number: dict[int, _Stream] = {}
        self._count = 0
        self._reads = False

    def listen(self, ports: list[int]) -> Optional[str]:
        """Accept connections to these ports of the loopback interface; return why that is impossible, or None."""
        try:
            known = [port for _, port in self._listeners.values()]
            for port in ports:
                if port not in known:
                    listener = socket.create_server(("127.0.0.1", port), backlog=_MAX_STREAMS)
                    listener.setblocking(False)
                    self._listeners[listener.fileno()] = listener, port
        except OSError as error:
            return str(error)
        return None

    def set_reading(self, reads: bool) -> None:
        """Let programs connect and send, or wait."""
        if reads == self._reads:
            return
        self._reads = reads
        for fd in self._listeners:
            if reads:
                self._poller.register(fd, select.POLLIN)
            else:
                self._poller.unregister(fd)
        for stream in self._streams.values():
            self._poll(stream)

    def handle(self, fd: int) -> None:
        """Handle an event of a port or connection, which an event before it may have closed."""
        if fd in self._listeners:
            self._accept(*self._listeners[fd])
        elif fd in self._streams:
            stream = self._streams[fd]
            self._flush(stream)
            if fd in self._streams and self._may_read(stream):
                self._read(stream)

    def receive(self, message: dict[str, Any]) -> None:
        """Take what the host sends to a connection, which may have ended."""
        stream = self._by_number.get(message["stream"])
        if stream is None:
            return
        if "taken" in message:
            stream.untaken -= message["taken"]
            self._poll(stream)
        elif message["data"] is None:
            self._close(stream)
        else:
            stream.waiting += base64.b64decode(message["data"])
            stream.got_all = stream.got_all or not message["data"]
            self._flush(stream)

    def _accept(self, listener: socket.socket, port: int) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        if len(self._streams) >= _MAX_STREAMS:
            connection.close()
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._count += 1
        stream = self._streams[connection.fileno()] = self._by_number[self._count] = _Stream(connection, self._count)
        self._send({"stream": stream.number, "port": port})
        self._poll(stream)

    def _read(self, stream: _Stream) -> None:
        try:
            data = stream.socket.recv(min(_PART_BYTES, WINDOW_BYTES - stream.untaken))
        except BlockingIOError:
            return
        except OSError:
            self._send({"stream": stream.number, "data": None})
            self._close(stream)
            return
        stream.sent_all = not data
        stream.untaken += len(data)
        self._send({"stream": stream.number, "data": base64.b64encode(data).decode()})
        self._finish(stream)

    def _flush(self, stream: _Stream) -> None:
        before = len(stream.waiting)
        try:
            while stream.waiting:
                del stream.waiting[: stream.socket.send(memoryview(stream.waiting)[:_PART_BYTES].tobytes())]
            if stream.got_all:
                stream.socket.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            pass
        except OSError:  # the program has closed it
            self._send({"stream": stream.number, "data": None})
            self._close(stream)
            return
        if before > len(stream.waiting):
            self._send({"stream": stream.number, "taken": before - len(stream.waiting)})
        self._finish(stream)

    def _finish(self, stream: _Stream) -> None:
        if stream.sent_all and stream.got_all and not stream.waiting:
            self._close(stream)
        else:
            self._poll(stream)

    def _may_read(self, stream: _Stream) -> bool:
        return self._reads and not stream.sent_all and stream.untaken < WINDOW_BYTES

    def _poll(self, stream: _Stream) -> None:
        """Poll for what the connection waits for; a descriptor without events would still report its end, each time."""
        events = select.POLLIN if self._may_read(stream) else 0
        events |= select.POLLOUT if stream.waiting else 0
        if events != stream.events:
            if events:
                self._poller.register(stream.socket, events)
            else:
                self._poller.unregister(stream.socket)
            stream.events = events

    def _close(self, stream: _Stream) -> None:
        if stream.events:
            self._poller.unregister(stream.socket)
        del self._streams[stream.socket.fileno()], self._by_number[stream.number]
        stream.socket.close()
