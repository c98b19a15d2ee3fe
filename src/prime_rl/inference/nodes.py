"""The nodes of one server (I7): all are there before an engine starts, serve the same, and none outlives another.

The head has the HTTP server and the first copies of the model; every other node runs `inference --headless` with some
more. vLLM connects their engines, but compares nothing, and neither side notices the end of the other: requests would
wait for ever. So each node keeps one connection to the head:

    head   listen at address:rpc_port until every copy has a node   | vLLM's own handshake, same port | serve
    node   join: which copies, model, settings -> welcome | refused | engines start                   | wait
           [------------- both say "beat" each second; whoever ends, or is lost, ends the other -------------]

A message is a line of JSON. Nothing is encrypted and nobody proves who he is, as in vLLM's own connections between
nodes: these ports belong on a network of one's own.
"""

import json
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from loguru import logger

from prime_rl.errors import ConfigError, RunError
from prime_rl.inference.link import SEND_TIMEOUT_S, Link, LinkLost, wait_readable

_BEAT_S = 1.0
_RETRY_S = 0.25


@dataclass(frozen=True, slots=True)
class Member:
    """What a node brings to the server.

    Attributes:
        host: its name, for people.
        first: number of its first copy of the model.
        count: how many copies it has.
        facts: what must be the same on all nodes, by the name of the key or a word for it.
    """

    host: str
    first: int
    count: int
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> range:
        """Numbers of its copies."""
        return range(self.first, self.first + self.count)


class Nodes(threading.Thread):
    """The head's watch over the other nodes, in a thread: starting vLLM blocks all others. None on a single node.

    Until `tell` is called, a loss is raised in the main thread as RunError.

    Args:
        places: for each copy of the model what it is called in messages.
        links: one for each other node.
        silence_s: longest silence of a node.
    """

    def __init__(self, places: Sequence[str], links: Sequence[Link] = (), silence_s: float = 60.0) -> None:
        super().__init__(name="nodes", daemon=True)
        self.places = places
        self._links = links
        self._silence_s = silence_s
        self._lost = ""
        self._tell: Callable[[str], None] = _interrupt_main_thread
        self._lock = threading.Lock()
        self._wake, self._waker = socket.socketpair()

    def tell(self, tell: Callable[[str], None]) -> None:
        """Call `tell` with the reason once a node is lost; at once if one is lost already."""
        with self._lock:
            self._tell = tell
            if self._lost:
                tell(self._lost)

    def run(self) -> None:
        """Beat and listen until a node is lost or `end` is called."""
        due = 0.0
        try:
            while True:
                readable, ended = wait_readable(self._links, self._wake, max(due - time.monotonic(), 0))
                if ended:
                    return
                for link in readable:
                    for message in link.receive():
                        if message["kind"] == "gone":
                            raise LinkLost(f"{link.name}: {message.get('reason')}")
                if time.monotonic() >= due:
                    due = time.monotonic() + _BEAT_S
                    for link in self._links:
                        link.beat(self._silence_s)
        except LinkLost as lost:
            with self._lock:
                self._lost = str(lost)
                logger.error("{}; the server ends", lost)
                self._tell(self._lost)

    def raise_lost(self, signum: int, frame: object) -> None:
        """Handler of the signal that interrupts the main thread."""
        raise RunError(self._lost)

    def end(self, reason: str | None) -> None:
        """Tell the nodes that the server has ended: None if it was told to."""
        self._waker.close()
        if self.is_alive():
            self.join()
        for link in self._links:
            with suppress(LinkLost):
                link.send("end", reason=reason)
            link.close()
        self._wake.close()


