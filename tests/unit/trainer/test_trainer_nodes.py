"""Nodes of a trainer share a directory, and notice a node without messages; errors name it (I7). Network: loopback."""

import os
import re
import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from prime_rl.core.errors import ConfigError, RunError
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.storage.paths import RunPaths
from prime_rl.trainer import trainer_nodes
from prime_rl.trainer.trainer_nodes import TrainerNodeMonitor, join_nodes
from tests.support.command import until
from tests.unit.trainer.world import run_world


def join(world, arguments):
    """Runs on every rank; returns the use of the directory, or the error and what its directory then contains.

    With `error`, the ranks raise it in the block, the first with a silent host in its heartbeat.
    """
    ranks_per_node = arguments["ranks_per_node"]
    node, local = divmod(world.rank, ranks_per_node)
    os.environ |= {"LOCAL_WORLD_SIZE": str(ranks_per_node), "LOCAL_RANK": str(local)}
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(int(arguments.get("is_restart", False) and node))
    paths = RunPaths(Path(arguments["directories"][node]))
    heartbeat = HeartbeatWriter(paths, f"trainer_{world.rank}", "trainer")
    try:
        with join_nodes(paths, world, heartbeat, is_shared=arguments.get("is_shared", True)) as directory:
            heartbeat.report_silent_hosts({"node7": 21.4} if world.rank == 0 else {})
            if "error" in arguments:
                raise RunError(arguments["error"])
            return [directory.num_writers, directory.is_main]
    except (ConfigError, RunError) as error:
        return [type(error).__name__, str(error), sorted(map(str, paths.root.glob("*")))]


def join_on(num_ranks, tmp_path, directories, ranks_per_node=1, **more):
    arguments = {"directories": list(map(str, directories)), "ranks_per_node": ranks_per_node, **more}
    return run_world(num_ranks, join, arguments, tmp_path)


def test_nodes_with_one_directory_start_and_errors_name_the_silent_host(tmp_path):
    first, second = join_on(2, tmp_path, [tmp_path / "run"] * 2, error="the step failed")
    assert first == ["RunError", "the step failed; no message from node7 for 21 s", []], "the compared file is removed"
    assert second == ["RunError", "the step failed", []]


def test_nodes_with_different_directories_raise_config_error_on_all_ranks(tmp_path):
    mine, other = tmp_path / "mine", tmp_path / "other"
    for kind, message, files in join_on(2, tmp_path, [mine, other]):
        assert kind == "ConfigError" and files == []
        assert f"output_dir: {other} on" in message and f"is not {mine} on" in message


def test_nodes_with_own_directories_write_versions_on_the_first(tmp_path):
    own = {"directories": [tmp_path / "node0", tmp_path / "node1"], "ranks_per_node": 2, "is_shared": False}
    assert join_on(3, tmp_path, **own) == [[2, True], [2, False], [2, True]]
    for kind, message, _ in join_on(3, tmp_path, **own, is_restart=True):
        assert kind == "ConfigError"
        assert message.startswith("nodes_share_directory = false: the trainer cannot be restarted")


def test_directory_that_cannot_be_written_raises_config_error_with_the_host(tmp_path):
    mine, other = tmp_path / "mine", tmp_path / "other"
    mine.mkdir()
    other.touch()
    for kind, message, _ in join_on(2, tmp_path, [mine, other]):
        assert kind == "ConfigError"
        assert message == f"output_dir: cannot create {other}: File exists (on {os.uname().nodename})"


WARN_SECONDS = 0.1


class Socket(socket.socket):
    """Loses what it sends and receives while `is_cut`."""

    is_cut = False

    def sendto(self, data, address):
        return len(data) if self.is_cut else super().sendto(data, address)

    def recvfrom(self, size):
        data, sender = super().recvfrom(size)
        return (b"" if self.is_cut else data), sender


