"""Checks at the start that the nodes of a trainer share a directory, and names a lost node in errors (I7).

    node 1, 2, ... --- "node k is alive" ---> node 0     every second, in datagrams (UDP)
    node 1, 2, ... <-- silent nodes ---------- node 0    the answer

Heartbeat files cannot show a lost node where storage has its own network: a node without the trainer's network still
writes them, and a collective that waits for it names no host. Datagrams are lost without blocking the sender, and
arrive again as soon as the network is back.
"""

import hmac
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from loguru import logger

from prime_rl.core.errors import ConfigError, RunError, translate_error
from prime_rl.core.ports import join_host_port
from prime_rl.liveness.heartbeat_limits import HeartbeatLimits
from prime_rl.liveness.heartbeat_monitor import read_heartbeat
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.storage.artifact import visibility_timeout
from prime_rl.storage.paths import RunPaths
from prime_rl.storage.rollback import is_restart
from prime_rl.storage.wait_for import DeadlineError, wait_for
from prime_rl.trainer.parallel.process_group import RankConsensus, World, wrap_rank_errors
from prime_rl.trainer.process_setup import check_writable

_INTERVAL_SECONDS = 1.0
_JOIN_SECONDS = 20.0
"""The thread ends within an interval, and sends its last messages before, unless the machine is overloaded."""
_MAX_BYTES = 65535
_ENDED = "ended"
_MAX_LISTED = 8


@dataclass(frozen=True, slots=True)
class _Node:
    """What the first rank of a node reports at the start; `main_address` is that by which the node reaches rank 0."""

    rank: int
    host: str
    directory: str
    sees_file: bool
    family: int
    main_address: str


@dataclass(frozen=True, slots=True)
class DirectoryUse:
    """How the ranks use the run directory.

    Attributes:
        num_writers: the first ranks, which have the directory in which versions are published.
        is_main: whether this rank is the first one that uses its directory.
    """

    num_writers: int
    is_main: bool


@contextmanager
def join_nodes(
    paths: RunPaths,
    world: World,
    heartbeat: HeartbeatWriter,
    limits: HeartbeatLimits | None = None,
    is_shared: bool = True,
) -> Iterator[DirectoryUse]:
    """Compare the run directories of the trainer's nodes if they are shared, and monitor the nodes.

    A silent node is logged, is part of the heartbeats, and is named in the error of a step that waits for it.

    Raises:
        ConfigError: the nodes have different directories although these should be shared.
        RunError: an error of a rank, with the names of silent nodes.
    """
    if int(os.environ.get("LOCAL_WORLD_SIZE", world.size)) == world.size:
        yield DirectoryUse(world.size, world.is_main)
        return
    ranks, local_rank = RankConsensus(world), int(os.environ["LOCAL_RANK"])
    token = ranks.on_main(lambda: secrets.token_hex(16))
    nodes = _compare_directories(paths, world, ranks, token, local_rank, is_shared)
    monitor = _make_monitor(world, ranks, token, nodes, local_rank, heartbeat, limits or HeartbeatLimits())
    if monitor is not None:
        monitor.start()
    try:
        with wrap_rank_errors(world.timeout_seconds):
            first_node = nodes[1].rank
            yield DirectoryUse(world.size, world.is_main) if is_shared else DirectoryUse(first_node, local_rank == 0)
    except RunError as error:
        main = read_heartbeat(paths.heartbeat(f"trainer_{world.rank - local_rank}")) if local_rank else None
        silent = heartbeat.silent_hosts if main is None else main.silent_hosts
        if not silent:
            raise
        names = ", ".join(silent)
        raise RunError(f"{error}; no message from {names} for {max(silent.values()):.0f} s") from error
    finally:
        if monitor is not None:
            monitor.close()


