"""A Slurm cluster on this machine without systemd: munged, slurmctld, and one slurmd on each of several hosts.

The hosts are namespaces with their own addresses, names and process ids (`network_hosts`), which share the file system.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

from tests.support.network_hosts import NetworkHost, network_hosts
from tests.support.network_hosts import missing as missing_of_hosts

COMMANDS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "nsenter")
ENDED = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")
_ROOT = Path(__file__).parents[2]
_START_SECONDS = 240
_ASKED = 3
_ANSWER_SECONDS, _NODE_ANSWER_SECONDS = 100, 5
"""MessageTimeout of all others, whom a busy slurmctld lets wait, and of slurmctld, which notices a lost node by it."""
_CONTROLLER_CONFIG = "controller.conf"
_REVOKED_SECONDS = 2
"""A start in the second in which Slurm ends the one before fails: "Job credential revoked"."""
# `ip netns exec` hides the control groups, whose version slurmd wants to know.
_MOUNT_CGROUP = """
mount -t cgroup2 none /sys/fs/cgroup && [[ -s /sys/fs/cgroup/cgroup.controllers ]] && exit
umount /sys/fs/cgroup
mount -t tmpfs none /sys/fs/cgroup && mkdir /sys/fs/cgroup/systemd
mount -t cgroup -o none,name=systemd none /sys/fs/cgroup/systemd
"""
_CONFIG = """\
ClusterName=local
SlurmctldHost={login}({address})
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
SlurmdTimeout=20
MessageTimeout={message_timeout}
DebugFlags=NO_CONF_HASH
SchedulerParameters=sched_interval=2,bf_interval=2
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/%n.pid
{nodes}
PartitionName=all Nodes=ALL Default=YES
"""


def missing() -> str:
    """Return why no cluster can be made on this machine; "" if it can."""
    if absent := [command for command in COMMANDS if shutil.which(command, path=_path()) is None]:
        return f"{', '.join(absent)} not installed (Debian: munge slurmctld slurmd slurm-client iproute2)"
    return missing_of_hosts()


class Node:
    """A host that stays up when its daemon is killed."""

    def __init__(self, host: NetworkHost, environment: dict[str, str], log: Path) -> None:
        self.host, self._environment, self._log = host, environment, log
        self._slurmd: subprocess.Popen[bytes] | None = None
        self.boot()

    def boot(self) -> None:
        """Start the host, or start it again after `host.kill`."""
        self.host.reconnect()
        init = self.host.start(["sleep", "infinity"], self._log, self._environment)
        children: list[psutil.Process] = []
        _wait_until(lambda: bool(children.extend(psutil.Process(init.pid).children()) or children), "a host", self._log)
        self._init = children[0].pid
        subprocess.run(self.command("bash", "-c", _MOUNT_CGROUP), check=True)

    def command(self, *command: str) -> list[str]:
        """Return the command that runs `command` on this host."""
        folder = f"--wd={_ROOT}"
        return ["nsenter", f"--target={self._init}", "--mount", "--uts", "--net", "--pid", folder, *command]

    def start_slurmd(self) -> None:
        """Start the daemon of this node, again after `kill_slurmd`."""
        self._slurmd = start_daemon(self.command("slurmd", "-D", "-N", self.host.name), self._environment, self._log)

    def kill_slurmd(self) -> None:
        """Kill the daemon alone: the steps of its jobs keep running."""
        assert self._slurmd is not None
        [daemon] = psutil.Process(self._slurmd.pid).children()  # of nsenter
        daemon.kill()
        self._slurmd.wait()

    def processes(self) -> list[psutil.Process]:
        """Return the processes that run on this host, with `name` and `cmdline` in their `info`."""
        space = os.readlink(f"/proc/{self._init}/ns/pid")
        found = []
        for process in psutil.process_iter(["name", "cmdline", "status"]):
            with suppress(OSError):
                is_here = os.readlink(f"/proc/{process.pid}/ns/pid") == space
                if is_here and process.info["status"] != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found


class Slurm:
    """A running cluster, created by `start`.

    Attributes:
        nodes: by their names.
        environment: environment of Slurm's commands.
    """

    def __init__(self, login: Node, nodes: dict[str, Node], environment: dict[str, str]) -> None:
        self._login, self.nodes, self.environment = login, nodes, environment
        self._waiting_since: dict[str, float] = {}

    def run(self, *command: str, timeout: float = 240, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command on the login node."""
        environment = {**self.environment, **variables}
        argv = self._login.command(*command)
        return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=timeout)

    def job(self, number: str) -> dict[str, str]:
        """Return what `scontrol show job` prints, by key."""
        shown = self._ask("scontrol", "show", "job", number, "--oneliner")
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def hurried_job(self, number: str) -> dict[str, str]:
        """Return what `job` does. A job that was requeued starts at once instead of after two minutes.

        Call it repeatedly: Slurm sets the two minutes whenever it learns that a process of the first start has ended.
        """
        job = self.job(number)
        if job["JobState"] != "PENDING":
            self._waiting_since.pop(number, None)
        elif time.monotonic() - self._waiting_since.setdefault(number, time.monotonic()) > _REVOKED_SECONDS:
            self.run("scontrol", "update", f"JobId={number}", "StartTime=now")
        return job

    def jobs(self) -> list[str]:
        """Return the numbers of the jobs that wait or run."""
        return self._ask("squeue", "-h", "-o", "%A").split()

    def are_idle(self) -> bool:
        """Return whether no node has a job, or is down."""
        return self.run("sinfo", "-h", "-t", "idle", "-o", "%D").stdout.strip() == str(len(self.nodes))

    def _ask(self, *command: str) -> str:
        """Return what a command prints, asked again while a busy slurmctld does not answer within MessageTimeout."""
        for _ in range(_ASKED):
            answer = self.run(*command)
            if answer.returncode == 0:
                return answer.stdout
        raise AssertionError(f"{' '.join(command)}: {answer.stderr}")


