"""Hosts of tests.support.network_hosts with a real sshd each, which accepts a key of the test."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from tests.support import network_hosts
from tests.support.command import alive, until
from tests.support.network_hosts import NetworkHost

CONFIG = """\
HostKey {folder}/host_key
PidFile none
AuthorizedKeysFile {folder}/authorized_keys
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
PasswordAuthentication yes
MaxStartups 100
"""


def missing() -> str:
    """Return why such hosts cannot be made on this machine; "" if they can."""
    if _sshd() is None:
        return "sshd is not installed"
    return network_hosts.missing()


@contextmanager
def ssh_hosts(names: Sequence[str], folder: Path, others: Sequence[str] = ()) -> Iterator[dict[str, NetworkHost]]:
    """Make hosts that reach each other, with sshd on all but the first; for `others` call `start_sshd`.

    `folder/bin/ssh` is the system's ssh with the key of the hosts' users.
    """
    folder.mkdir()
    for key in ("host_key", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    (folder / "authorized_keys").write_text((folder / "key.pub").read_text())
    (folder / "sshd_config").write_text(CONFIG.format(folder=folder))
    host_key = (folder / "host_key.pub").read_text()
    (folder / "known_hosts").write_text("".join(f"{name} {host_key}" for name in [*names, *others]))
    options = [f"IdentityFile {folder}/key", "IdentitiesOnly yes", f"UserKnownHostsFile {folder}/known_hosts"]
    (folder / "config").write_text("\n ".join(["Host *", "User root", *options]) + "\n")
    (folder / "bin").mkdir()
    program = folder / "bin" / "ssh"
    program.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/config "$@"\n')
    program.chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd's folder for its unprivileged process
    with network_hosts.network_hosts([*names, *others]) as made:
        for host in made[1 : len(names)]:
            start_sshd(host, folder)
        yield {host.name: host for host in made}


def start_sshd(host: NetworkHost, folder: Path, *options: str, hides: Path | None = None) -> None:
    """Start sshd on a host, and wait until it listens. Its users find an empty directory in place of `hides`."""
    log = folder / f"{host.name}.log"
    command = [str(_sshd()), "-D", "-e", "-f", str(folder / "sshd_config"), *options]
    if hides is not None:  # each host has its own mounts
        command = ["bash", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(hides), *command]
    sshd = host.start(command, log)
    until(lambda: "listening on 0.0.0.0" in log.read_text() or sshd.poll() is not None, "sshd")
    assert sshd.poll() is None, log.read_text()


def processes_on(host: NetworkHost) -> dict[psutil.Process, list[str]]:
    """Return the processes of a host with their command lines; that of a process that is ending can be empty.

    Those that belong to the host itself, sshd and what starts commands, are left out.
    """
    network = Path(f"/run/netns/{host.namespace}").stat().st_ino
    found = {}
    for process in psutil.process_iter():
        try:
            inside = os.stat(f"/proc/{process.pid}/ns/net").st_ino == network
            if inside and alive(process) and not _belongs_to_host(command := process.cmdline()):
                found[process] = command
        except (OSError, psutil.Error):  # it has just ended
            continue
    return found


def _belongs_to_host(command: Sequence[str]) -> bool:
    # The other end of a lost connection stays until sshd notices it.
    is_sshd = any("sshd_config" in word for word in command) or any("sshd:" in word for word in command[:1])
    return is_sshd or "hostname " in " ".join(command)


def _sshd() -> str | None:
    return shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