class Clock:
    """Stands still until each of the threads has read it again: a thread that gets no processor is not silent."""

    def __init__(self, threads):
        self._threads, self._lock, self._readers = threads, threading.Lock(), set()
        self._now, self._last = 0.0, time.monotonic()

    def monotonic(self):
        with self._lock:
            self._readers.add(threading.get_ident())
            awaited = {thread.ident for thread in self._threads if thread.ident is None or thread.is_alive()}
            if awaited <= self._readers:
                self._now += min(time.monotonic() - self._last, WARN_SECONDS / 8)
                self._last, self._readers = time.monotonic(), set()
            return self._now


class Nodes:
    """Monitors of hosts node0, node1, ... and what they report."""

    def __init__(self, count, token="token"):
        self.sockets = [Socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(count)]
        self.sockets[0].bind(("127.0.0.1", 0))
        self.hub = self.sockets[0].getsockname()
        self.hosts, self.silent = [f"node{number}" for number in range(count)], [{} for _ in range(count)]
        self.reported = threading.Condition()
        self.monitors = [
            TrainerNodeMonitor(sock, self.hub, token, self.hosts, number, WARN_SECONDS, "limit", self.report_of(number))
            for number, sock in enumerate(self.sockets)
        ]

    def report_of(self, number):
        def report(silent):
            with self.reported:
                self.silent[number] = dict(silent)
                self.reported.notify_all()

        return report

    def wait_for(self, *expected):
        """Wait until each node reports these hosts as silent."""
        with self.reported:
            arrived = self.reported.wait_for(lambda: [set(one) for one in self.silent] == list(expected), 60)
            assert arrived, self.silent

    def wait_for_reports(self, count):
        with self.reported:
            for _ in range(count):
                assert self.reported.wait(60)


@pytest.fixture
def start(monkeypatch):
    with ExitStack() as stack:

        def start(count, alive=None):
            nodes = Nodes(count)
            started = nodes.monitors[:alive]
            clock = Clock([monitor._thread for monitor in started])
            monkeypatch.setattr(trainer_nodes, "time", SimpleNamespace(monotonic=clock.monotonic))
            for monitor in started:
                monitor.start()
                stack.callback(monitor.close)
            nodes.wait_for_reports(2 * count)
            if alive is None:
                until(lambda: all(monitor._heard == monitor._seconds.keys() for monitor in started), "their messages")
            return nodes

        yield start


def test_silent_node_is_named_on_all_nodes_and_when_it_is_back(start, said):
    nodes = start(3)
    nodes.wait_for(set(), set(), set())
    nodes.sockets[2].is_cut = True
    nodes.wait_for({"node2"}, {"node2"}, {"node0"})
    assert min(nodes.silent[1].values()) >= WARN_SECONDS, "node 0 reports the seconds"
    nodes.sockets[2].is_cut = False
    nodes.wait_for(set(), set(), set())
    lines = "\n".join(said())
    for line in (r"no message from node2 for \d+ s; limit", "messages from node2 arrive again after"):
        assert len(re.findall(line, lines)) == 2, "nodes 0 and 1, once each"
    assert len(re.findall(r"no message from node0 for \d+ s; limit", lines)) == 1, "node 2"
    nodes.sockets[0].is_cut = True
    nodes.wait_for({"node1", "node2"}, {"node0"}, {"node0"})


def test_node_that_ends_is_not_silent(start, said):
    nodes = start(2)
    nodes.monitors[1].close()
    nodes.wait_for_reports(6)
    assert nodes.silent[0] == {}
    assert not said()


def test_node_that_was_never_heard_is_logged_but_not_reported(start, said):
    """Its messages may be blocked by a firewall while the training works."""
    nodes = start(2, alive=1)
    nodes.wait_for_reports(6)
    assert nodes.silent[0] == {}
    host, port = nodes.hub
    assert said() == [
        f"no message from node1 yet; is UDP to {host}:{port} blocked? Without it, a lost node is not named"
    ]


def test_message_without_the_token_is_ignored(start):
    nodes = start(2)
    nodes.sockets[1].is_cut = True
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        nodes.wait_for({"node1"}, {"node0"})
        for data in (b'wrong{"node": 1}', b"", b"token"[:3], b"x" * 2000):
            stranger.sendto(data, nodes.hub)
        nodes.wait_for_reports(6)
    assert set(nodes.silent[0]) == {"node1"}