def _compare_directories(
    paths: RunPaths, world: World, ranks: RankConsensus, token: str, local_rank: int, is_shared: bool
) -> list[_Node]:
    """Return the nodes; if `is_shared`, raise ConfigError on all ranks if one does not see a file of rank 0."""
    file, host = paths.root / f".shared_directory_{token[:8]}", socket.gethostname()
    patience_seconds = min(visibility_timeout(file, paths.fs_consistency_timeout_seconds), world.timeout_seconds / 2)

    def look() -> _Node | None:
        if local_rank:
            return None
        with translate_error(ConfigError, lambda error: ConfigError(f"{error} (on {host})")):
            check_writable("output_dir", paths.root)
        if not is_shared and is_restart():
            raise ConfigError("nodes_share_directory = false: the trainer cannot be restarted; start a new run")
        family, *_, address = socket.getaddrinfo(os.environ["MASTER_ADDR"], None, type=socket.SOCK_DGRAM)[0]
        sees_file = True
        if is_shared:
            try:
                wait_for(file, patience_seconds, "rank 0")
            except DeadlineError:
                sees_file = False
        return _Node(world.rank, host, str(paths.root), sees_file, family, str(address[0]))

    def write() -> None:
        check_writable("output_dir", paths.root)
        file.touch()

    try:
        ranks.on_main(write)
        nodes = [node for node in ranks.gather(look) if node is not None]
    finally:
        if world.is_main:
            file.unlink(missing_ok=True)
    for node in nodes:
        if not node.sees_file:
            main, waited = nodes[0], f" within {patience_seconds:g} s" if patience_seconds else ""
            raise ConfigError(
                f"output_dir: {node.directory} on {node.host} is not {main.directory} on {main.host}: new files do not "
                f"appear there{waited}; the nodes of a trainer need a shared directory, or relays and "
                "nodes_share_directory = false"
            )
    return nodes


