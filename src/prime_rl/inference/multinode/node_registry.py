"""The nodes of one server: all join before an engine starts, serve the same model, and end together.

The head has the HTTP server and the first copies of the model; every other node runs `inference --headless` with some
more. vLLM connects their engines, but it does not compare their settings and does not notice the end of a node. So each
node keeps one connection to the head:

    head   listen at address:rpc_port until every copy has a node   | vLLM's own handshake, same port | serve
    node   join: which copies, model, settings -> welcome | refused | engines start                   | wait
           [--- both send "beat" every second; an error or silence on one side ends the other one ----]

As in vLLM's own connections between nodes, nothing is encrypted or authenticated: use a private network.
"""

import json
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from loguru import logger

from prime_rl.core.api_key import is_loopback
from prime_rl.core.errors import ConfigError, RunError, summarize_exception, translate_error
from prime_rl.core.ports import address_family, join_host_port
from prime_rl.inference.multinode.node_connection import SEND_TIMEOUT_S, NodeConnection
from prime_rl.storage.weights.transfer_channel import ChannelError

_BEAT_S = 1.0
_RETRY_S = 0.25


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """The part of a node in the server.

    `first` is the number of its first copy of the model, `count` the number of its copies. The `settings`, by key or
    description, must be equal on all nodes.
    """

    host: str
    first: int
    count: int
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> range:
        """Numbers of its copies."""
        return range(self.first, self.first + self.count)


class NodeMonitor(threading.Thread):
    """Monitors the other nodes on the head, in a thread: the start of vLLM blocks the event loop.

    Until `on_loss` is called, a loss is raised in the main thread as RunError. `places` has the name of each copy of
    the model in messages.
    """

    def __init__(self, places: Sequence[str], nodes: Sequence[NodeConnection] = (), silence_s: float = 60.0) -> None:
        super().__init__(name="nodes", daemon=True)
        self.places = places
        self._nodes = nodes
        self._silence_s = silence_s
        self._loss = ""
        self._on_loss: Callable[[str], object] = _interrupt_main_thread
        self._lock = threading.Lock()
        self._wake, self._waker = socket.socketpair()

    def on_loss(self, callback: Callable[[str], object]) -> None:
        """Call `callback` with the reason when a node is lost, or now if a node is lost already."""
        with self._lock:
            self._on_loss = callback
            if self._loss:
                callback(self._loss)

    def run(self) -> None:
        """Exchange beats until a node is lost or `end` is called."""
        due = 0.0
        try:
            while True:
                sources: list[Any] = [*self._nodes, self._wake]
                readable, _, _ = select.select(sources, [], [], max(due - time.monotonic(), 0))
                if self._wake in readable:
                    return
                for node in readable:
                    _receive_from_node(node)
                if time.monotonic() >= due:
                    due = time.monotonic() + _BEAT_S
                    for node in self._nodes:
                        node.beat(self._silence_s)
        except RunError as loss:
            with self._lock:
                self._loss = str(loss)
                logger.error("{}; the server ends", loss)
                self._on_loss(self._loss)

    def raise_loss(self, signum: int, frame: object) -> None:
        """Handle the signal that interrupts the main thread."""
        raise RunError(self._loss)

    def end(self, reason: str | None) -> None:
        """Notify the nodes of the end of the server; the reason is None unless it failed."""
        self._waker.close()
        if self.is_alive():
            self.join()
        for node in self._nodes:
            with suppress(RunError):
                node.send_message("end", reason=reason)
            node.close()
        self._wake.close()


@contextmanager
def all_nodes(
    head: NodeInfo, copies: int, address: tuple[str, int], timeout_s: float, silence_s: float
) -> Iterator[NodeMonitor]:
    """Wait on the head until every one of the `copies` of the model has a node, then monitor the nodes.

    Raises ConfigError if the address cannot be bound, and RunError if nodes are missing after the time-out.
    """
    joined = NodeRendezvous(head, copies).wait(address, timeout_s, silence_s) if head.count < copies else {}
    infos = sorted([head, *joined.values()], key=lambda info: info.first)
    places = [
        f"data-parallel rank {rank}" + (f" on node {info.host}" if joined else "")
        for info in infos
        for rank in info.ranks
    ]
    nodes = NodeMonitor(places, list(joined), silence_s)
    if joined:
        signal.signal(signal.SIGUSR1, nodes.raise_loss)
        nodes.start()
    reason = None
    try:
        yield nodes
    except Exception as error:
        reason = str(error) if isinstance(error, RunError) else summarize_exception(error)
        raise
    finally:
        nodes.end(reason)


