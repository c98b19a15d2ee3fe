"""Nodes of one server over real sockets: admission, and detection of the end of a node."""

import re
import select
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import Queue
from types import SimpleNamespace

import pytest

from prime_rl.core.errors import ConfigError, RunError
from prime_rl.inference import node_registry
from prime_rl.inference.node_registry import (
    NodeConnection,
    NodeInfo,
    NodeRendezvous,
    ServerNodeMonitor,
    all_nodes,
    follow_head,
    join_head,
    resolve,
)
from tests.support.command import until
from tests.support.server import free_port

SETTINGS = {"model.name": "m", "the hash of the model's weights": "abc", "vllm": {"max_num_seqs": 4}}
HEAD = NodeInfo("h", 0, 1, SETTINGS)
SILENCE_SECONDS, WAIT_SECONDS = 240.0, 120.0


@pytest.fixture
def address():
    return "127.0.0.1", free_port()


@pytest.fixture
def pool():
    with ThreadPoolExecutor() as pool:
        yield pool


def assemble(
    pool: ThreadPoolExecutor, address: tuple[str, int], *members: NodeInfo
) -> tuple[dict[NodeConnection, NodeInfo], list[NodeConnection]]:
    """A head with copy 0 and the given nodes; returns the connections of both sides."""
    copies = 1 + sum(member.count for member in members)
    head = pool.submit(NodeRendezvous(HEAD, copies).wait, address, WAIT_SECONDS, SILENCE_SECONDS)
    nodes = [pool.submit(join_head, member, address, WAIT_SECONDS, SILENCE_SECONDS) for member in members]
    return head.result(WAIT_SECONDS), [node.result(WAIT_SECONDS) for node in nodes]


def watch(
    joined: dict[NodeConnection, NodeInfo], silence_seconds: float = SILENCE_SECONDS
) -> tuple[ServerNodeMonitor, "Queue[str]"]:
    """A started monitor of the head, and the reasons that it reports."""
    reasons: Queue[str] = Queue()
    nodes = ServerNodeMonitor(["0", "1"], list(joined), silence_seconds)
    nodes.on_loss(reasons.put)
    nodes.start()
    return nodes, reasons


def close(*links: NodeConnection) -> None:
    for link in links:
        link.close()


def test_rendezvous_waits_for_all_copies(pool, address):
    members = [NodeInfo("b", 3, 1, SETTINGS), NodeInfo("a", 1, 2, SETTINGS)]
    joined, links = assemble(pool, address, *members)
    assert sorted(member.first for member in joined.values()) == [1, 3]
    assert {link.peer for link in joined} == {"node a (data-parallel ranks 1, 2)", "node b (data-parallel ranks 3)"}
    assert [link.address for link in links] == ["127.0.0.1"] * 2
    with socket.socket() as vllms:  # vLLM binds the same port next, while the connections stay open
        vllms.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        vllms.bind(address)
        vllms.listen()
    close(*joined, *links)


@pytest.mark.parametrize(
    ("member", "reason"),
    [
        (NodeInfo("n", 0, 1, SETTINGS), "node n has data-parallel ranks 0, missing are 1"),
        (NodeInfo("n", 1, 2, SETTINGS), "node n has data-parallel ranks 1, 2, missing are 1"),
        (NodeInfo("n", 1, 0, SETTINGS), "missing are 1"),
        (
            NodeInfo("n", 1, 1, {**SETTINGS, "the hash of the model's weights": "abd"}),
            "the hash of the model's weights is abd on node n and abc on the head h",
        ),
        (NodeInfo("n", 1, 1, {**SETTINGS, "vllm": {}}), "vllm is {} on node n"),
    ],
)
def test_rendezvous_refuses_a_wrong_node_and_accepts_the_right_one(pool, address, member, reason):
    head = pool.submit(NodeRendezvous(HEAD, 2).wait, address, WAIT_SECONDS, SILENCE_SECONDS)
    with pytest.raises(ConfigError, match=reason):
        join_head(member, address, WAIT_SECONDS, SILENCE_SECONDS)
    link = join_head(NodeInfo("n", 1, 1, SETTINGS), address, WAIT_SECONDS, SILENCE_SECONDS)
    close(link, *head.result(WAIT_SECONDS))