@contextmanager
def all_nodes(
    mine: Member, copies: int, address: tuple[str, int], timeout_s: float, silence_s: float
) -> Iterator[Nodes]:
    """Wait until every copy of the model has a node, and watch over them; on the head.

    Args:
        mine: this node, with the first copies.
        copies: of the model, on all nodes.
        address: where the others come to.
        timeout_s: longest wait for them.
        silence_s: longest silence of a node that has come.

    Raises:
        ConfigError: the address cannot be listened on.
        RunError: not all came in time.
    """
    joined = Gathering(mine, copies).wait(address, timeout_s, silence_s) if mine.count < copies else {}
    members = sorted([mine, *joined.values()], key=lambda member: member.first)
    nodes = Nodes([_place(rank, m, len(members)) for m in members for rank in m.ranks], list(joined), silence_s)
    if joined:
        signal.signal(signal.SIGUSR1, nodes.raise_lost)
        nodes.start()
    try:
        yield nodes
    except Exception as error:
        nodes.end(f"{type(error).__name__}: {error}" if not isinstance(error, RunError) else str(error))
        raise
    except BaseException:
        nodes.end(None)
        raise
    nodes.end(None)


class Gathering:
    """The head's wait for the other nodes.

    Args:
        mine: the head itself.
        copies: of the model, on all nodes.
    """

    def __init__(self, mine: Member, copies: int) -> None:
        self._mine = mine
        self._facts = json.loads(json.dumps(dict(mine.facts), default=str))
        self._copies = copies
        self._strangers: list[Link] = []
        self._joined: dict[Link, Member] = {}

    @property
    def missing(self) -> list[int]:
        """Copies that have no node yet."""
        taken = {rank for member in (self._mine, *self._joined.values()) for rank in member.ranks}
        return [rank for rank in range(self._copies) if rank not in taken]

    def wait(self, address: tuple[str, int], timeout_s: float, silence_s: float) -> dict[Link, Member]:
        """Listen until no copy is missing, and welcome all; raises as `all_nodes`."""
        deadline = time.monotonic() + timeout_s
        with _listen(*address) as listener:
            logger.info("waiting at {}:{} for data-parallel ranks {}", *address, _list(self.missing))
            while self.missing:
                if time.monotonic() > deadline:
                    raise RunError(
                        f"no node brought data-parallel ranks {_list(self.missing)} to {address[0]}:{address[1]} "
                        f"within {timeout_s:.0f} s (parallel.wait_timeout_seconds)"
                    )
                self._listen_once(listener)
                for link in list(self._joined):
                    self._unless_lost(link, lambda link: link.beat(silence_s))
            for stranger in self._strangers:
                stranger.close()
        for link in list(self._joined):
            self._unless_lost(link, lambda link: link.send("welcome"))
        if self.missing:
            return self.wait(address, deadline - time.monotonic(), silence_s)
        return self._joined

    def _listen_once(self, listener: socket.socket) -> None:
        # The end of a node is read before the same node, started again, asks for its place.
        readable, called = wait_readable([*self._joined, *self._strangers], listener, _BEAT_S)
        for link in readable:
            self._unless_lost(link, self._hear)
        if called:
            with suppress(OSError):  # it hung up before it was let in
                connection, peer = listener.accept()
                self._strangers.append(Link(connection, peer[0]))

    def _hear(self, link: Link) -> None:
        for message in link.receive():
            if message["kind"] == "gone":
                raise LinkLost(f"{link.name}: {message.get('reason')}")
            if message["kind"] != "join" or link not in self._strangers:
                continue
            member = Member(**message["member"])
            if reason := self._why_not(member):
                link.send("refused", reason=reason)
                raise LinkLost(f"node {member.host} was refused: {reason}")
            self._strangers.remove(link)
            self._joined[link] = member
            link.name = f"node {member.host} (data-parallel ranks {_list(member.ranks)})"
            logger.info("{} has come; missing: {}", link.name, _list(self.missing) or "none")

    def _why_not(self, member: Member) -> str | None:
        missing = self.missing
        if not member.count or any(rank not in missing for rank in member.ranks):
            return (
                f"node {member.host} brings data-parallel ranks {_list(member.ranks)}, missing are {_list(missing)}; "
                "see parallel.start_rank and parallel.dp_local"
            )
        for key, ours in self._facts.items():
            if (theirs := member.facts.get(key)) != ours:
                return f"{key} is {theirs} on node {member.host} and {ours} on the head {self._mine.host}"
        return None

    def _unless_lost(self, link: Link, use: Callable[[Link], None]) -> None:
        """A node that is lost before all are there may come again."""
        try:
            use(link)
        except (LinkLost, TypeError, KeyError) as lost:
            logger.warning("{}", lost if isinstance(lost, LinkLost) else f"{link.name} does not speak as a node does")
            self._joined.pop(link, None)
            self._strangers = [other for other in self._strangers if other is not link]
            link.close()


