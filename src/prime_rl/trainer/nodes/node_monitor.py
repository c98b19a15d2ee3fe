"""Notices on each node of the trainer that another node's messages no longer arrive (I7).

    node 1, 2, ... --- "node k is alive" ---> node 0     every second, in datagrams (UDP)
    node 1, 2, ... <-- silent nodes ---------- node 0    the answer

Heartbeat files cannot show this where storage has its own network: a node without the trainer's network still writes
them, and a collective that waits for it names no host. Datagrams are lost without blocking the sender, and arrive again
as soon as the network is back.
"""

import hmac
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from loguru import logger

from prime_rl.core.ports import join_host_port

_INTERVAL_SECONDS = 1.0
_JOIN_SECONDS = 20.0
"""The thread ends within an interval, and sends its last messages before, unless the machine is overloaded."""
_MAX_BYTES = 65535
_ENDED = "ended"
_MAX_LISTED = 8


class NodeMonitor:
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
        """End the thread, and tell the other nodes that this one ends."""
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