def test_rendezvous_accepts_a_lost_node_again(pool, address):
    head = pool.submit(NodeRendezvous(HEAD, 3).wait, address, WAIT_SECONDS, SILENCE_SECONDS)
    first = join_half(address, NodeInfo("a", 1, 1, SETTINGS))
    first.close()
    nodes = [
        pool.submit(join_head, NodeInfo("a", rank, 1, SETTINGS), address, WAIT_SECONDS, SILENCE_SECONDS)
        for rank in (1, 2)
    ]
    close(*(node.result(WAIT_SECONDS) for node in nodes), *head.result(WAIT_SECONDS))


def join_half(address: tuple[str, int], member: NodeInfo) -> NodeConnection:
    """Send a join message without waiting for the answer."""
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            link = NodeConnection(socket.create_connection(address), "head")
            break
        except OSError:
            assert time.monotonic() < deadline
    link.send_message(
        "join", member={"host": member.host, "first": member.first, "count": 1, "settings": dict(member.settings)}
    )
    return link


def test_receive_message_of_a_partial_message_does_not_block():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        connection, _ = server.accept()
        node = NodeConnection(connection, "node n")
        body = b'{"kind": "join", "member": {}}'
        frame = len(body).to_bytes(4, "big") + body
        for part in (frame[:2], frame[2:9]):
            sender.sendall(part)
            assert select.select([node], [], [], WAIT_SECONDS)[0]
            assert node.receive_message() == {"kind": "beat"}
        sender.sendall(frame[9:] + frame)
        for _ in range(2):  # the second message keeps the connection readable
            assert select.select([node], [], [], WAIT_SECONDS)[0]
            assert node.receive_message() == {"kind": "join", "member": {}}
        sender.sendall((2**31).to_bytes(4, "big"))
        assert select.select([node], [], [], WAIT_SECONDS)[0]
        with pytest.raises(RunError, match="node n sent a malformed message: a frame has 2147483648 bytes"):
            node.receive_message()
        node.close()


def test_rendezvous_closes_connections_with_a_bad_handshake(pool, address):
    head = pool.submit(NodeRendezvous(HEAD, 3).wait, address, WAIT_SECONDS, SILENCE_SECONDS)
    first = join_half(address, NodeInfo("n", 1, 1, SETTINGS))  # the port is open now
    bodies = (b"[1]", b'{"kind": "join"}', b'{"kind": "join", "member": 3}')
    for words in (b"GET / HTTP/1.1\r\n", *(len(body).to_bytes(4, "big") + body for body in bodies)):
        with socket.create_connection(address) as stranger:
            stranger.sendall(words)
    link = join_head(NodeInfo("n", 2, 1, SETTINGS), address, WAIT_SECONDS, SILENCE_SECONDS)
    close(first, link, *head.result(WAIT_SECONDS))


def test_rendezvous_and_join_raise_after_the_timeout(address):
    with pytest.raises(RunError, match=r"no node joined for data-parallel ranks 1, 2 at 127.0.0.1:\d+ within 0 s"):
        NodeRendezvous(HEAD, 3).wait(address, 0, SILENCE_SECONDS)
    with pytest.raises(RunError, match=r"no head at 127.0.0.1.*within 0 s.*refused"):
        join_head(NodeInfo("n", 1, 1), address, 0.4, SILENCE_SECONDS)


@pytest.mark.parametrize(
    ("end", "silence_seconds", "reason"),
    [
        (NodeConnection.close, SILENCE_SECONDS, r"node n \(data-parallel ranks 1\) disconnected"),
        (
            lambda link: link.send_message("failed", reason="EngineCore_DP1 died"), SILENCE_SECONDS,
            r"node n \(data-parallel ranks 1\): EngineCore_DP1 died$",
        ),
        (lambda link: None, 0.5, r"node n \(data-parallel ranks 1\) has sent nothing for"),
    ],
    ids=["closed", "failed", "silent"],
)  # fmt: skip
def test_monitor_reports_the_end_of_a_node(
    pool, address, end, silence_seconds,
    reason,
):  # fmt: skip
    joined, (link,) = assemble(pool, address, NodeInfo("n", 1, 1, SETTINGS))
    nodes, reasons = watch(joined, silence_seconds)
    end(link)
    assert re.match(reason, reasons.get(timeout=WAIT_SECONDS))
    nodes.end(None)
    link.close()