class NodeRendezvous:
    """Waits on the head for the other nodes."""

    def __init__(self, head: NodeInfo, copies: int) -> None:
        self._head = head
        self._settings = _to_json(head)["settings"]
        self._copies = copies
        self._unknown: list[NodeConnection] = []
        self._joined: dict[NodeConnection, NodeInfo] = {}

    @property
    def missing(self) -> list[int]:
        """Copies without a node."""
        taken = {rank for info in (self._head, *self._joined.values()) for rank in info.ranks}
        return [rank for rank in range(self._copies) if rank not in taken]

    def wait(self, address: tuple[str, int], timeout_s: float, silence_s: float) -> dict[NodeConnection, NodeInfo]:
        """Listen until no copy is missing, and welcome all nodes; raises as `all_nodes`."""
        deadline = time.monotonic() + timeout_s
        while self.missing:
            self._gather(address, deadline, timeout_s, silence_s)
            for node in list(self._joined):
                self._call_or_remove(node, lambda node: node.send_message("welcome"))
        return self._joined

    def _gather(self, address: tuple[str, int], deadline: float, timeout_s: float, silence_s: float) -> None:
        """Listen until no copy is missing. The copies of a node that is lost before its welcome are missing again."""
        with _listen(*address) as listener:
            logger.info("waiting at {} for data-parallel ranks {}", join_host_port(*address), _list(self.missing))
            while self.missing:
                if time.monotonic() > deadline:
                    raise RunError(
                        f"no node joined for data-parallel ranks {_list(self.missing)} at {join_host_port(*address)} "
                        f"within {timeout_s:.0f} s (parallel.wait_timeout_seconds)"
                    )
                # The end of a node is read before the same node, after a restart, is accepted again.
                sources: list[Any] = [*self._joined, *self._unknown, listener]
                readable, _, _ = select.select(sources, [], [], _BEAT_S)
                for node in readable:
                    if node is not listener:
                        self._call_or_remove(node, self._receive)
                if listener in readable:
                    with suppress(OSError):  # the node closed the connection already
                        connection, peer = listener.accept()
                        self._unknown.append(NodeConnection(connection, peer[0]))
                for node in list(self._joined):
                    self._call_or_remove(node, lambda node: node.beat(silence_s))
            for node in self._unknown:
                node.close()

    def _receive(self, node: NodeConnection) -> None:
        message = _receive_from_node(node)
        if message["kind"] != "join" or node not in self._unknown:
            return
        info = NodeInfo(**message["member"])
        if reason := self._refusal(info):
            node.send_message("refused", reason=reason)
            raise ChannelError(f"node {info.host} was refused: {reason}")
        self._unknown.remove(node)
        self._joined[node] = info
        node.peer = f"node {info.host} (data-parallel ranks {_list(info.ranks)})"
        logger.info("{} has joined; missing: {}", node.peer, _list(self.missing) or "none")

    def _refusal(self, info: NodeInfo) -> str | None:
        missing = self.missing
        if not info.count or any(rank not in missing for rank in info.ranks):
            return (
                f"node {info.host} has data-parallel ranks {_list(info.ranks)}, missing are {_list(missing)}; "
                "see parallel.start_rank and parallel.dp_local"
            )
        for key, ours in self._settings.items():
            if (theirs := info.settings.get(key)) != ours:
                return f"{key} is {theirs} on node {info.host} and {ours} on the head {self._head.host}"
        return None

    def _call_or_remove(self, node: NodeConnection, call: Callable[[NodeConnection], None]) -> None:
        """Call; remove a node that is lost, which may join again."""
        try:
            call(node)
        except (RunError, TypeError, KeyError) as error:
            is_lost = isinstance(error, RunError)
            logger.warning("{}", error if is_lost else f"rejected connection from {node.peer}: bad handshake")
            self._joined.pop(node, None)
            self._unknown = [other for other in self._unknown if other is not node]
            node.close()


