"""A control group for each jail, where this process may create one: a limit of memory and processes for all of it.

Available as root, in a container with a writable hierarchy, and where systemd delegates one to the user. Elsewhere the
limits of each process remain.
"""

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PREFIX = "prime_rl_jail_"
_MAX_PROCESSES = 8192
_ENTER = 'for folder in $1; do echo $$ > "$folder/cgroup.procs" || exit 1; done; shift; exec "$@"'


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """A group, as one folder per hierarchy; `version` is 1 or 2."""

    folders: tuple[Path, ...]
    version: int

    def enter_command(self, user: int | None) -> list[str]:
        """Return the start of a command line that enters the group, and then becomes `user` if that is not None."""
        command = ["/bin/sh", "-c", _ENTER, "sh", " ".join(map(str, self.folders))]
        if user is not None:
            identity = [f"--reuid={user}", f"--regid={user}", "--clear-groups"]
            command += [str(shutil.which("setpriv")), *identity, "--"]
        return command

    def remove(self) -> bool:
        """Remove the group, after its processes have ended. Return False if the kernel still has one of them."""
        for folder in self.folders:
            with suppress(OSError):
                folder.rmdir()
        return not any(folder.exists() for folder in self.folders)


def create_control_group(memory_bytes: int, user: int | None) -> ControlGroup | None:
    """Return a new group with a limit of memory, or None if this process cannot create one.

    Args:
        user: the user that a command in the group becomes.
    """
    if user is not None and shutil.which("setpriv") is None:
        return None
    parents = _find_parents()
    if "" in parents:
        limits = {"memory.max": memory_bytes, "memory.swap.max": 0, "pids.max": _MAX_PROCESSES}
        for parent in (parents[""], parents[""].parent):
            if (folder := _create(parent, limits, enable=True)) is not None:
                return ControlGroup((folder,), 2)
        return None
    folders = list[Path]()
    for controller, limits in (
        ("memory", {"memory.limit_in_bytes": memory_bytes}),
        ("pids", {"pids.max": _MAX_PROCESSES}),
    ):
        folder = _create(parents[controller], limits, enable=False) if controller in parents else None
        if folder is None:
            ControlGroup(tuple(folders), 1).remove()
            return None
        folders.append(folder)
    return ControlGroup(tuple(folders), 1)


def _find_parents() -> dict[str, Path]:
    """Return the folders of this process's groups by controller; "" is the second version with memory and processes."""
    try:
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    except OSError:
        return {}
    return find_group_folders(groups, mounts)


def find_group_folders(groups: list[list[str]], mounts: list[list[str]]) -> dict[str, Path]:
    """Return folders by controller, from the fields of /proc/self/cgroup and /proc/self/mountinfo."""
    found: dict[str, Path] = {}
    for mount in mounts:
        kind, options = mount[mount.index("-") + 1], mount[-1].split(",")
        for _, names, path in groups:
            controllers = names.split(",")
            if (kind == "cgroup2" and names == "") or (kind == "cgroup" and set(controllers) <= set(options)):
                root, folder = mount[3], Path(mount[4])
                inside = path.removeprefix(root.rstrip("/")) if path.startswith(root.rstrip("/")) else ""
                found |= dict.fromkeys(controllers, folder / inside.lstrip("/"))
    if "" in found and "memory" not in _read(found[""] / "cgroup.controllers").split():
        del found[""]
    return found


def _create(parent: Path, limits: Mapping[str, int], *, enable: bool) -> Path | None:
    folder = parent / f"{_PREFIX}{os.getpid()}_{os.urandom(4).hex()}"
    try:
        _remove_left_behind(parent)
        if enable and "memory" not in _read(parent / "cgroup.subtree_control").split():
            (parent / "cgroup.subtree_control").write_text("+memory +pids")
        folder.mkdir()
        for name, value in limits.items():
            if (folder / name).exists():
                (folder / name).write_text(str(value))
    except OSError:
        with suppress(OSError):
            folder.rmdir()
        return None
    return folder


def _remove_left_behind(parent: Path) -> None:
    """Remove the groups of processes that were killed; one with processes in it stays."""
    for folder in parent.glob(f"{_PREFIX}*"):
        owner = folder.name.removeprefix(_PREFIX).partition("_")[0]
        if not Path("/proc", owner).exists():
            with suppress(OSError):
                folder.rmdir()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