class TrainerNodeMonitor:
    """Exchanges messages with the other nodes in a background thread, from `start` to `close`.

    Args:
        sock: UDP socket; bound to `hub` on node 0.
        hub: address of node 0.
        token: secret of the trainer; datagrams without it are ignored.
        hosts: host name of each node.
        node: index of this node.
        warn_after_seconds: a host that sends nothing for so long is logged and reported.
        limit: how long the trainer waits for the host, for the warning.
        report: receives the seconds of silence of each silent host, about once a second.
    """

    def __init__(
        self,
        sock: socket.socket,
        hub: Any,
        token: str,
        hosts: Sequence[str],
        node: int,
        warn_after_seconds: float,
        limit: str,
        report: Callable[[Mapping[str, float]], None],
    ) -> None:
        self._sock, self._hub, self._token, self._hosts, self._node = sock, hub, token.encode(), hosts, node
        self._warn_after_seconds, self._limit, self._report = warn_after_seconds, limit, report
        self._interval_seconds = min(_INTERVAL_SECONDS, warn_after_seconds / 4)
        self._seconds = dict.fromkeys(range(1, len(hosts)) if node == 0 else (0,), 0.0)
        """Silence of each node whose messages this node receives directly."""
        self._heard: set[int] = set()
        self._relayed: dict[int, float] = {}
        """Silence of the other nodes, as node 0 reports it."""
        self._silent: dict[int, float] = {}
        """What has been logged last."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="node_monitor", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread, and notify the other nodes."""
        self._closed.set()
        self._thread.join(_JOIN_SECONDS)
        self._sock.close()

    def _run(self) -> None:
        last = due = time.monotonic()
        peers: dict[Any, int] = {}
        while not self._closed.is_set():
            if (now := time.monotonic()) >= due:
                # A longer gap is time in which this process was suspended.
                self._count_silence(min(now - last, 2 * self._interval_seconds))
                last, due = now, now + self._interval_seconds
                if self._node:
                    self._send({"node": self._node}, self._hub)
            self._sock.settimeout(max(0.001, due - now))
            try:
                data, sender = self._sock.recvfrom(_MAX_BYTES)
            except OSError:  # nothing arrived, or the network is unreachable
                continue
            if (node := self._receive(data)) is not None and self._node == 0:
                peers[sender] = node
                self._send({"node": 0, "silent": {str(key): s for key, s in self._silent.items()}}, sender)
        for address in peers if self._node == 0 else (self._hub,):
            self._send({"node": self._node, _ENDED: True}, address)

    def _send(self, message: Mapping[str, Any], address: Any) -> None:
        try:
            self._sock.sendto(self._token + json.dumps(message).encode(), address)
        except OSError as error:  # without a network, silence is what the other nodes notice
            logger.debug("a message to {} was not sent: {}", address, error)

    def _receive(self, data: bytes) -> int | None:
        """Record a message; return the node that sent it and has not ended."""
        if not hmac.compare_digest(data[: len(self._token)], self._token):
            return None
        message = json.loads(data[len(self._token) :])
        node = message["node"]
        if message.get(_ENDED):
            self._seconds.pop(node, None)
            return None
        if node in self._seconds:
            self._seconds[node] = 0.0
            self._heard.add(node)
            self._relayed = {int(key): seconds for key, seconds in message.get("silent", {}).items()}
        return int(node)

    def _count_silence(self, passed: float) -> None:
        for node in self._seconds:
            self._seconds[node] += passed
        silent = {node: s for node, s in self._seconds.items() if s >= self._warn_after_seconds}
        silent |= {node: seconds for node, seconds in self._relayed.items() if node != self._node}
        before, self._silent = self._silent, silent
        if lost := [node for node in silent if node not in before]:
            self._log_lost(lost)
        if back := [node for node in before if node not in silent]:
            logger.info("messages from {} arrive again after {:.0f} s", self._names(back), max(before[n] for n in back))
        # A node that was never heard may be behind a firewall, while the training itself works.
        never = {node for node in self._seconds if node not in self._heard}
        self._report({self._hosts[node]: seconds for node, seconds in silent.items() if node not in never})

    def _log_lost(self, nodes: Sequence[int]) -> None:
        never = [node for node in nodes if node in self._seconds and node not in self._heard]
        if lost := [node for node in nodes if node not in never]:
            seconds = max(self._silent[node] for node in lost)
            logger.warning("no message from {} for {:.0f} s; {}", self._names(lost), seconds, self._limit)
        if never:
            address = join_host_port(*self._hub[:2])
            logger.warning(
                "no message from {} yet; is UDP to {} blocked? Without it, a lost node is not named",
                self._names(never), address,
            )  # fmt: skip

    def _names(self, nodes: Sequence[int]) -> str:
        more = f" and {len(nodes) - _MAX_LISTED} other nodes" if len(nodes) > _MAX_LISTED else ""
        return ", ".join(self._hosts[node] for node in nodes[:_MAX_LISTED]) + more


def _make_monitor(
    world: World,
    ranks: RankConsensus,
    token: str,
    nodes: list[_Node],
    local_rank: int,
    heartbeat: HeartbeatWriter,
    limits: HeartbeatLimits,
) -> TrainerNodeMonitor | None:
    """Create the monitor of this node, on its first rank; None if the address of rank 0 cannot be used."""
    sock = socket.socket(socket.AddressFamily(nodes[1].family), socket.SOCK_DGRAM)

    def bind() -> Any:
        # The other nodes' address of rank 0: its own may be that of the loopback interface.
        address = nodes[1].main_address
        try:
            sock.bind((address, 0))
        except OSError as error:
            logger.warning(
                "{} (MASTER_ADDR) is not an address of this node, so a lost node is not named: {}", address, error
            )
            return None
        return sock.getsockname()

    hub = ranks.on_main(bind)
    if hub is None or local_rank:
        sock.close()
        return None
    index = [node.rank for node in nodes].index(world.rank)
    hosts = [node.host for node in nodes]
    limit = f"a step that needs it waits up to {world.timeout_seconds:g} s (dist_timeout_seconds)"
    return TrainerNodeMonitor(
        sock, hub, token, hosts, index, limits.warn_after_seconds, limit, heartbeat.report_silent_hosts
    )