def join_head(mine: Member, address: tuple[str, int], timeout_s: float, silence_s: float) -> Link:
    """Offer this node to the head until it is welcome.

    Raises:
        ConfigError: the head refuses it, and says why.
        RunError: no head welcomed it in time.
    """
    deadline = time.monotonic() + timeout_s
    problem = ""
    while time.monotonic() < deadline:
        try:
            link = Link(socket.create_connection(address, SEND_TIMEOUT_S), f"the head at {address[0]}:{address[1]}")
        except OSError as error:
            problem = error.strerror or str(error)
        else:
            try:
                _wait_for_welcome(link, mine, deadline, silence_s)
                return link
            except LinkLost as lost:
                problem = str(lost)
                link.close()
        time.sleep(_RETRY_S)  # neither a port that opens nor a head that starts again sends an event
    raise RunError(
        f"no head at {address[0]}:{address[1]} welcomed this node within {timeout_s:.0f} s "
        f"(parallel.wait_timeout_seconds): {problem}"
    )


def listen_to(link: Link, readable: bool, silence_s: float) -> bool:
    """On a node: read what the head says, and beat.

    Returns:
        Whether to go on; False where the head has ended because it was told to.

    Raises:
        RunError: the head is gone, or has ended with an error.
    """
    try:
        for message in link.receive() if readable else ():
            if message["kind"] == "end" and message.get("reason") is None:
                return False
            if message["kind"] == "end":
                raise RunError(f"{link.name} has ended: {message['reason']}")
        link.beat(silence_s)
        return True
    except LinkLost as lost:
        raise RunError(str(lost)) from None


def resolve(address: str) -> str:
    """Turn the head's own name into an IP address: vLLM's sockets are bound to addresses only.

    Raises:
        ConfigError: there is no such name.
    """
    try:
        return str(socket.getaddrinfo(address, None, proto=socket.IPPROTO_TCP)[0][4][0])
    except OSError as error:
        raise ConfigError(f"parallel.address: {address} cannot be resolved ({error.strerror})") from None


def _wait_for_welcome(link: Link, mine: Member, deadline: float, silence_s: float) -> None:
    link.send("join", member=asdict(mine))
    while time.monotonic() < deadline:
        readable, _, _ = select.select([link], [], [], _BEAT_S)
        for message in link.receive() if readable else ():
            if message["kind"] == "refused":
                with closing(link):
                    raise ConfigError(str(message.get("reason")))
            if message["kind"] == "welcome":
                return
        link.beat(silence_s)
    raise LinkLost(f"{link.name} waits for other nodes")


def _listen(address: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"parallel.address, parallel.rpc_port: cannot listen on {address}:{port} ({error.strerror}); the address "
            "must be one of this machine, which is the head"
        ) from None
    return listener


def _interrupt_main_thread(reason: str) -> None:
    main = threading.main_thread().ident
    if main is not None:
        signal.pthread_kill(main, signal.SIGUSR1)


def _place(rank: int, member: Member, members: int) -> str:
    return f"data-parallel rank {rank}" + (f" on node {member.host}" if members > 1 else "")


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
