"""Runs one command on several nodes, and ends it on all of them when it fails on one.

    python -m prime_rl.supervisor.remote_launch ssh node1,node2 -- COMMAND [ARGUMENT...]

The launcher, `ssh` or `srun`, starts a shell on each node that reads its script from stdin, so that no command line
shows the environment, which contains the API key. `{node_rank}` in the command becomes the index of the node. When this
process ends, its launchers end, and then what they started, because it asks the kernel to end with its parent.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from prime_rl.core.errors import ConfigError
from prime_rl.liveness.parent_process import NODE_VARIABLE, with_parent_death_signal

_LAUNCHERS = {
    "ssh": ["ssh", "-o", "BatchMode=yes", "{node}", "bash", "-s"],
    "srun": ["srun", "--overlap", "--nodes=1", "--ntasks=1", "--nodelist={node}", "bash", "-s"],
}
_OF_THE_NODE = ("HOME", "HOSTNAME", "LOGNAME", "OLDPWD", "PWD", "SHELL", "SHLVL", "TERM", "TMPDIR", "USER", "_")
_OF_THE_SESSION = ("SLURM", "SSH_", "XDG_", "DBUS_", "BASH_")
_POLL_SECONDS = 0.2
_END_SECONDS = 5.0


def slurm_nodes() -> list[str]:
    """Return the nodes of the Slurm job in which this process runs. Raises ConfigError outside of a job."""
    listed = os.environ.get("SLURM_JOB_NODELIST")
    if listed is None:
        raise ConfigError("nodes = slurm, but SLURM_JOB_NODELIST is not set: this is no Slurm job; name the nodes")
    done = subprocess.run(["scontrol", "show", "hostnames", listed], capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise ConfigError(f"nodes = slurm: scontrol cannot expand {listed}: {done.stderr.strip()}")
    return done.stdout.split()


def remote_command(launcher: str, nodes: Sequence[str], command: Sequence[str]) -> list[str]:
    """Return the command that runs `command` on the nodes."""
    return [sys.executable, "-m", "prime_rl.supervisor.remote_launch", launcher, ",".join(nodes), "--", *command]


def make_script(command: Sequence[str], environment: Mapping[str, str], directory: Path, node: str, rank: int) -> str:
    """Return the shell script that runs `command` on `node` with this environment, in the same directory."""
    kept = {
        name: value
        for name, value in environment.items()
        if name not in _OF_THE_NODE and not name.startswith(_OF_THE_SESSION) and name.isidentifier()
    }
    exports = [f"export {name}={shlex.quote(value)}" for name, value in {**kept, NODE_VARIABLE: node}.items()]
    words = [word.replace("{node_rank}", str(rank)) for word in command]
    lines = [*exports, f"cd {shlex.quote(str(directory))} || exit 1", f"exec {shlex.join(words)} < /dev/null"]
    return "\n".join(lines) + "\n"


def run_on_nodes(launcher: str, nodes: Sequence[str], command: Sequence[str]) -> int:
    """Run the command on all nodes; return 0, or the first other exit code, after ending the command on all nodes."""
    running: dict[str, subprocess.Popen[str]] = {}
    try:
        for rank, node in enumerate(nodes):
            argv = with_parent_death_signal([word.replace("{node}", node) for word in _LAUNCHERS[launcher]])
            running[node] = subprocess.Popen(argv, stdin=subprocess.PIPE, text=True)
            with running[node].stdin as script:  # type: ignore[union-attr]
                script.write(make_script(command, os.environ, Path.cwd(), node, rank))
        while running:
            for node, process in list(running.items()):
                if (code := process.poll()) is not None:
                    del running[node]
                    if code:
                        print(f"the command on {node} ended with exit code {code}", file=sys.stderr, flush=True)
                        return code if code > 0 else 128 - code
            time.sleep(_POLL_SECONDS)
        return 0
    finally:
        _end(list(running.values()))


def _end(processes: Sequence["subprocess.Popen[str]"]) -> None:
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + _END_SECONDS
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main() -> None:
    """Run the command line."""

    def stop(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    launcher, nodes, separator, *command = sys.argv[1:]
    assert separator == "--" and launcher in _LAUNCHERS, sys.argv
    sys.exit(run_on_nodes(launcher, nodes.split(","), command))


if __name__ == "__main__":
    main()
