"""The fork server of a jail: keeps prepared children ready, and supervises one execution in each.

Runs inside the jail with the standard library alone, on any CPython from 3.9. Three kinds of processes:

- The server forks supervisors, so that `num_warm` of them wait for a request at any time.
- A supervisor enters its own namespaces, forks the child as process 1 of a new pid namespace, takes one request from
  the control socket, enforces its limits, answers on the connection that came with it, and exits.
- The child (`jail_child`) gives up all privileges and runs the code. It is used once.
"""

import ctypes
import errno
import fcntl
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import tempfile
import time
from types import FrameType
from typing import Any, NoReturn, Optional

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import jail_child
import jail_files
import jail_supervisor

PRELOAD_FAILED = 3
"""Exit code of the server if a module cannot be imported; its last line on stderr is the reason."""
_MAX_FAILED_SUPERVISORS = 8
_PAUSE_MILLISECONDS = 10
_TRY_AGAIN = 75
"""Exit code of a supervisor that could not start its child for lack of processes or memory, which others give back."""
_CLONE_NAMESPACES = (
    0x10000000 | 0x20000000 | 0x00020000 | 0x08000000 | 0x04000000 | 0x40000000
)  # user pid mnt ipc uts net
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_KEPT_FLAGS = 2 | 4 | 8  # nosuid nodev noexec
_INNER_UID = 1000
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1


def main() -> None:
    """Serve requests until the host closes the control socket."""
    config = json.loads(sys.argv[1])
    control = socket.socket(fileno=config["control_fd"])
    os.set_inheritable(control.fileno(), False)
    # A library that starts one thread per processor would use up the processes and the memory of each execution.
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
    sys.path += config["paths"]
    for name in config["preload"]:
        try:
            importlib.import_module(name)
        except Exception as error:  # a package may raise anything while it is imported
            _refuse_preload(f"cannot import {name} with {sys.executable}: {type(error).__name__}: {error}")
    with open("/proc/self/statm", "rb") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    if config["isolated"] and 2 * used > config["memory_bytes"]:
        _refuse_preload(
            f"the modules take {used} bytes of memory_bytes = {config['memory_bytes']}; at most half is possible"
        )
    if config["seccomp_path"]:
        with open(config["seccomp_path"], "rb") as file:
            config["seccomp"] = file.read()
    gc.collect()
    gc.freeze()
    serve(control, config)


def _refuse_preload(reason: str) -> NoReturn:
    os.write(2, " ".join(reason.split()).encode())
    sys.exit(PRELOAD_FAILED)


