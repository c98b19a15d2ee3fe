"""Runs in a remote machine: starts the fork server of a jail, and relays connections between it and the host.

Each frame on stdin and stdout has the number of a connection, a size, and the content. A size of 0 ends the
connection. Standard library only, on any CPython from 3.9.
"""

import json
import os
import select
import socket
import struct
import subprocess
import sys
from typing import Any

_HEADER = struct.Struct(">II")


def main(folder: str, config: dict[str, Any]) -> None:
    """Serve until stdin or the fork server ends. `folder` has the files of the fork server and its filter."""
    control, inside = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    config = {**config, "control_fd": inside.fileno(), "seccomp_path": os.path.join(folder, "filter.bpf")}
    command = [sys.executable, "-I", "-S", "-X", "utf8", os.path.join(folder, "jail_server.py"), json.dumps(config)]
    for writable in config["folders"]:
        os.makedirs(writable, exist_ok=True)
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "env": {}, "cwd": "/"}
    if os.getuid() == 0:  # limits on processes do not apply to root
        options.update(user=config["jail_uid"], group=config["jail_uid"], extra_groups=[])
    server = subprocess.Popen(command, pass_fds=(inside.fileno(),), **options)
    inside.close()
    try:
        _Relay(control).run()
    finally:
        control.close()
        server.wait()


class _Relay:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._connections: dict[int, socket.socket] = {}
        self._numbers: dict[int, int] = {}
        self._waiting: dict[int, bytearray] = {}  # for executions that do not read at the moment
        self._input = bytearray()
        self._poller = select.poll()
        self._poller.register(0, select.POLLIN)
        self._poller.register(control, 0)

    def run(self) -> None:
        while True:
            for fd, events in self._poller.poll():
                if fd == self._control.fileno():
                    return
                if fd == 0:
                    data = os.read(0, 2**18)
                    if not data:
                        return
                    self._input += data
                    self._read_frames()
                elif fd in self._numbers:
                    if events & select.POLLOUT:
                        self._feed(self._numbers[fd])
                    if events & ~select.POLLOUT:
                        self._relay_answer(self._numbers[fd])

    def _read_frames(self) -> None:
        while len(self._input) >= _HEADER.size:
            number, size = _HEADER.unpack_from(self._input)
            end = _HEADER.size + size
            if len(self._input) < end:
                return
            content = bytes(self._input[_HEADER.size : end])
            del self._input[:end]
            if not content:
                self._close(number)
                continue
            if number not in self._connections:
                self._open(number)
            self._waiting[number] += content
            self._feed(number)

    def _feed(self, number: int) -> None:
        """Write to an execution what it takes: this process must read its answers meanwhile."""
        waiting, connection = self._waiting[number], self._connections[number]
        try:
            while waiting:
                del waiting[: connection.send(waiting)]
        except BlockingIOError:
            pass
        except OSError:  # the execution has ended; its answer is still to be read
            waiting.clear()
        self._poller.modify(connection, select.POLLIN | (select.POLLOUT if waiting else 0))

    def _open(self, number: int) -> None:
        ours, theirs = socket.socketpair()
        socket.send_fds(self._control, [b"r"], [theirs.fileno()])
        theirs.close()
        ours.setblocking(False)
        self._connections[number] = ours
        self._waiting[number] = bytearray()
        self._numbers[ours.fileno()] = number
        self._poller.register(ours, select.POLLIN)

    def _close(self, number: int) -> None:
        connection = self._connections.pop(number, None)
        if connection is not None:
            del self._numbers[connection.fileno()], self._waiting[number]
            self._poller.unregister(connection)
            connection.close()

    def _relay_answer(self, number: int) -> None:
        try:
            data = self._connections[number].recv(2**18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        frame = memoryview(_HEADER.pack(number, len(data)) + data)
        while frame:
            frame = frame[os.write(1, frame) :]
        if not data:
            self._close(number)
