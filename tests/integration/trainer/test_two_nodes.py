"""A trainer on two hosts with their own network, torchrun's `--nnodes 2`, and random batches.

The hosts are namespaces that share a file system, so each one's heartbeat file stays fresh without the network.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli_w

from prime_rl.storage.paths import RunPaths
from prime_rl.supervisor.doctor.diagnosis import examine
from tests.support import network_hosts
from tests.support.command import PROGRESS_TIMEOUT_SECONDS, clean_environment, metrics_of, until
from tests.support.network_hosts import NetworkHost

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(500)]

MODEL = Path(__file__).parents[3] / "configs/reverse_text/model"
DIST_TIMEOUT_SECONDS = 20


class Trainer:
    """The hosts trainer1 and trainer2, and a rank on each."""

    def __init__(self, root: Path, hosts: list[NetworkHost]) -> None:
        self.root, self.hosts, self.paths = root, hosts, RunPaths(root / "run")
        self.processes: list[subprocess.Popen[bytes]] = []
        self.logged = [0, 0]

    def start(self, *directories: Path) -> None:
        """Start a rank on each host, with these run directories."""
        values = {
            "model": {"name": str(MODEL), "seq_len": 64}, "data": {"fake": {"batch_size": 2, "seq_len": 32}},
            "dist_timeout_seconds": DIST_TIMEOUT_SECONDS, "heartbeat": {"warn_after_seconds": 2},
        }  # fmt: skip
        (self.root / "trainer.toml").write_text(tomli_w.dumps(values))
        for rank, (host, directory) in enumerate(zip(self.hosts, directories, strict=True)):
            command = [
                sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(rank),
                "--nproc-per-node", "1", "--master-addr", self.hosts[0].name, "--master-port", "29500",
                "-m", "prime_rl.trainer.rl.train", "@", str(self.root / "trainer.toml"), "--output-dir", str(directory),
            ]  # fmt: skip
            self.processes.append(host.start(command, self.log(rank), clean_environment()))

    def log(self, rank: int) -> Path:
        return self.root / f"rank{rank}.log"

    def wait_for_step(self, count: int) -> None:
        until(lambda: len(metrics_of(self.paths, "trainer")) >= count, f"step {count}")

    def cut(self, host: int) -> None:
        """Take the network of a host away; `wait_for_lines` reads the logs from here on."""
        self.hosts[host].cut()
        self.logged = [self.log(rank).stat().st_size for rank in range(2)]

    def wait_for_lines(self, patterns: list[str]) -> None:
        """Wait until the log of each rank contains its line, once since the network was cut."""
        for rank, pattern in enumerate(patterns):
            until(lambda rank=rank, pattern=pattern: self.count(rank, pattern) > 0, pattern)  # type: ignore[misc]
            assert self.count(rank, pattern) == 1

    def count(self, rank: int, pattern: str) -> int:
        return len(re.findall(pattern.encode(), self.log(rank).read_bytes()[self.logged[rank] :]))

    def problems(self) -> list[str]:
        """Return what `doctor` finds."""
        return [problem.text for problem in examine(self.paths).problems]

    def wait_for_end(self) -> list[str]:
        """Wait until all ranks have ended with an error, and return the errors."""
        for process in self.processes:
            assert process.wait(PROGRESS_TIMEOUT_SECONDS) == 1
        logs = [self.log(rank).read_text().splitlines() for rank in range(len(self.processes))]
        return [next(line for line in log if line.startswith("error: ")) for log in logs]


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    if reason := network_hosts.missing():
        pytest.skip(f"network namespaces cannot be used: {reason}")
    with network_hosts.network_hosts(["trainer1", "trainer2"], like_debian=True) as hosts:
        yield Trainer(tmp_path, hosts)


def test_host_without_network_is_named_until_it_is_back_and_in_the_errors(trainer: Trainer) -> None:
    trainer.start(trainer.paths.root, trainer.paths.root)
    trainer.wait_for_step(2)
    trainer.cut(1)
    # A thread that runs late counts up to a second at once.
    trainer.wait_for_lines([f"no message from {name} for [23] s; a step that" for name in ("trainer2", "trainer1")])
    named = "on trainer2) sends nothing to trainer_0 on trainer1 for"  # by the next heartbeat
    until(lambda: any(named in text for text in trainer.problems()), named)
    trainer.hosts[1].reconnect()
    trainer.wait_for_lines([f"messages from {name} arrive again" for name in ("trainer2", "trainer1")])
    trainer.wait_for_step(len(metrics_of(trainer.paths, "trainer")) + 2)

    trainer.cut(0)
    first, second = trainer.wait_for_end()
    assert "rank 0 lost another rank" in first and "; no message from trainer2 for" in first
    assert "rank 1 lost another rank" in second and "; no message from trainer1 for" in second


def test_hosts_with_different_directories_end_before_the_model_is_loaded(trainer: Trainer) -> None:
    mine, other = trainer.root / "mine", trainer.root / "other"
    trainer.start(mine, other)
    errors = trainer.wait_for_end()
    assert set(errors) == {
        f"error: output_dir: {other} on trainer2 is not {mine} on trainer1: new files do not appear there; "
        "the nodes of a trainer need a shared directory, or relays and nodes_share_directory = false"
    }
    assert "exitcode  : 2" in trainer.log(0).read_text()