def test_beats_keep_both_sides_connected(pool, address, monkeypatch):
    """On a clock that jumps by more than half of the silence as soon as both sides have got a beat."""
    now = 0.0
    monkeypatch.setattr(node_registry, "time", SimpleNamespace(monotonic=lambda: now, sleep=time.sleep))
    monkeypatch.setattr(node_registry, "_BEAT_SECONDS", 0.05)
    joined, (link,) = assemble(pool, address, NodeInfo("n", 1, 1, SETTINGS))
    (its,) = joined
    nodes, reasons = watch(joined, silence_seconds=10)

    def have_beats() -> bool:
        assert follow_head(link, wait_readable(link, 1), silence_seconds=10)
        return link._last_message == its._last_message == now

    for _ in range(3):
        now += 6
        until(have_beats, "beats of both sides", WAIT_SECONDS)
    assert reasons.empty()
    nodes.end(None)
    assert not wait_for_end(link)
    link.close()


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (lambda nodes, joined: nodes.end(None), False),
        (lambda nodes, joined: nodes.end("the engine died"), "the head at .* has ended: the engine died"),
        (lambda nodes, joined: close(*joined), "the head at .* disconnected"),
    ],
)
def test_end_of_the_head_ends_the_node(pool, address, end, expected):
    joined, (link,) = assemble(pool, address, NodeInfo("n", 1, 1, SETTINGS))
    end(ServerNodeMonitor(["0", "1"], list(joined), SILENCE_SECONDS), joined)
    if expected is False:
        assert wait_for_end(link) is False
    else:
        with pytest.raises(RunError, match=expected):
            wait_for_end(link)
    link.close()


def wait_readable(link: NodeConnection, timeout_seconds: float) -> bool:
    return bool(select.select([link.fileno()], [], [], timeout_seconds)[0])


def wait_for_end(link: NodeConnection) -> bool:
    deadline = time.monotonic() + WAIT_SECONDS
    while follow_head(link, wait_readable(link, 1), SILENCE_SECONDS):
        assert time.monotonic() < deadline
    return False


def test_loss_interrupts_a_blocked_head(address):
    """The start of the engines blocks the main thread in C; the error must have the reason."""
    members: Queue[NodeConnection] = Queue()

    def node() -> None:
        members.put(join_head(replace(HEAD, host="n", first=1), address, WAIT_SECONDS, SILENCE_SECONDS))

    threading.Thread(target=node).start()
    with (
        pytest.raises(RunError, match=r"node n .data-parallel ranks 1. disconnected"),
        all_nodes(HEAD, 2, address, WAIT_SECONDS, SILENCE_SECONDS) as nodes,
    ):
        assert nodes.places == ["data-parallel rank 0 on node h", "data-parallel rank 1 on node n"]
        members.get(timeout=WAIT_SECONDS).close()
        left, _ = socket.socketpair()
        left.settimeout(WAIT_SECONDS)
        left.recv(1)


def test_address_of_another_machine_is_named_in_the_error(address, monkeypatch):
    with pytest.raises(ConfigError, match=r"parallel.address: no-such-host.invalid cannot be resolved"):
        resolve("no-such-host.invalid")
    with pytest.raises(ConfigError, match=r"cannot listen on 203.0.113.1:\d+ .*must be one of this machine"):
        NodeRendezvous(HEAD, 2).wait(("203.0.113.1", address[1]), 1, SILENCE_SECONDS)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", ("127.0.1.1", 0))])
    with pytest.raises(ConfigError, match=r"parallel.address: node1 resolves to 127.0.1.1 here"):
        resolve("node1")
    assert resolve("127.0.1.1") == resolve("localhost") == "127.0.1.1"
