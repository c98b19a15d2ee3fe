"""One supervised execution: relays input and output of the child, enforces its limits, reports the verdict.

Runs inside the jail, but outside the namespaces of the child, which can neither see nor signal it. Standard library
only. Nothing that the child writes is trusted: it is data with a maximum size.
"""

import base64
import fcntl
import json
import os
import select
import signal
import socket
import struct
import time
from typing import Any, Optional

import jail_files
import jail_ports

_INTERRUPT_GRACE_SECONDS = 2.0
_REPORT_OVERHEAD_BYTES = 4096
_LAST_CHILD_DESCRIPTOR = 4
_ACTIVE_SECONDS = 0.001
_MAX_FACTOR_OF_TASKS = 2.0
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_HEADER = struct.Struct(">I")


class Pipes:
    """Pipes of a child: its standard streams, its commands (descriptor 3) and its reports (descriptor 4)."""

    def __init__(self) -> None:
        self.stdin = os.pipe()
        self.stdout = os.pipe()
        self.stderr = os.pipe()
        self.commands = os.pipe()
        self.reports = os.pipe()

    def install_in_child(self) -> None:
        """Make the pipes the descriptors 0 to 4 of this process, and close all others."""
        child_ends = [self.stdin[0], self.stdout[1], self.stderr[1], self.commands[0], self.reports[1]]
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 64) for fd in child_ends]
        for number, fd in enumerate(high):
            os.dup2(fd, number, inheritable=number < 3)
        for fd in map(int, os.listdir("/proc/self/fd")):  # of any number: the host chooses that of the control socket
            if fd > _LAST_CHILD_DESCRIPTOR:
                try:
                    os.close(fd)
                except OSError:  # that of the listing itself
                    continue

    def close_child_ends(self) -> None:
        """Close the ends that belong to the child."""
        for fd in (self.stdin[0], self.stdout[1], self.stderr[1], self.commands[0], self.reports[1]):
            os.close(fd)


