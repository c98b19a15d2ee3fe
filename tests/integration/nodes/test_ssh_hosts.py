"""`rl --nodes` over a real ssh: each host has its own network, processes and sshd (tests.support.ssh_hosts)."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import tomli_w

from prime_rl.storage.checkpoint_artifacts import find_checkpoints
from prime_rl.storage.paths import RunPaths
from tests.support import ssh_hosts
from tests.support.command import RUN_TIMEOUT_SECONDS, clean_environment, json_lines, metrics_of, until
from tests.support.network_hosts import NetworkHost
from tests.support.ssh_hosts import processes_on, start_sshd

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[3]
NAMES = ["head", "inference1", "inference2", "trainer1", "trainer2", "locked", "bare", "elsewhere"]
RANK, ENGINE = "prime_rl.trainer.rl.train", "VLLM::EngineCore"
DEAD_SECONDS = 30
"""Above the time in which TCP sends again what a cut of a few seconds has lost: it doubles, from 6 to 13 and 25 s."""
AGENT, TORCHRUN = "prime_rl.supervisor.nodes.node_agent", "prime_rl.trainer.torchrun"


@dataclass
class Hosts:
    """The hosts, and the runs that `head` has started."""

    hosts: dict[str, NetworkHost]
    folder: Path
    runs: "list[Run]" = field(default_factory=list)

    def start(self, name: str, *arguments: str, **values: Any) -> "Run":
        """Start `rl` on `head` with configs/reverse_text/cpu.toml, smaller batches and these values."""
        output = self.folder / "runs" / name
        values = {
            "output_dir": str(output), "trainer_ranks": 1, "ckpt": {"interval": 5},
            "heartbeat": {"warn_after_seconds": 2, "dead_after_seconds": DEAD_SECONDS},
            "orchestrator": {"batch_size": 128}, **values,
        }  # fmt: skip
        file = self.folder / f"{name}.toml"
        file.write_text(tomli_w.dumps(values))
        environment = clean_environment() | {"INFERENCE_SERVER_IP": "192.0.2.1"}  # it is not for the servers of `rl`
        environment["PATH"] = f"{self.folder}/ssh/bin:{environment['PATH']}"
        command = [sys.executable, "-m", "prime_rl.entrypoints.rl", "@", str(ROOT / "configs/reverse_text/cpu.toml")]
        log = self.folder / f"{name}.log"
        process = self.hosts["head"].start([*command, "@", str(file), *arguments], log, environment)
        self.runs.append(Run(process, log, RunPaths(output), self))
        return self.runs[-1]

    def left(self) -> list[tuple[str, str]]:
        """Processes of runs on all hosts."""
        return [(host.name, " ".join(line)) for host in self.hosts.values() for line in processes_on(host).values()]

    def find(self, host: str, word: str) -> psutil.Process:
        """Return the process on `host` whose command line has `word`; not the agent that started it."""
        lines, launchers = processes_on(self.hosts[host]), {AGENT, TORCHRUN}
        matching = {one for one, line in lines.items() if any(part.startswith(word) for part in line)}
        [found] = [one for one in matching if not launchers & set(lines[one])]
        return found


@dataclass
class Run:
    """A run that `head` has started."""

    process: "subprocess.Popen[bytes]"
    log: Path
    paths: RunPaths
    hosts: Hosts

    @property
    def output(self) -> str:
        """What `rl` has printed."""
        return self.log.read_text()

    @property
    def events(self) -> list[tuple[str, str]]:
        """Kind and name of the events."""
        return [(one["event"], one["name"]) for one in json_lines(self.paths.events)]

    def until_step(self, step: int) -> None:
        """Wait until the trainer has reported `step`."""
        self.until(lambda: len(metrics_of(self.paths, "trainer")) > step, f"step {step}")

    def until(self, condition: Any, what: str) -> None:
        """Wait; fail if `rl` ends before."""
        until(lambda: condition() or self.process.poll() is not None, f"{what}\n{self.output}")
        assert condition(), f"rl ended with {self.process.poll()} before {what}:\n{self.output}"

    def end(self, timeout_seconds: float = RUN_TIMEOUT_SECONDS) -> int:
        """Wait for the end, after which no process is left on any host; return the exit code."""
        code = self.process.wait(timeout_seconds)
        until(lambda: not self.hosts.left(), f"the end of {self.hosts.left()}")
        return code


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """All hosts. `locked` asks for a password, `bare` has no checkout, and `elsewhere` has other run directories."""
    if reason := ssh_hosts.missing():
        pytest.skip(f"hosts with sshd cannot be made: {reason}")
    folder = tmp_path_factory.mktemp("hosts")
    (folder / "runs").mkdir()
    with ssh_hosts.ssh_hosts(NAMES[:5], folder / "ssh", others=NAMES[5:]) as hosts:
        start_sshd(hosts["locked"], folder / "ssh", "-o", "AuthorizedKeysFile=none")
        start_sshd(hosts["bare"], folder / "ssh", hides=ROOT)
        start_sshd(hosts["elsewhere"], folder / "ssh", hides=folder / "runs")
        yield Hosts(hosts, folder)


@pytest.fixture
def hosts(world: Hosts) -> Iterator[Hosts]:
    """The hosts, without processes of runs before and after."""
    yield world
    for run in world.runs:
        if run.process.poll() is None:
            run.process.kill()
    until(lambda: not world.left(), "the end of a failed run")


def test_run_learns_and_survives_the_loss_of_a_rank_and_of_the_network(hosts: Hosts) -> None:
    steps = 40
    run = hosts.start("learns", "--nodes", "inference1,trainer1,trainer2", "--max-restarts", "1", max_steps=steps)
    run.until_step(6)
    rank = hosts.find("trainer2", RANK)
    rank.send_signal(signal.SIGKILL)
    run.until(lambda: ("restarted", "trainer") in run.events, "the restart of the trainer")
    assert "on trainer2) was killed by SIGKILL" in run.output
    run.until_step(12)
    hosts.hosts["trainer2"].cut()
    run.until(lambda: ("silent", "node_trainer2") in run.events, "a warning")
    hosts.hosts["trainer2"].reconnect()
    assert run.end() == 0, run.output
    assert ("resumed", "node_trainer2") in run.events
    assert "node_trainer2 (pid" in run.output
    rows = metrics_of(run.paths, "orchestrator")
    assert [row["step"] for row in rows] == list(range(steps))
    assert max(row["staleness/max"] for row in rows) <= 2
    rewards = [row["reward/mean"] for row in rows]
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 0.25, rewards


def test_lost_host_is_named_and_ends_its_processes(hosts: Hosts) -> None:
    run = hosts.start("lost", "--nodes", "inference1,trainer1,trainer2")
    run.until_step(2)
    cut = hosts.hosts["trainer2"]
    cut.cut()
    try:
        started = time.monotonic()
        assert run.end() == 1, run.output
        assert time.monotonic() - started > DEAD_SECONDS / 2
    finally:
        cut.reconnect()
    assert ("killed", "node_trainer2") in run.events
    assert "node_trainer2 (pid" in run.output.splitlines()[-1], run.output


def test_server_over_two_hosts_restarts_as_a_whole_and_sigterm_saves_a_checkpoint(hosts: Hosts) -> None:
    arguments = ["--inference-nodes", "2", "--inference.parallel.dp-local", "1", "--max-restarts", "1"]
    run = hosts.start("wide", "--nodes", "inference1,inference2,trainer1", *arguments, ckpt={"interval": 1000})
    run.until_step(1)
    hosts.find("inference2", ENGINE).send_signal(signal.SIGKILL)
    run.until(lambda: ("restarted", "inference") in run.events, "the restart of the server")
    assert "EngineCore_DP1" in run.output
    run.until_step(len(metrics_of(run.paths, "trainer")) + 4)
    hosts.find("head", "prime_rl.entrypoints.rl").send_signal(signal.SIGTERM)
    assert run.end() == 128 + signal.SIGTERM, run.output
    assert [name for event, name in run.events if event == "restarted"] == ["inference"]
    assert find_checkpoints(run.paths.checkpoints_dir).steps, run.output


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ("unknown", "nodes: a command cannot be started on unknown by ssh: ssh: Could not resolve hostname unknown"),
        ("locked", "nodes: a command cannot be started on locked by ssh: root@locked: Permission denied"),
        ("bare", "nodes: bare has no such checkout: bash: line"),
        ("elsewhere", "nodes: elsewhere has another run directory: "),
    ],
)
def test_host_that_cannot_work_is_refused_before_anything_starts(hosts: Hosts, node: str, message: str) -> None:
    run = hosts.start(f"refused_{node}", "--nodes", f"inference1,{node}")
    assert run.end() == 2
    last = run.output.splitlines()[-1]
    assert last.startswith(f"error: {message}"), run.output
    assert not run.paths.events.exists()
