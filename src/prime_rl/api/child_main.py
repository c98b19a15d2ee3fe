"""`python -m prime_rl.api.child_main PARENT COMMAND ...`: a command that ends when the program that started it ends.

The program's exit is watched through a pidfd, which also notices SIGKILL and a restarted notebook kernel. A pipe would
stay open in forked children of the program, and the parent-death signal of Linux follows the thread that started the
process, which in a program with threads can end earlier than the program.
"""

import importlib
import os
import select
import signal
import sys
import threading

from prime_rl.core.entry_point import run_main

_STOP_SECONDS = 5.0
"""Time for an orderly end after SIGTERM, before the process group is killed. `rl` has its own limit."""


def main() -> None:
    """Run a command of prime-rl, or a module `package.module` with a `main`, with the remaining arguments."""
    parent, command, *arguments = sys.argv[1:]
    _end_with(int(parent), kill=command != "rl")
    sys.argv = [command, *arguments]
    if command == "rl":
        run_main(_run_rl)
    else:
        module = "prime_rl_page.__main__" if command == "page" else f"prime_rl.entrypoints.{command}"
        importlib.import_module(command if "." in command else module).main()


def _run_rl() -> None:
    from prime_rl.configs.rl import RLConfig
    from prime_rl.supervisor.input_check import InputCheck
    from prime_rl.supervisor.launch import run

    with InputCheck() as check:
        sys.exit(run(RLConfig.load(), check, keep_serving=True))


def _end_with(parent: int, kill: bool) -> None:
    """End this process when its parent exits; with `kill`, kill the process group if that takes too long."""
    try:
        descriptor = os.pidfd_open(parent)
    except ProcessLookupError:
        sys.exit(1)
    if os.getppid() != parent:
        sys.exit(1)
    threading.Thread(target=_watch, args=(descriptor, kill), daemon=True).start()


def _watch(descriptor: int, kill: bool) -> None:
    select.select([descriptor], [], [])
    os.kill(os.getpid(), signal.SIGTERM)
    if kill:
        threading.Event().wait(_STOP_SECONDS)
        os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main()
