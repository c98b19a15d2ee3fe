"""The command line of bubblewrap, and what a host lacks for it."""

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from prime_rl.core.errors import ConfigError

JAIL_UID = 64000
"""User of jails that root starts: limits on processes do not apply to root."""
_SYSTEM_FOLDERS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_READABLE_ETC = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d")


def find_bubblewrap() -> str:
    """Return the path of `bwrap`.

    Raises:
        ConfigError: it is not installed.
    """
    if (path := shutil.which("bwrap")) is None:
        raise ConfigError("bubblewrap is not installed, and the sandbox needs it; run: apt-get install bubblewrap")
    return path


def find_interpreter(jail_uid: int | None, wanted: Path | None = None) -> Path:
    """Return an interpreter that the user of the jail can read: `wanted`, this process's, or the system's.

    Raises:
        ConfigError: there is none.
    """
    own = Path(sys.base_prefix) / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    candidates = [wanted] if wanted else [own, Path("/usr/bin/python3"), Path("/usr/local/bin/python3")]
    for candidate in candidates:
        if candidate.exists() and _is_readable(candidate.resolve(), jail_uid):
            return candidate.resolve()
    names = ", ".join(map(str, candidates))
    raise ConfigError(
        f"no Python interpreter for the sandbox: {names} is missing or not readable by user {jail_uid or os.getuid()}; "
        "install one for all users: apt-get install python3"
    )


def _is_readable(path: Path, uid: int | None) -> bool:
    """Return whether a user can read a file; None is this process's user."""
    if uid is None:
        return os.access(path, os.R_OK | os.X_OK)
    try:
        return all(parent.stat().st_mode & stat.S_IXOTH for parent in path.parents) and bool(
            path.stat().st_mode & stat.S_IROTH
        )
    except OSError:
        return False


def interpreter_prefix(interpreter: Path) -> Path:
    """Return the installation folder of an interpreter in `<prefix>/bin`."""
    return interpreter.parent.parent


def build_command(bubblewrap: str, interpreter: Path, paths: Sequence[Path]) -> list[str]:
    """Return the command line up to the files of the fork server: a read-only system, no network, no home, no keys."""
    command = [bubblewrap, "--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    command += ["--unshare-cgroup-try", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"]
    command += ["--hostname", "sandbox", "--ro-bind", "/usr", "/usr"]
    for name in _SYSTEM_FOLDERS:
        folder = Path("/", name)
        if folder.is_symlink():
            command += ["--symlink", str(folder.readlink()), str(folder)]
        elif folder.is_dir():
            command += ["--ro-bind", str(folder), str(folder)]
    for file in _READABLE_ETC:
        command += ["--ro-bind-try", file, file]
    for folder in (interpreter_prefix(interpreter), *paths):
        if not folder.is_relative_to("/usr"):
            command += ["--ro-bind", str(folder), str(folder)]
    return [*command, "--proc", "/proc", "--dev", "/dev", "--dir", "/tmp", "--remount-ro", "/dev", "--chdir", "/"]


def explain_refusal(message: str) -> str:
    """Return one line with the reason why a jail did not start on this host, and the fix."""
    return f"the sandbox cannot isolate code on this host: {message.strip() or 'no message'}; {_find_fix(message)}"


def _find_fix(message: str) -> str:
    if _read_setting("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == "1":
        return (
            "AppArmor restricts user namespaces: create /etc/apparmor.d/bwrap with `abi <abi/4.0>, profile bwrap "
            "/usr/bin/bwrap flags=(unconfined) { userns, }` and run `systemctl reload apparmor`"
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
    return "allow user namespaces, or set sandbox.backend to another backend (docs/sandbox.md)"


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
