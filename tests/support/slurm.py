"""A Slurm cluster of several nodes on this machine: munged, slurmctld and one slurmd for each node, without systemd."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

COMMANDS = ("slurmctld", "slurmd", "munged", "sbatch", "srun")
_START_S = 60
_CONFIG = """\
ClusterName=local
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={root}/munge.socket
GresTypes=gpu
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdParameters=config_overrides
MailProg=/bin/true
KillWait=5
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/%n.pid
{nodes}
PartitionName=all Nodes=ALL Default=YES
"""


def missing() -> list[str]:
    """Return the commands that are not installed."""
    return [command for command in COMMANDS if shutil.which(command, path=_path()) is None]


class Slurm:
    """A running cluster, created by `start`.

    Attributes:
        nodes: names of the nodes.
        environment: environment of Slurm's commands.
    """

    def __init__(self, root: Path, nodes: list[str]) -> None:
        self.nodes = nodes
        self.environment = {**os.environ, "PATH": _path(), "SLURM_CONF": str(root / "slurm.conf")}

    def run(self, *command: str, timeout: float = 60, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's commands."""
        environment = {**self.environment, **variables}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)


@contextmanager
def start(root: Path, count: int, gpus: int) -> Iterator[Slurm]:
    """Run a cluster of `count` nodes with `gpus` GPUs each, which are regular files."""
    nodes = [f"n{number}" for number in range(1, count + 1)]
    slurm = Slurm(root, nodes)
    _configure(root, nodes, gpus)
    with ExitStack() as stack:
        log = stack.enter_context((root / "log").open("ab"))

        def daemon(*command: str) -> None:
            process = subprocess.Popen(
                command, env=slurm.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
            stack.callback(_end, process)

        munge = [f"--{name}-file={root}/munge.{name}" for name in ("pid", "log", "seed")]
        daemon("munged", "--foreground", "--force", f"--socket={root}/munge.socket", f"--key-file={root}/key", *munge)
        _wait_until((root / "munge.socket").exists, "munged", root)
        daemon("slurmctld", "-D")
        for node in nodes:
            daemon("slurmd", "-D", "-N", node)

        def all_idle() -> bool:
            return slurm.run("sinfo", "-h", "-t", "idle", "-o", "%D").stdout.strip() == str(count)

        _wait_until(all_idle, "Slurm", root)
        # Jobs of a failed test would outlive the daemons.
        stack.callback(_cancel_jobs, slurm, root)
        yield slurm


def _cancel_jobs(slurm: Slurm, root: Path) -> None:
    for job in slurm.run("squeue", "-h", "-o", "%A").stdout.split():
        slurm.run("scancel", "--signal=KILL", "--full", job)
        slurm.run("scancel", job)
    _wait_until(lambda: not slurm.run("squeue", "-h").stdout.strip(), "the end of all jobs of Slurm", root)


def _configure(root: Path, nodes: list[str], gpus: int) -> None:
    host = socket.gethostname().split(".")[0]
    user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    root.chmod(0o755)
    (root / "state").mkdir()
    for node in nodes:
        (root / "spool" / node).mkdir(parents=True)
    devices = [root / f"gpu{number}" for number in range(gpus)]
    for device in devices:
        device.touch()
    key = root / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    port, *ports = _free_ports(1 + len(nodes))
    lines = [
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={own} CPUs=2 RealMemory=1000 Gres=gpu:{gpus}"
        for node, own in zip(nodes, ports, strict=True)
    ]
    (root / "slurm.conf").write_text(_CONFIG.format(host=host, port=port, user=user, root=root, nodes="\n".join(lines)))
    (root / "gres.conf").write_text(f"NodeName={','.join(nodes)} Name=gpu File={','.join(map(str, devices))}\n")


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]


def _wait_until(holds: Callable[[], bool], what: str, root: Path) -> None:
    deadline = time.monotonic() + _START_S
    while not holds():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {_START_S} s for {what}:\n{(root / 'log').read_text()[-3000:]}")
        time.sleep(0.1)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(10)
        return
    process.kill()
    process.wait()


def _path() -> str:
    """Return PATH with Debian's folders of the daemons."""
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"
