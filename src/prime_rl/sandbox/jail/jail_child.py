"""The process that runs the code: gives up all privileges, then executes a program, Python code, or session cells.

Runs inside the jail with the standard library alone. Everything before `_execute` is trusted. Everything after it may
be under the control of the code that runs, so the supervisor and the host trust nothing that this process writes.
"""

import ctypes
import json
import os
import resource
import signal
import struct
import sys
from types import ModuleType
from typing import Any, NoReturn, Optional

import jail_program

_COMMANDS, _REPORTS = 3, 4
_HEADER = struct.Struct(">I")
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 22, 24, 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_SECCOMP_MODE_FILTER = 2
_LAST_CAPABILITY = 63
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_RDONLY = 2, 4, 8, 1
_CAPABILITY_VERSION_3 = 0x20080522
_EXIT_ERROR = 1


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def main(config: dict[str, Any], home: str) -> NoReturn:
    """Give up all privileges, report that the child is prepared, and run the command that follows."""
    try:
        os.chdir(home)
        os.setsid()  # a signal to the own process group crosses pid namespaces
        if config["isolated"]:
            _enter_sandbox(config)
        else:
            set_limits(config)
    except BaseException as error:  # reported to the supervisor, which reports it to the host
        write_report({"failed": f"{type(error).__name__}: {error}"})
        os._exit(_EXIT_ERROR)
    write_report({"prepared": True})
    command = read_command()
    if command is None:
        os._exit(_EXIT_ERROR)
    _execute(command, config["paths"], home)


def _enter_sandbox(config: dict[str, Any]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    _mount_proc(libc)
    set_limits(config)
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:  # without /proc; the limits of the address space remain
        pass
    end_with_parent()
    for capability in range(_LAST_CAPABILITY + 1):
        if libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) == -1:
            break
    _prctl(libc, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    if libc.capset(header, bytes(24)) == -1:
        raise OSError(ctypes.get_errno(), "capset")
    _prctl(libc, _PR_SET_NO_NEW_PRIVS, 1)
    instructions = config["seccomp"]
    program = _FilterProgram(len(instructions) // 8, instructions)
    _prctl(libc, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(program))


def end_with_parent() -> None:
    """Have the kernel kill this process when its supervisor ends."""
    _prctl(ctypes.CDLL(None, use_errno=True), _PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(libc: Any, option: int, value: int, pointer: int = 0) -> None:
    if libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(pointer), 0, 0) == -1:
        raise OSError(ctypes.get_errno(), f"prctl {option}")


def _mount_proc(libc: Any) -> None:
    """Mount /proc of the own pid namespace, or an empty folder where the kernel refuses, as in some containers."""
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    if libc.mount(b"proc", b"/proc", b"proc", flags, None) == 0:
        return
    if libc.mount(b"tmpfs", b"/proc", b"tmpfs", flags | _MS_RDONLY, b"size=4k,mode=500") == -1:
        raise OSError(ctypes.get_errno(), "mount /proc")


def set_limits(config: dict[str, Any]) -> None:
    """Set the limits of this process and those that it starts."""
    limits = {
        resource.RLIMIT_FSIZE: config["disk_bytes"],
        resource.RLIMIT_NOFILE: config["num_open_files"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 64 * 1024,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    if not config["component"]:  # the runtime limits the memory of a component, and reserves address space for it
        limits[resource.RLIMIT_AS] = config["memory_bytes"]
    if config["isolated"]:
        limits[resource.RLIMIT_NPROC] = config["num_processes"]
    for kind, value in limits.items():
        resource.setrlimit(kind, (value, value))


def _execute(command: dict[str, Any], paths: list[str], home: str) -> NoReturn:
    """Run the command: untrusted from here on."""
    os.environ.update({"HOME": home, "TMPDIR": home, "PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"})
    if command["kind"] == "session":
        _run_session(calls=command["calls"])
    os.close(_COMMANDS)
    os.close(_REPORTS)
    if command["kind"] == "argv":
        try:
            os.execvp(command["argv"][0], command["argv"])
        except OSError as error:
            os.write(2, f"{command['argv'][0]}: {error.strerror}\n".encode())
            os._exit(127)
    sys.path += [home, *paths]
    os._exit(jail_program.run_program(command["code"], command["module_name"]))


def _run_session(calls: bool) -> NoReturn:
    """Run cells in one namespace until the supervisor closes the pipe or ends this process."""
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.path.append(os.getcwd())
    if calls:
        module.__dict__["host_call"] = _call_host
    number = 0
    while True:
        try:
            command = read_command()
            if command is None:
                os._exit(0)
            if "answer" in command:  # of a call that was interrupted
                continue
            number += 1
            report = jail_program.run_cell(command["code"], module.__dict__, f"<cell {number}>")
            write_report(report)
        except KeyboardInterrupt:  # arrived after the end of the cell
            continue


def _call_host(text: str) -> str:
    """Send a text to the host and return its answer."""
    write_report({"call": text})
    answer = read_command()
    if answer is None:
        os._exit(_EXIT_ERROR)
    return str(answer["answer"])


def read_command() -> Optional[dict[str, Any]]:
    """Return the next command of the supervisor; None at its end."""
    header = _read_exactly(_HEADER.size)
    payload = None if header is None else _read_exactly(_HEADER.unpack(header)[0])
    return None if payload is None else json.loads(payload)


def _read_exactly(size: int) -> Optional[bytes]:
    data = b""
    while len(data) < size:
        chunk = os.read(_COMMANDS, min(size - len(data), 2**20))
        if not chunk:
            return None
        data += chunk
    return data


def write_report(report: dict[str, Any]) -> None:
    """Send a report to the supervisor."""
    payload = json.dumps(report).encode()
    data = _HEADER.pack(len(payload)) + payload
    while data:
        data = data[os.write(_REPORTS, data) :]