def join_head(node: NodeInfo, address: tuple[str, int], timeout_s: float, silence_s: float) -> NodeConnection:
    """Connect this node to the head and wait for its welcome.

    Raises ConfigError if the head refuses this node, and RunError if no head welcomes it within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    problem = ""
    while time.monotonic() < deadline:
        try:
            with ExitStack() as on_failure:
                connection = socket.create_connection(address, SEND_TIMEOUT_S)
                head = NodeConnection(connection, f"the head at {join_host_port(*address)}")
                on_failure.callback(head.close)
                _wait_for_welcome(head, node, deadline, silence_s)
                on_failure.pop_all()
            return head
        except (OSError, RunError) as error:
            problem = getattr(error, "strerror", None) or str(error)
        time.sleep(_RETRY_S)  # a port that opens sends no event
    raise RunError(
        f"no head at {join_host_port(*address)} welcomed this node within {timeout_s:.0f} s "
        f"(parallel.wait_timeout_seconds): {problem}"
    )


def follow_head(head: NodeConnection, readable: bool, silence_s: float) -> bool:
    """Read a message of the head and send a beat; returns False if the head has ended without an error.

    Raises RunError if the head is lost, or has ended with an error.
    """
    message = head.receive_message() if readable else {"kind": "beat"}
    if message["kind"] == "end":
        if message.get("reason") is None:
            return False
        raise RunError(f"{head.peer} has ended: {message['reason']}")
    head.beat(silence_s)
    return True


def resolve(address: str) -> str:
    """Resolve the name of the head to an IP address, to which alone vLLM binds.

    Raises ConfigError if it is unknown, or a loopback address on the head itself, as Debian's /etc/hosts defines it.
    """
    unknown = f"parallel.address: {address} cannot be resolved"
    with translate_error(OSError, lambda error: ConfigError(f"{unknown} ({error.strerror})")):
        found = str(socket.getaddrinfo(address, None, proto=socket.IPPROTO_TCP)[0][4][0])
    if is_loopback(found) and not is_loopback(address):
        raise ConfigError(
            f"parallel.address: {address} resolves to {found} here, which other nodes cannot reach; give the head's IP "
            "address"
        )
    return found


def _receive_from_node(node: NodeConnection) -> dict[str, Any]:
    message = node.receive_message()
    if message["kind"] == "failed":
        raise ChannelError(f"{node.peer}: {message.get('reason')}")
    return message


def _to_json(node: NodeInfo) -> dict[str, Any]:
    return dict(json.loads(json.dumps(asdict(node), default=str)))


def _wait_for_welcome(head: NodeConnection, node: NodeInfo, deadline: float, silence_s: float) -> None:
    head.send_message("join", member=_to_json(node))
    while time.monotonic() < deadline:
        message = head.receive_message() if select.select([head], [], [], _BEAT_S)[0] else {"kind": "beat"}
        if message["kind"] == "refused":
            raise ConfigError(str(message.get("reason")))
        if message["kind"] == "welcome":
            return
        head.beat(silence_s)
    raise ChannelError(f"{head.peer} waits for other nodes")


def _listen(address: str, port: int) -> socket.socket:
    def refuse(error: OSError) -> ConfigError:
        reason = os.strerror(error.errno or 0)
        return ConfigError(
            f"parallel.address, parallel.rpc_port: cannot listen on {join_host_port(address, port)} ({reason}); "
            "the address must be one of this machine, which is the head"
        )

    with translate_error(OSError, refuse):
        return socket.create_server((address, port), family=address_family(address))


def _interrupt_main_thread(reason: str) -> None:
    main = threading.main_thread().ident
    if main is not None:
        signal.pthread_kill(main, signal.SIGUSR1)


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
