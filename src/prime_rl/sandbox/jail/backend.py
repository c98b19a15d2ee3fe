"""Builds the function that starts a jail: with bubblewrap, or without isolation."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from prime_rl.sandbox.execution import SandboxLimits
from prime_rl.sandbox.jail.bubblewrap import JAIL_UID, build_command, find_bubblewrap, find_interpreter
from prime_rl.sandbox.jail.jail import start_jail
from prime_rl.sandbox.jail.jail_pool import StartJail
from prime_rl.sandbox.jail.seccomp_filter import build_seccomp_filter


def build_start(
    *,
    isolated: bool,
    limits: SandboxLimits,
    num_warm: int,
    preload: Sequence[str],
    paths: Sequence[Path],
    python: Path | None,
    jail_memory_bytes: int,
) -> StartJail:
    """Return a function that starts a jail; arguments as in `Sandbox`.

    Raises:
        ConfigError: bubblewrap, libseccomp or a readable interpreter is missing.
    """
    user = JAIL_UID if isolated and os.getuid() == 0 else None
    interpreter = find_interpreter(user, python)
    folders = [path.resolve() for path in paths]
    wrapper = build_command(find_bubblewrap(), interpreter, folders) if isolated else []
    return partial(
        start_jail,
        wrapper,
        interpreter,
        limits,
        user=user,
        seccomp=build_seccomp_filter() if isolated else None,
        num_warm=num_warm,
        preload=tuple(preload),
        paths=folders,
        jail_memory_bytes=jail_memory_bytes if isolated else None,
    )
