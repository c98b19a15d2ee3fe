"""Runs a command on a node for `node_launcher`, at the other end of ssh or srun, and leaves no process behind (I7).

    python -m prime_rl.supervisor.nodes.node_agent SILENCE_SECONDS GRACE_SECONDS COMMAND [ARGUMENT...]

stdin gets a line each second, and stdout the answers. The end of stdin ends the command in order: `rl` asks for it, or
has ended, or ssh has. After a silence the command is killed: this node or that of `rl` has lost its network, and ssh
would notice that after minutes at the earliest. `rl` uses the same limit, so the node is free when it starts again.
The output of the command goes to stderr.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from prime_rl.liveness.parent_process import become_subreaper, with_parent_death_signal
from prime_rl.supervisor.child_processes import descendants, kill_all
from prime_rl.supervisor.nodes.node_launcher import ANSWER

_KILL_SECONDS = 30.0
_SILENCE_PARTS = 4
"""A silence is that many parts without a line: an agent that was suspended itself first reads what has arrived."""


async def run_command(command: Sequence[str], silence_seconds: float, grace_seconds: float) -> int:
    """Run the command until it ends or must end; return its exit code, or minus the signal that killed it.

    No descendant is left, except those that cannot be killed.
    """
    become_subreaper()
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, stopped.set)
    argv = with_parent_death_signal(command)
    process = await asyncio.create_subprocess_exec(*argv, stdin=asyncio.subprocess.DEVNULL, stdout=sys.stderr)
    exited = asyncio.ensure_future(process.wait())
    following = asyncio.ensure_future(_follow_launcher(silence_seconds))
    stopping = asyncio.ensure_future(stopped.wait())
    ends: set[asyncio.Future[Any]] = {exited, following, stopping}
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    if not exited.done():
        if following.done() and not following.result():
            _write(sys.stdout.fileno(), f"{ANSWER} silent")  # read if the network returns
        else:
            process.terminate()
            await asyncio.wait({exited}, timeout=grace_seconds)
    following.cancel()
    stopping.cancel()
    await kill_all(descendants, _KILL_SECONDS, own={process.pid})
    return await exited


async def _follow_launcher(silence_seconds: float) -> bool:
    """Answer the launcher; return True at the end of stdin, and False after a silence."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    num_silent = 0
    _write(sys.stdout.fileno(), f"{ANSWER} alive {os.getpid()}")
    while num_silent < _SILENCE_PARTS:
        try:
            async with asyncio.timeout(silence_seconds / _SILENCE_PARTS):
                if not await reader.readline():
                    return True
        except TimeoutError:
            num_silent += 1
        else:
            num_silent = 0
            _write(sys.stdout.fileno(), f"{ANSWER} alive {os.getpid()}")
    return False


def _write(file: int, line: str) -> None:
    with suppress(OSError):  # the connection has ended
        os.write(file, f"{line}\n".encode())


def main() -> None:
    """Run the command of the command line, and report its exit code to the launcher."""
    silence, grace, *command = sys.argv[1:]
    code = asyncio.run(run_command(command, float(silence), float(grace)))
    _write(sys.stdout.fileno(), f"{ANSWER} ended {code}")
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
