"""Runs one command on several nodes, and ends it on all of them when it fails on one.

    python -m prime_rl.supervisor.nodes.node_launcher [OPTION...] -- COMMAND [ARGUMENT...]

    this process --> ssh or srun --> bash: environment, directory --> node_agent --> COMMAND

The launcher, `ssh` or `srun`, starts a shell on each node that reads its script from stdin, so that no command line
shows the environment, which contains the API key. The script ends as the node's agent (`node_agent`), which answers a
line on stdin each second. Each answer becomes a heartbeat of the node, so that `rl` reports and ends a node that is
silent. The agent ends the command when its stdin ends, or after the same silence. The launcher tries to reach a
node for the same time, so that a restart waits for a node or network that was lost.

`{node_rank}` in the command becomes the index of the node.
"""

import argparse
import asyncio
import os
import shlex
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_rl.core.entry_point import write_error_file
from prime_rl.core.os_errors import signal_name
from prime_rl.liveness.heartbeat_writer import NodeHeartbeat
from prime_rl.liveness.parent_process import NODE_VARIABLE, with_parent_death_signal
from prime_rl.storage.paths import RunPaths

# The options hold for each ssh, whatever the user's configuration says: no question, no pseudo terminal, no shared
# connection whose end would be unnoticed, and no banner in the log.
_SSH = ["ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ControlPath=none", "-o", "LogLevel=ERROR"]
LAUNCHERS = {
    "ssh": [*_SSH, "{node}", "bash", "-s"],
    "srun": ["srun", "--overlap", "--nodes=1", "--ntasks=1", "--nodelist={node}", "bash", "-s"],
}
ANSWER = "prime_rl.node"
"""First word of the lines that the agent writes to stdout: `alive PID`, and as the last one `ended CODE`, or `silent`
before it."""
PING_SECONDS = 1.0

_OF_THE_NODE = ("HOME", "HOSTNAME", "LOGNAME", "OLDPWD", "PWD", "SHELL", "SHLVL", "TERM", "TMPDIR", "USER", "_")
_OF_THE_SESSION = ("SLURM", "SSH_", "XDG_", "DBUS_", "BASH_")
_END_MARGIN_SECONDS = 2.0
"""From the end of the agent's grace time to that of its launcher."""
_RECONNECT_SECONDS = 1.0
_NO_CONNECTION = 255
"""Exit code of ssh."""
_SIBLING_SECONDS = 1.0
"""Time for the command to fail on the other nodes too, after a failure on one: one of them may know the cause."""


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """How a command runs on nodes.

    Attributes:
        launcher: `ssh` or `srun`.
        nodes: their names.
        role: name of the child process of `rl` that runs them.
        output_dir: run directory, for the heartbeats of the nodes.
        grace_seconds: time for an orderly end on the nodes.
        silence_seconds: an agent ends its command after this time without a line from here, and a node that cannot be
            reached is given up.
    """

    launcher: str
    nodes: Sequence[str]
    role: str
    output_dir: Path
    grace_seconds: float
    silence_seconds: float


def remote_command(options: RemoteOptions, command: Sequence[str]) -> list[str]:
    """Return the command that runs `command` on the nodes."""
    return [
        sys.executable, "-m", "prime_rl.supervisor.nodes.node_launcher", "--launcher", options.launcher,
        "--nodes", ",".join(options.nodes), "--role", options.role, "--output-dir", str(options.output_dir.absolute()),
        "--grace-seconds", str(options.grace_seconds), "--silence-seconds", str(options.silence_seconds),
        "--", *command,
    ]  # fmt: skip


def make_script(command: Sequence[str], environment: Mapping[str, str], directory: Path, node: str, rank: int) -> str:
    """Return the shell script that runs `command` on `node` with this environment, in the same directory."""
    kept = {
        name: value
        for name, value in environment.items()
        if name not in _OF_THE_NODE and not name.startswith(_OF_THE_SESSION) and name.isidentifier()
    }
    exports = [f"export {name}={shlex.quote(value)}" for name, value in {**kept, NODE_VARIABLE: node}.items()]
    words = [word.replace("{node_rank}", str(rank)) for word in command]
    lines = [*exports, f"cd {shlex.quote(str(directory))} || exit 1", f"exec {shlex.join(words)}"]
    return "\n".join(lines) + "\n"