@contextmanager
def start(root: Path, count: int, gpus: int) -> Iterator[Slurm]:
    """Run a cluster of `count` nodes, n1, n2, ..., with `gpus` GPUs each, which are regular files."""
    names = [f"n{number}" for number in range(1, count + 1)]
    environment = {**os.environ, "PATH": _path(), "SLURM_CONF": str(root / "slurm.conf")}
    log = root / "log"
    with network_hosts(["login", *names]) as (login_host, *hosts), ExitStack() as stack:
        _configure(root, login_host, names, gpus)
        login = Node(login_host, environment, log)
        nodes = {host.name: Node(host, environment, log) for host in hosts}
        slurm = Slurm(login, nodes, environment)
        munge = [f"--{name}-file={root}/munge.{name}" for name in ("pid", "log", "seed")]
        socket = root / "munge.socket"
        munged = start_daemon(
            ["munged", "--foreground", "--force", f"--socket={socket}", f"--key-file={root}/key", *munge],
            environment,
            log,
        )
        stack.callback(_end, munged)
        _wait_until(socket.exists, "munged", log)
        controller = login.command("slurmctld", "-D", "-f", str(root / _CONTROLLER_CONFIG))
        stack.callback(_end, start_daemon(controller, environment, log))
        for node in nodes.values():
            node.start_slurmd()
        _wait_until(slurm.are_idle, "Slurm", log)
        yield slurm


def start_daemon(command: Sequence[str], environment: dict[str, str], log: Path) -> "subprocess.Popen[bytes]":
    """Start a process that survives signals to this one's group."""
    with log.open("ab") as output:
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )


def _configure(root: Path, login: NetworkHost, names: list[str], gpus: int) -> None:
    user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    root.chmod(0o755)
    (root / "state").mkdir()
    for name in names:
        (root / "spool" / name).mkdir(parents=True)
    devices = [root / f"gpu{number}" for number in range(gpus)]
    for device in devices:
        device.touch()
    key = root / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    lines = [f"NodeName={name} CPUs=2 RealMemory=1000 Gres=gpu:{gpus}" for name in names]
    values = {"login": login.name, "address": login.address, "user": user, "root": root, "nodes": "\n".join(lines)}
    for file, seconds in (("slurm.conf", _ANSWER_SECONDS), (_CONTROLLER_CONFIG, _NODE_ANSWER_SECONDS)):
        (root / file).write_text(_CONFIG.format(**values, message_timeout=seconds))
    (root / "gres.conf").write_text(f"NodeName={','.join(names)} Name=gpu File={','.join(map(str, devices))}\n")


def _wait_until(holds: Callable[[], bool], what: str, log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not holds():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {_START_SECONDS} s for {what}:\n{log.read_text()[-3000:]}")
        time.sleep(0.1)


def _end(process: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(60)
        return
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _path() -> str:
    """Return PATH with Debian's folders of the daemons."""
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"