def serve(control: socket.socket, config: dict[str, Any]) -> None:
    """Keep `num_warm` supervisors waiting for requests; return when the host closes the control socket."""
    taken_read, taken_write = os.pipe()
    wake_read, wake_write = os.pipe()
    for fd in (taken_read, wake_read, wake_write):
        os.set_blocking(fd, False)
    signal.signal(signal.SIGCHLD, _ignore)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    poller = select.poll()
    poller.register(taken_read, select.POLLIN)
    poller.register(wake_read, select.POLLIN)
    poller.register(control, 0)  # only its end: the supervisors read it
    idle: set[int] = set()
    num_failed, quiet, lacks_processes, is_reported = 0, True, False, False
    while True:
        if lacks_processes:
            if not is_reported:
                os.write(2, b"no process or no memory is left for the next execution\n")
            is_reported = True
            time.sleep(_PAUSE_MILLISECONDS / 1000)
        lacks_processes = False
        while (
            not lacks_processes and len(idle) < config["num_warm"] and (quiet or len(idle) <= config["num_warm"] // 2)
        ):
            try:
                idle.add(_fork_supervisor(control, taken_write, (taken_read, wake_read, wake_write), config))
            except OSError:
                lacks_processes = True
        # Preparing a child takes a processor from the executions that have just started, so it waits for a pause.
        ready = poller.poll(_PAUSE_MILLISECONDS if len(idle) < config["num_warm"] else None)
        quiet = not ready
        if any(fd == control.fileno() for fd, _ in ready):
            return
        _read_available(wake_read)
        ended = _reap()
        idle -= {int(pid) for pid in _read_available(taken_read).split()}
        failed = [os.WEXITSTATUS(status) for pid, status in ended.items() if pid in idle]
        lacks_processes |= _TRY_AGAIN in failed
        num_failed = num_failed + len(failed) - failed.count(_TRY_AGAIN) if failed else 0
        idle -= ended.keys()
        if num_failed >= _MAX_FAILED_SUPERVISORS:
            sys.exit("the jail cannot prepare an execution")


def _ignore(number: int, frame: Optional[FrameType]) -> None:
    """Handle SIGCHLD: the wake-up descriptor reports it to the loop."""


def _reap() -> dict[int, int]:
    """Return the processes that have ended, and their statuses."""
    ended: dict[int, int] = {}
    try:
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = found[1]
    except ChildProcessError:  # none is left
        pass
    return ended


def _read_available(fd: int) -> bytes:
    try:
        return os.read(fd, 65536)
    except BlockingIOError:
        return b""


def _fork_supervisor(control: socket.socket, taken: int, server_fds: tuple[int, ...], config: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # Without the server nothing answers on the control socket, and the host sees that as soon as it is closed.
        jail_child.end_with_parent()
        for fd in server_fds:
            os.close(fd)
        _supervise(control, taken, config)
        code = 0
    except BaseException as error:  # after any error, this process must not return to the server's loop
        if isinstance(error, OSError) and error.errno in (errno.EAGAIN, errno.ENOMEM):
            code = _TRY_AGAIN
        else:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(code)


def _supervise(control: socket.socket, taken: int, config: dict[str, Any]) -> None:
    """Prepare a child, wait for one request, run it, answer."""
    home = "/tmp"
    group = jail_supervisor.MemoryGroup(config) if config["group"] else None
    if config["isolated"]:
        enter_namespaces(config)
    else:
        home = tempfile.mkdtemp(prefix="unsafe_sandbox_")
    try:
        pipes = jail_supervisor.Pipes()
        try:
            pid = os.fork()
        except OSError:
            if group is not None:
                group.remove()
            raise
        if pid == 0:
            if group is not None:
                group.enter()
            pipes.install_in_child()
            jail_child.main(config, home)
        pipes.close_child_ends()
        child = jail_supervisor.Child(pid, pipes, config, home, group)
        child.wait_until_prepared()
        connection = _receive_connection(control)
        if connection is None:
            return
        os.write(taken, b"%d " % os.getpid())
        control.close()
        child.serve(connection)
        if group is not None:
            group.remove()
    finally:
        if not config["isolated"]:
            jail_files.remove_folder(home)


def _receive_connection(control: socket.socket) -> Optional[socket.socket]:
    message, fds, _, _ = socket.recv_fds(control, 1, 1)
    return socket.socket(fileno=fds[0]) if message and fds else None


def enter_namespaces(config: dict[str, Any]) -> None:
    """Move this process into new namespaces, with one user and empty, limited file systems for temporary files."""
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.getuid(), os.getgid()
    check(libc.unshare(_CLONE_NAMESPACES), "unshare")
    for file, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{_INNER_UID} {uid} 1"),
        ("gid_map", f"{_INNER_UID} {gid} 1"),
    ):
        with open(f"/proc/self/{file}", "w") as map_file:
            map_file.write(text)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:  # programs talk to their own servers
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
    check(libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None), "mount /")
    if config["read_only_root"]:
        make_read_only(libc)
    tmp = f"size={config['disk_bytes']},nr_inodes={config['num_files']},mode=700"
    shm = f"size={config['shared_memory_bytes']},nr_inodes=64,mode=700"
    mount_tmpfs(libc, "/tmp", tmp)
    # Further folders are of the same file system, and so within its limits. /tmp itself is one of them, last.
    for folder in [*config["folders"], "/tmp"] if config["folders"] else []:
        source = "/tmp/" + folder.replace("/", "_")
        os.mkdir(source, 0o700)
        check(libc.mount(source.encode(), folder.encode(), None, _MS_BIND, None), f"mount {folder}")
    mount_tmpfs(libc, "/dev/shm", shm)
    if os.path.isdir("/dev/pts"):  # pseudo terminals are counted for the whole machine
        mount_tmpfs(libc, "/dev/pts", "size=4k,nr_inodes=1,mode=500", _MS_RDONLY)


def mount_tmpfs(libc: Any, target: str, options: str, flags: int = 0) -> None:
    """Mount an empty file system in memory."""
    result = libc.mount(b"tmpfs", target.encode(), b"tmpfs", _MS_NOSUID | _MS_NODEV | flags, options.encode())
    check(result, f"mount {target}")


def make_read_only(libc: Any) -> None:
    """Make all file systems read-only in this process's namespace, where bubblewrap has not done so.

    The child covers /proc with another one, after it has written there.
    """
    with open("/proc/self/mountinfo") as file:
        targets = {line.split()[4].encode().decode("unicode_escape") for line in file} - {"/proc"}
    for target in targets:
        try:
            flags = os.statvfs(target).f_flag & _KEPT_FLAGS
        except OSError:  # out of reach for the code too
            continue
        result = libc.mount(None, target.encode(), None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | flags, None)
        check(result, f"mount {target} read-only")


def check(result: int, what: str) -> None:
    """Raise an OSError for a system call that returned -1."""
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