class RemoteCommand:
    """The command on one node.

    Attributes:
        ended: resolves to its exit code, minus the signal's number if one killed it; None if the connection was lost.
        has_started: the agent has answered.
        was_silent: the agent has heard nothing for too long.
    """

    def __init__(self, options: RemoteOptions, command: Sequence[str], rank: int) -> None:
        self.node = options.nodes[rank]
        self._options, self._rank = options, rank
        limits = map(str, (options.silence_seconds, options.grace_seconds))
        self._command = [sys.executable, "-m", "prime_rl.supervisor.nodes.node_agent", *limits, *command]
        self._heartbeat = NodeHeartbeat(RunPaths(options.output_dir), self.node, options.role)
        self._process: Process | None = None
        self._code: int | None = None
        self.has_started = self.was_silent = self._stopped = False
        self.ended = asyncio.ensure_future(self._run())

    def stop(self) -> None:
        """End the command on the node: close the stdin of its agent."""
        self._stopped = True
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    async def end_connection(self) -> None:
        """Terminate the local ssh or srun process if it still runs."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.terminate()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_END_MARGIN_SECONDS):
                        await self._process.wait()
                        return
                self._process.kill()

    async def _run(self) -> int | None:
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._options.silence_seconds
        while True:
            status = await self._connect()
            if self.has_started or self._stopped or status != _NO_CONNECTION or clock() > deadline:
                return self._code
            await asyncio.sleep(_RECONNECT_SECONDS)

    async def _connect(self) -> int:
        """Run the command until the connection ends; return the exit code of the launcher."""
        argv = [word.replace("{node}", self.node) for word in LAUNCHERS[self._options.launcher]]
        self._process = process = await asyncio.create_subprocess_exec(
            *with_parent_death_signal(argv), stdin=PIPE, stdout=PIPE
        )
        assert process.stdin is not None
        process.stdin.write(make_script(self._command, os.environ, Path.cwd(), self.node, self._rank).encode())
        pinging = asyncio.ensure_future(self._ping(process.stdin))
        try:
            await self._read_answers(process)
            return await process.wait()
        finally:
            pinging.cancel()
            self._heartbeat.remove()

    async def _ping(self, pipe: asyncio.StreamWriter) -> None:
        while not pipe.is_closing():
            pipe.write(b"\n")
            await asyncio.sleep(PING_SECONDS)

    async def _read_answers(self, process: Process) -> None:
        """Read until the agent ends. Other lines, for example of a profile of the shell, go to the log."""
        assert process.stdout is not None
        async for line in process.stdout:
            match line.decode(errors="replace").split():
                case [word, "alive", pid] if word == ANSWER:
                    self.has_started = True
                    self._heartbeat.write(int(pid))
                case [word, "ended", code] if word == ANSWER:
                    self._code = int(code)
                case [word, "silent"] if word == ANSWER:
                    self.was_silent = True
                case _:
                    sys.stderr.buffer.write(line)
                    sys.stderr.flush()


async def run_on_nodes(options: RemoteOptions, command: Sequence[str]) -> int:
    """Run the command on all nodes; return 0, or the first other exit code, after ending the command on all nodes."""
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[int] = loop.create_future()

    def stop(number: int) -> None:
        if not stopped.done():
            stopped.set_result(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    running = [RemoteCommand(options, command, rank) for rank in range(len(options.nodes))]
    try:
        while left := {one.ended for one in running if not one.ended.done()}:
            events: set[asyncio.Future[Any]] = {stopped, *left}
            await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
            if stopped.done():
                return stopped.result()
            if any(one.ended.done() and one.ended.result() != 0 for one in running):
                return await _report(running, options)
        return 0
    finally:
        for one in running:
            one.stop()
        ends = [one.ended for one in running]
        await asyncio.wait(ends, timeout=options.grace_seconds + _END_MARGIN_SECONDS)
        await asyncio.gather(*(one.end_connection() for one in running))
        await asyncio.gather(*ends)


async def _report(running: Sequence[RemoteCommand], options: RemoteOptions) -> int:
    """Write what has failed, after waiting for the others to fail too; return the exit code."""
    if left := [one.ended for one in running if not one.ended.done()]:
        await asyncio.wait(left, timeout=_SIBLING_SECONDS)
    failed = [one for one in running if one.ended.done() and one.ended.result() != 0]
    lost = [one for one in failed if (one.ended.result() or -1) < 0]  # the others have failed because of it
    first = (lost or failed)[0]
    code = first.ended.result()
    if first.was_silent:
        what = f"{first.node} had no message from rl for {options.silence_seconds:g} s, and killed its processes"
    elif code is None and not first.has_started:
        what = f"{options.launcher} cannot start the command on {first.node}; see its message in the log"
    elif code is None:
        what = f"the connection to {first.node} by {options.launcher} was lost"
    elif code < 0:
        what = f"the command on {first.node} was killed by {signal_name(-code)}"
    else:
        what = f"the command on {first.node} exited with code {code}"
    print(what, file=sys.stderr, flush=True)
    status = 1 if code is None else code if code > 0 else 128 - code
    write_error_file(what, status, replace=bool(lost))  # otherwise the command has reported its error itself
    return status


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--launcher", choices=sorted(LAUNCHERS), required=True)
    parser.add_argument("--nodes", type=lambda text: text.split(","), required=True)
    parser.add_argument("--role", required=True)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--grace-seconds", type=float, required=True)
    parser.add_argument("--silence-seconds", type=float, required=True)
    separator = sys.argv.index("--")
    options = RemoteOptions(**vars(parser.parse_args(sys.argv[1:separator])))
    sys.exit(asyncio.run(run_on_nodes(options, sys.argv[separator + 1 :])))


if __name__ == "__main__":
    main()