class MemoryGroup:
    """The control group of one execution: a limit of the memory of all its processes, files in memory included."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._parent, self._version = config["group"]["fd"], config["group"]["version"]
        self._name = f"{os.getpid()}_{os.urandom(4).hex()}"
        os.mkdir(self._name, dir_fd=self._parent)
        limit = config["memory_bytes"] + config["disk_bytes"] + config["shared_memory_bytes"]
        limits = {"memory.limit_in_bytes": limit}
        if self._version == 2:
            limits = {"memory.max": limit, "memory.oom.group": 1}
        for name, value in limits.items():
            self._write(name, value)

    def enter(self) -> None:
        """Move this process, which has one thread, into the group."""
        self._write("tasks" if self._version == 1 else "cgroup.procs", 0)

    def count_kills(self) -> "tuple[int, int]":
        """Return how many of its processes the kernel has ended, and how often the group was at its own limit."""
        if self._version == 1:
            kills = _field(self._read("memory.oom_control"), "oom_kill")
            return kills, int(self._read("memory.failcnt")) if kills else 0
        events = self._read("memory.events")
        return _field(events, "oom_kill"), _field(events, "oom")

    def remove(self) -> None:
        """Remove the group, after its processes have ended."""
        os.rmdir(self._name, dir_fd=self._parent)

    def _write(self, file: str, value: int) -> None:
        fd = os.open(f"{self._name}/{file}", os.O_WRONLY, dir_fd=self._parent)
        try:
            os.write(fd, b"%d" % value)
        finally:
            os.close(fd)

    def _read(self, file: str) -> str:
        fd = os.open(f"{self._name}/{file}", os.O_RDONLY, dir_fd=self._parent)
        try:
            return os.read(fd, 65536).decode()
        finally:
            os.close(fd)


def _field(text: str, name: str) -> int:
    """Return a number from lines like `oom_kill 3`."""
    return next((int(line.split()[1]) for line in text.splitlines() if line.split()[:1] == [name]), 0)


class Child:
    """The process that runs the code, seen from its supervisor."""

    def __init__(self, pid: int, pipes: Pipes, config: dict[str, Any], home: str, group: Optional[MemoryGroup]) -> None:
        self._pid, self._config, self._home, self._group = pid, config, home, group
        self._stdin, self._commands, self._reports = pipes.stdin[1], pipes.commands[1], pipes.reports[0]
        self._outputs = {pipes.stdout[0]: bytearray(), pipes.stderr[0]: bytearray()}
        self._stdout, self._stderr = pipes.stdout[0], pipes.stderr[0]
        self._pidfd = os.pidfd_open(pid)
        self._pending_input, self._pending_commands = b"", b""
        self._report_buffer = bytearray()
        self._poller = select.poll()
        self._status: Optional[int] = None
        self._killed_for: Optional[str] = None
        self._overflowed = False
        self._cell: Optional[dict[str, Any]] = None
        self._ports: Optional[jail_ports.Ports] = None
        self._may_call = False
        self._deadline, self._hard_deadline, self._interrupted = float("inf"), float("inf"), False
        self._times: "dict[str, tuple[float, float]]" = {}
        self._kills_before = (0, 0)
        self._started, self._timeout = 0.0, 0.0

    def wait_until_prepared(self) -> None:
        """Wait until the child has given up its privileges.

        Raises:
            RuntimeError: it could not; the text is its reason.
        """
        report = read_frame(self._reports)
        if report is None or "prepared" not in report:
            raise RuntimeError(str((report or {}).get("failed", "a child ended before it was prepared")))
        self._times = self._measure_tasks()

    def serve(self, connection: socket.socket) -> None:
        """Run the request that the connection carries, or the cells of a session, until it ends."""
        request = read_frame(connection.fileno())
        if request is None:
            self._kill("cancelled")
            return
        self._connection = connection
        self._write_files(request["files"])
        self._pending_input = request["stdin"].encode("utf-8", "surrogateescape")
        self._session = request["mode"] == "session"
        self._may_call = bool(request["command"].get("calls"))
        self._max_output = request["max_output_bytes"]
        self._register(connection)
        self._start_clock(None if self._session else request["timeout_seconds"])
        write_frame(self._commands, request["command"])
        os.set_blocking(self._commands, False)
        if self._session:
            write_frame(connection.fileno(), {"opened": True})
        while self._status is None:
            self._handle_events()
        self._drain()
        if self._killed_for != "cancelled" and (not self._session or self._cell is not None):
            write_frame(connection.fileno(), self._result(request["outputs"]))

    def _register(self, connection: socket.socket) -> None:
        for fd in (self._stdout, self._stderr, self._reports):
            os.set_blocking(fd, False)
            self._poller.register(fd, select.POLLIN)
        os.set_blocking(self._stdin, False)
        self._feed_input()
        if self._pending_input:
            self._poller.register(self._stdin, select.POLLOUT)
        self._poller.register(self._pidfd, select.POLLIN)
        self._poller.register(connection, select.POLLIN | select.POLLRDHUP)

    def _handle_events(self) -> None:
        timeout = self._remaining_seconds()
        for fd, _ in self._poller.poll(None if timeout is None else max(0, int(timeout * 1000) + 1)):
            if fd in self._outputs:
                self._read_output(fd)
            elif fd == self._stdin:
                self._feed_input()
            elif fd == self._commands:
                self._feed_commands()
            elif fd == self._reports:
                self._read_reports()
            elif fd == self._pidfd:
                self._status = os.waitpid(self._pid, 0)[1]
            elif fd == self._connection.fileno():
                self._read_connection()
            elif self._ports is not None:
                self._ports.handle(fd)
        if self._status is None and (self._remaining_seconds() or 1) <= 0:
            self._time_out()

    def _start_clock(self, seconds: Optional[float]) -> None:
        self._started, self._timeout, self._interrupted = time.monotonic(), seconds or 0.0, False
        if self._session:
            self._times = self._measure_tasks()
            self._kills_before = (0, 0) if self._group is None else self._group.count_kills()
        self._deadline = float("inf") if seconds is None else self._started + seconds
        factor = self._config["max_timeout_factor"]
        self._hard_deadline = float("inf") if seconds is None else self._started + seconds * factor

    def _remaining_seconds(self) -> Optional[float]:
        return None if self._deadline == float("inf") else self._deadline - time.monotonic()

    def _measure_tasks(self) -> "dict[str, tuple[float, float]]":
        """Return the seconds on a processor, and of waiting for one, of each task of the child.

        Those of processes that have ended are in the times of the process that waited for them.
        """
        times = {}
        pids = [name for name in os.listdir("/proc") if name.isdigit()] if self._config["isolated"] else [self._pid]
        for pid in pids:
            try:
                with open(f"/proc/{pid}/stat", "rb") as file:
                    ended = sum(map(int, file.read().rpartition(b")")[2].split()[13:15])) / _TICKS_PER_SECOND
                times[f"{pid} ended"] = (ended, 0.0)
                for task in os.listdir(f"/proc/{pid}/task"):
                    with open(f"/proc/{pid}/task/{task}/schedstat", "rb") as file:
                        run, delay = map(int, file.read().split()[:2])
                    times[f"{pid} {task}"] = (run / 1e9, delay / 1e9)
            except (OSError, ValueError):  # it has ended meanwhile
                continue
        return times

    def _find_extension(self) -> float:
        """Return the seconds, since the last call, in which other programs have kept this one from a processor.

        The task that has waited longest counts, less what the other tasks have used. With more than one task, the
        limit is lower: the kernel forgets what a process has used if nothing waits for its end.
        """
        before, self._times = self._times, self._measure_tasks()
        deltas = [
            (run - before.get(name, (0.0, 0.0))[0], delay - before.get(name, (0.0, 0.0))[1])
            for name, (run, delay) in self._times.items()
        ]
        active = [(run, delay) for run, delay in deltas if run + delay > _ACTIVE_SECONDS]
        if len(active) > 1:
            factor = min(self._config["max_timeout_factor"], _MAX_FACTOR_OF_TASKS)
            self._hard_deadline = min(self._hard_deadline, self._started + factor * self._timeout)
        waiting = max(active, key=lambda times: times[1], default=(0.0, 0.0))
        return waiting[1] + waiting[0] - sum(run for run, _ in active)

    def _time_out(self) -> None:
        """Extend the deadline by the time without a processor; then interrupt a session, and end anything else."""
        if not self._interrupted:
            extension = self._find_extension()
            if extension > 0.01 and time.monotonic() < self._hard_deadline:
                self._deadline = min(time.monotonic() + extension, self._hard_deadline)
                return
        if self._session and not self._interrupted:
            self._interrupted = True
            self._deadline = time.monotonic() + _INTERRUPT_GRACE_SECONDS
            os.kill(self._pid, signal.SIGINT)
        else:
            self._kill("timeout")

    def _kill(self, reason: str) -> None:
        """End all processes of the execution: the kernel ends a pid namespace with its process 1."""
        self._killed_for = self._killed_for or reason
        self._deadline = float("inf")
        if self._config["isolated"]:
            os.kill(self._pid, signal.SIGKILL)
        else:
            os.killpg(self._pid, signal.SIGKILL)

    def _read_output(self, fd: int) -> None:
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return
        if not data:
            self._poller.unregister(fd)
        elif not self._keep_output(fd, data) and not self._session:
            self._kill("output")

    def _keep_output(self, fd: int, data: bytes) -> bool:
        """Keep what fits into the limit, and return whether all of it does."""
        room = self._max_output - sum(map(len, self._outputs.values()))
        self._outputs[fd] += data[: max(0, room)]
        self._overflowed |= len(data) > room
        return len(data) <= room

    def _feed_input(self) -> None:
        try:
            while self._pending_input:
                self._pending_input = self._pending_input[os.write(self._stdin, self._pending_input[:65536]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._pending_input = b""
        try:
            self._poller.unregister(self._stdin)
        except KeyError:
            pass
        os.close(self._stdin)
        self._stdin = -1

    def _read_reports(self) -> None:
        try:
            data = os.read(self._reports, 65536)
        except BlockingIOError:
            return
        if not data:
            self._poller.unregister(self._reports)
            return
        if not self._session:
            return
        self._report_buffer += data
        while len(self._report_buffer) >= _HEADER.size:
            (size,) = _HEADER.unpack_from(self._report_buffer)
            if size > 2 * self._max_output + _REPORT_OVERHEAD_BYTES:
                self._kill("output")
                return
            if len(self._report_buffer) < _HEADER.size + size:
                return
            payload = bytes(self._report_buffer[_HEADER.size : _HEADER.size + size])
            del self._report_buffer[: _HEADER.size + size]
            self._handle_report(payload)

    def _handle_report(self, payload: bytes) -> None:
        try:
            report = json.loads(payload)
        except (ValueError, RecursionError):
            report = None
        if not isinstance(report, dict) or self._cell is None:
            self._kill("error")
        elif isinstance(report.get("call"), str):
            # One call at a time: the host reads no further ones before it has answered, so a write could block.
            if not self._may_call:
                self._kill("error")
                return
            self._may_call = False
            write_frame(self._connection.fileno(), {"call": report["call"]})
        else:
            self._drain()
            value = report.get("value")
            facts: dict[str, Any] = {name: report.get(name) is True for name in ("failed", "memory")}
            facts["value"] = value if isinstance(value, str) else None
            result = self._result(self._cell["outputs"], facts)
            self._set_cell(None)
            self._overflowed = False
            self._deadline = float("inf")
            for buffer in self._outputs.values():
                buffer.clear()
            write_frame(self._connection.fileno(), result)

    def _read_connection(self) -> None:
        request = read_frame(self._connection.fileno()) if self._session else None
        if request is None:
            self._poller.unregister(self._connection)
            self._kill("cancelled")
        elif "answer" in request:
            self._may_call = True
            self._send_command(request)
        elif "listen" in request:
            host = self._connection.fileno()
            self._ports = self._ports or jail_ports.Ports(self._poller, lambda message: write_frame(host, message))
            write_frame(host, {"listening": self._ports.listen(request["listen"])})
        elif "stream" in request:
            if self._ports is not None:
                self._ports.receive(request)
        else:
            self._set_cell(request)
            self._write_files(request["files"])
            self._start_clock(request["timeout_seconds"])
            self._send_command(request["command"])

    def _set_cell(self, cell: Optional[dict[str, Any]]) -> None:
        self._cell = cell
        if self._ports is not None:
            self._ports.set_reading(cell is not None)

    def _write_files(self, files: dict[str, str]) -> None:
        """Write files. An execution that made this impossible, such as by a folder of that name, ends with an error."""
        try:
            for name, content in files.items():
                jail_files.write_file(self._home, name, base64.b64decode(content))
        except (OSError, ValueError) as error:
            self._outputs[self._stderr] += f"cannot write the files of the request: {error}\n".encode()
            self._kill("error")

    def _send_command(self, command: dict[str, Any]) -> None:
        self._pending_commands += _pack_frame(command)
        self._poller.register(self._commands, select.POLLOUT)

    def _feed_commands(self) -> None:
        """Write what the pipe takes: code that never reads its commands must not block this process."""
        try:
            self._pending_commands = self._pending_commands[os.write(self._commands, self._pending_commands) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._pending_commands = b""
        if not self._pending_commands:
            self._poller.unregister(self._commands)

    def _drain(self) -> None:
        """Read what the child has already written."""
        for fd in self._outputs:
            try:
                while (data := os.read(fd, 65536)) and self._keep_output(fd, data):
                    continue
            except BlockingIOError:
                pass

    def _result(self, outputs: list[str], report: Optional[dict[str, Any]] = None) -> dict[str, Any]:
        elapsed = time.monotonic() - self._started
        status = self._status
        code = None if status is None else os.waitstatus_to_exitcode(status)
        return {
            "exit_code": code,
            "killed_for": "timeout" if self._interrupted else self._killed_for,
            "kernel_killed_for": self._find_kernel_kill(code),
            "overflowed": self._overflowed,
            "stdout": self._outputs[self._stdout].decode("utf-8", "surrogateescape"),
            "stderr": self._outputs[self._stderr].decode("utf-8", "surrogateescape"),
            "milliseconds": elapsed * 1000,
            "report": report,
            "files": jail_files.read_files(self._home, outputs, self._max_output),
            "alive": status is None,
        }

    def _find_kernel_kill(self, code: Optional[int]) -> Optional[str]:
        """Return why the kernel ended processes for lack of memory: `own` use above the limit, or of the `jail`."""
        if self._group is not None:
            (kills, at_limit), (kills_before, at_limit_before) = self._group.count_kills(), self._kills_before
            kills, at_limit = kills - kills_before, at_limit - at_limit_before
            return None if not kills else "own" if at_limit else "jail"
        if code != -signal.SIGKILL or self._killed_for is not None:
            return None
        return "jail" if self._config["isolated"] else "own"  # process 1 of a namespace cannot kill itself


def read_frame(fd: int) -> Optional[dict[str, Any]]:
    """Read one JSON object with its length before it; None at the end of the stream."""
    header = _read_exactly(fd, _HEADER.size)
    if header is None:
        return None
    payload = _read_exactly(fd, _HEADER.unpack(header)[0])
    return None if payload is None else json.loads(payload)


def _pack_frame(message: dict[str, Any]) -> bytes:
    payload = json.dumps(message).encode()
    return _HEADER.pack(len(payload)) + payload


def _read_exactly(fd: int, size: int) -> Optional[bytes]:
    data = bytearray()
    while len(data) < size:
        chunk = os.read(fd, min(size - len(data), 2**20))
        if not chunk:
            return None
        data += chunk
    return bytes(data)


def write_frame(fd: int, message: dict[str, Any]) -> None:
    """Write one JSON object with its length before it. Ignores a reader that has gone."""
    data = memoryview(_pack_frame(message))
    try:
        while data:
            data = data[os.write(fd, data) :]
    except (BrokenPipeError, ConnectionResetError):
        return
