"""The process that runs the code: gives up all privileges, then executes a program, Python code, or session cells.

Runs inside the jail with the standard library alone. Everything before `_execute` is trusted. Everything after it may
be under the control of the code that runs, so the supervisor and the host trust nothing that this process writes.
"""

import ast
import atexit
import ctypes
import linecache
import os
import resource
import signal
import site
import struct
import sys
import threading
import traceback
from types import ModuleType
from typing import Any, NoReturn

from jail_supervisor import read_frame, write_frame

_COMMANDS, _REPORTS = 3, 4
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 22, 24, 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_SECCOMP_MODE_FILTER = 2
_LAST_CAPABILITY = 63
_MAX_PENDING_SIGNALS = 1024
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_RDONLY = 2, 4, 8, 1
_CAPABILITY_VERSION_3 = 0x20080522
_CLONE_NEWCGROUP = 0x02000000
_EXIT_ERROR = 1
_MAX_VALUE_CHARACTERS = 100_000


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
            _set_limits(config)
    except BaseException as error:  # reported to the supervisor, which reports it to the host
        write_frame(_REPORTS, {"failed": f"{type(error).__name__}: {error}"})
        os._exit(_EXIT_ERROR)
    write_frame(_REPORTS, {"prepared": True})
    command = read_frame(_COMMANDS)
    if command is None:
        os._exit(_EXIT_ERROR)
    _execute(command, config["paths"], home)


def _enter_sandbox(config: dict[str, Any]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    _mount_proc(libc)
    _set_limits(config)
    end_with_parent()
    libc.unshare(_CLONE_NEWCGROUP)  # hides the name of its control group, where the kernel has these namespaces
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
    """Mount /proc of the own pid namespace, or an empty folder where the kernel refuses, as in some containers.

    Read-only: a process that lowers its `oom_score_adj` has the kernel end its neighbours first.
    """
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC | _MS_RDONLY
    if libc.mount(b"proc", b"/proc", b"proc", flags, None) == 0:
        return
    if libc.mount(b"tmpfs", b"/proc", b"tmpfs", flags, b"size=4k,mode=500") == -1:
        raise OSError(ctypes.get_errno(), "mount /proc")


def _set_limits(config: dict[str, Any]) -> None:
    """Set the limits of this process and those that it starts."""
    limits = {
        resource.RLIMIT_AS: config["memory_bytes"],
        resource.RLIMIT_FSIZE: config["disk_bytes"],
        resource.RLIMIT_NOFILE: config["num_open_files"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 64 * 1024,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: _MAX_PENDING_SIGNALS,
    }
    if config["group"] and not config["limits_address_space"]:
        del limits[resource.RLIMIT_AS]
    if config["isolated"]:
        limits[resource.RLIMIT_NPROC] = config["num_processes"]
    for kind, value in limits.items():
        resource.setrlimit(kind, (value, value))


def _execute(command: dict[str, Any], paths: list[str], home: str) -> NoReturn:
    """Run the command: untrusted from here on."""
    os.environ.update({"HOME": home, "TMPDIR": home, "PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"})
    sys.path.insert(len(sys.path) - len(paths), home)
    site.setquit()  # exit() and quit(), which the interpreter does not define with -S
    if command["kind"] == "session":
        _run_session(calls=command["calls"])
    os.close(_COMMANDS)
    os.close(_REPORTS)
    if command["kind"] == "argv":
        if paths:
            os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        try:
            os.execvp(command["argv"][0], command["argv"])
        except OSError as error:
            os.write(2, f"{command['argv'][0]}: {error.strerror}\n".encode())
            os._exit(127)
    os._exit(_run_program(command["code"], command["module_name"]))


def _run_program(code: str, module_name: str) -> int:
    """Run the code like `python solution.py`, and return its exit code."""
    module = ModuleType(module_name)
    sys.modules[module_name] = module
    sys.argv = ["solution.py"]
    status: object = 0
    try:
        linecache.cache["solution.py"] = (len(code), None, code.splitlines(keepends=True), "solution.py")
        exec(compile(code, "solution.py", "exec"), module.__dict__)
    except SystemExit as end:
        status = end.code
    except BaseException as error:  # as the interpreter does: print it, exit with 1
        status = _EXIT_ERROR
        _print_error(error)
    try:
        if status is not None and not isinstance(status, int):
            print(status, file=sys.stderr)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # a hook of the program, or a stream that it has replaced
        pass
    return status & 0xFF if isinstance(status, int) else int(status is not None)


def _print_error(error: BaseException) -> None:
    """Print a traceback without the frames of this file. A program may have replaced what this needs."""
    try:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        traceback.print_exception(type(error), error, frames)
    except BaseException:
        os.write(2, f"{type(error).__name__}\n".encode())


def _run_session(calls: bool) -> NoReturn:
    """Run cells in one namespace until the supervisor closes the pipe or ends this process."""
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    if calls:
        module.__dict__["host_call"] = _call_host
    number = 0
    while True:
        try:
            command = read_frame(_COMMANDS)
            if command is None:
                os._exit(0)
            if "answer" in command:  # of a call that was interrupted
                continue
            number += 1
            report = _run_cell(command["code"], module.__dict__, f"<cell {number}>")
            write_frame(_REPORTS, report)
        except KeyboardInterrupt:  # arrived after the end of the cell
            continue


def _run_cell(code: str, namespace: dict[str, Any], name: str) -> dict[str, Any]:
    """Run a cell; its value is the `repr` of its last line, if that is an expression."""
    report: dict[str, Any] = {"failed": False, "value": None}
    try:
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        tree = ast.parse(code, name)
        last = tree.body[-1] if tree.body else None
        if isinstance(last, ast.Expr):
            tree.body.pop()
        exec(compile(tree, name, "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
            if value is not None:
                report["value"] = repr(value)[:_MAX_VALUE_CHARACTERS]
    except BaseException as error:  # the session continues after any error, SystemExit included
        report["failed"], report["memory"] = True, isinstance(error, MemoryError)
        _print_error(error)
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # the cell may have replaced them
        report["failed"] = True
    return report


def _call_host(text: str) -> str:
    """Send a text to the host and return its answer."""
    write_frame(_REPORTS, {"call": text})
    answer = read_frame(_COMMANDS)
    if answer is None:
        os._exit(_EXIT_ERROR)
    return str(answer["answer"])
