"""Hosts as namespaces: each has its own network address, host name and process ids, as on several machines.

They share the file system. Needs root and the commands ip, tc and unshare.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

_INTERFACE = "eth0"
_SETTINGS = Path("/etc/netns")
"""`ip netns exec NAMESPACE` binds the files of a folder NAMESPACE over those in /etc."""
_STOP_SECONDS = 60
_calls = count()


@cache
def missing() -> str:
    """Return why hosts cannot be made on this machine; "" if they can."""
    if os.geteuid():
        return "needs root"
    if absent := [name for name in ("ip", "tc", "unshare") if _find(name) is None]:
        return f"{', '.join(absent)} not installed"
    try:
        with network_hosts(["probe"]) as (host,):
            host.limit_rate(10)
            done = host.start(["true"], Path(os.devnull))
            return "" if done.wait(_STOP_SECONDS) == 0 else "processes cannot get their own namespaces"
    except (OSError, subprocess.CalledProcessError) as error:
        return f"namespaces cannot be made: {error}"


@dataclass
class NetworkHost:
    """One host: its name and address, and the processes that were started on it."""

    name: str
    address: str
    namespace: str
    environment: Mapping[str, str]
    processes: "list[subprocess.Popen[bytes]]" = field(default_factory=list)

    def start(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[bytes]":
        """Start a command, whose output goes to `log`. All its processes end with it."""
        inner = f'hostname {self.name}; "$@"; exit $?'  # the shell is process 1 of the namespace
        program = [
            str(_find("ip")), "netns", "exec", self.namespace, str(_find("unshare")), "--uts", "--pid", "--fork",
            "--mount-proc", "--kill-child", "bash", "-c", inner, "bash", *command,
        ]  # fmt: skip
        variables = {**(os.environ if environment is None else environment), **self.environment}
        with log.open("ab") as output:
            process = subprocess.Popen(
                program, stdout=output, stderr=subprocess.STDOUT, env=variables, start_new_session=True
            )
        self.processes.append(process)
        return process

    def cut(self) -> None:
        """Take the network away: packets are lost, without any error to the senders."""
        _ip("link", "set", self._port, "down")

    def reconnect(self) -> None:
        """Undo `cut`."""
        _ip("link", "set", self._port, "up")

    def kill(self) -> None:
        """End all processes at once, as a power failure: the others get no packet."""
        self.cut()
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        self.wait()

    def limit_rate(self, megabytes_per_second: float) -> None:
        """Limit what the host sends and receives."""
        rate = f"{megabytes_per_second * 8:g}mbit"
        shape = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "100ms"]
        _run("tc", "qdisc", "replace", "dev", self._port, *shape)
        _ip("netns", "exec", self.namespace, str(_find("tc")), "qdisc", "replace", "dev", _INTERFACE, *shape)

    def bytes_received(self) -> int:
        """Bytes that arrived at the host since its start."""
        return int(Path(f"/sys/class/net/{self._port}/statistics/tx_bytes").read_text())

    def wait(self) -> None:
        """Wait until all processes have ended."""
        for process in self.processes:
            process.wait(_STOP_SECONDS)

    @property
    def _port(self) -> str:
        """The host's end at the bridge."""
        return f"{self.namespace}p"


@contextmanager
def network_hosts(names: Sequence[str], like_debian: bool = False) -> Iterator[list[NetworkHost]]:
    """Make hosts that reach each other, and remove them with their processes at the end.

    With `like_debian`, the own name of each host is that of its loopback interface.
    """
    # A number for each call: the kernel removes the devices of a namespace some time after the namespace.
    number = os.getpid() % 6000 * 10 + next(_calls) % 10
    bridge, subnet = f"pr{number}", f"10.{77 + number % 100}.{number // 100 % 250}"
    with ExitStack() as stack:
        _ip("link", "add", bridge, "type", "bridge")
        stack.callback(_ip, "link", "del", bridge)
        _ip("link", "set", bridge, "up")
        hosts = []
        addresses = {name: f"{subnet}.{index + 1}" for index, name in enumerate(names)}
        environment = {} if like_debian else {"GLOO_SOCKET_IFNAME": _INTERFACE}
        for index, name in enumerate(names):
            host = NetworkHost(name, addresses[name], f"pr{number}n{index}", environment)
            _ip("netns", "add", host.namespace)
            stack.callback(_ip, "netns", "del", host.namespace)
            settings = _SETTINGS / host.namespace
            settings.mkdir(parents=True, exist_ok=True)
            stack.callback(shutil.rmtree, settings)
            own = {name: "127.0.1.1"} if like_debian else {}
            known = {"localhost": "127.0.0.1", **addresses, **own}
            (settings / "hosts").write_text("".join(f"{address} {name}\n" for name, address in known.items()))
            _ip("link", "add", host._port, "type", "veth", "peer", "name", _INTERFACE, "netns", host.namespace)
            _ip("link", "set", host._port, "master", bridge, "up")
            for arguments in (
                ["addr", "add", f"{host.address}/24", "dev", _INTERFACE],
                ["link", "set", _INTERFACE, "up"],
                ["link", "set", "lo", "up"],
            ):
                _ip("-n", host.namespace, *arguments)
            stack.callback(_end, host)
            hosts.append(host)
        yield hosts


def _end(host: NetworkHost) -> None:
    for process in host.processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    host.wait()


def _find(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(name: str, *arguments: Any) -> None:
    subprocess.run([str(_find(name)), *arguments], check=True, capture_output=True)
