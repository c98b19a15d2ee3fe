"""Nodes of one server over real sockets: who is let in, and who notices whose end."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import Queue
from typing import Any

import pytest

from prime_rl.errors import ConfigError, RunError
from prime_rl.inference.link import Link
from prime_rl.inference.nodes import Gathering, Member, Nodes, all_nodes, join_head, listen_to, resolve
from tests.support.server import free_port

FACTS = {"model.name": "m", "the hash of the model's weights": "abc", "vllm": {"max_num_seqs": 4}}
HEAD = Member("h", 0, 1, FACTS)
SILENCE_S = 30.0


@pytest.fixture
def address() -> tuple[str, int]:
    return "127.0.0.1", free_port()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def assemble(
    pool: ThreadPoolExecutor, address: tuple[str, int], *members: Member
) -> tuple[dict[Link, Member], list[Link]]:
    """A head with copy 0 and the given nodes; the links of both sides."""
    copies = 1 + sum(member.count for member in members)
    head = pool.submit(Gathering(HEAD, copies).wait, address, 20, SILENCE_S)
    nodes = [pool.submit(join_head, member, address, 20, SILENCE_S) for member in members]
    return head.result(20), [node.result(20) for node in nodes]


def watch(joined: dict[Link, Member], silence_s: float = SILENCE_S) -> tuple[Nodes, "Queue[str]"]:
    """The head's watch, and what it tells."""
    told: Queue[str] = Queue()
    nodes = Nodes(["0", "1"], list(joined), silence_s)
    nodes.tell(told.put)
    nodes.start()
    return nodes, told


def close(*links: Link) -> None:
    for link in links:
        link.close()


def test_the_head_waits_for_all_copies_and_names_them(pool: ThreadPoolExecutor, address: tuple[str, int]) -> None:
    members = [Member("b", 3, 1, FACTS), Member("a", 1, 2, FACTS)]
    joined, links = assemble(pool, address, *members)
    assert sorted(member.first for member in joined.values()) == [1, 3]
    assert {link.name for link in joined} == {
        "node a (data-parallel ranks 1, 2)",
        "node b (data-parallel ranks 3)",
    }
    assert [link.peer for link in links] == ["127.0.0.1"] * 2
    with socket.socket() as vllms:  # which binds the same port next, while the connections stay
        vllms.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        vllms.bind(address)
        vllms.listen()
    close(*joined, *links)


@pytest.mark.parametrize(
    ("member", "reason"),
    [
        (Member("n", 0, 1, FACTS), "node n brings data-parallel ranks 0, missing are 1"),
        (Member("n", 1, 2, FACTS), "node n brings data-parallel ranks 1, 2, missing are 1"),
        (Member("n", 1, 0, FACTS), "missing are 1"),
        (
            Member("n", 1, 1, {**FACTS, "the hash of the model's weights": "abd"}),
            "the hash of the model's weights is abd on node n and abc on the head h",
        ),
        (Member("n", 1, 1, {**FACTS, "vllm": {}}), "vllm is {} on node n"),
    ],
)
def test_a_node_that_does_not_fit_is_refused_and_the_right_one_may_still_come(
    pool: ThreadPoolExecutor, address: tuple[str, int], member: Member, reason: str
) -> None:
    head = pool.submit(Gathering(HEAD, 2).wait, address, 20, SILENCE_S)
    with pytest.raises(ConfigError, match=reason):
        join_head(member, address, 20, SILENCE_S)
    link = join_head(Member("n", 1, 1, FACTS), address, 20, SILENCE_S)
    close(link, *head.result(20))


def test_a_node_that_is_lost_before_all_are_there_may_come_again(
    pool: ThreadPoolExecutor, address: tuple[str, int]
) -> None:
    head = pool.submit(Gathering(HEAD, 3).wait, address, 20, SILENCE_S)
    first = join_half(address, Member("a", 1, 1, FACTS))
    first.close()
    nodes = [pool.submit(join_head, Member("a", rank, 1, FACTS), address, 20, SILENCE_S) for rank in (1, 2)]
    close(*(node.result(20) for node in nodes), *head.result(20))


def join_half(address: tuple[str, int], member: Member) -> Link:
    """Come to the head, and do not wait for its answer."""
    deadline = time.monotonic() + 20
    while True:
        try:
            link = Link(socket.create_connection(address), "head")
            break
        except OSError:
            assert time.monotonic() < deadline
    link.send("join", member={"host": member.host, "first": member.first, "count": 1, "facts": dict(member.facts)})
    return link


def test_strangers_are_shown_the_door(pool: ThreadPoolExecutor, address: tuple[str, int]) -> None:
    head = pool.submit(Gathering(HEAD, 3).wait, address, 20, SILENCE_S)
    first = join_half(address, Member("n", 1, 1, FACTS))  # the port is open now
    for words in (b"GET / HTTP/1.1\r\n", b"[1]\n", b'{"kind": "join"}\n', b'{"kind": "join", "member": 3}\n'):
        with socket.create_connection(address) as stranger:
            stranger.sendall(words)
    link = join_head(Member("n", 2, 1, FACTS), address, 20, SILENCE_S)
    close(first, link, *head.result(20))


def test_nobody_waits_for_ever(address: tuple[str, int]) -> None:
    with pytest.raises(RunError, match=r"no node brought data-parallel ranks 1, 2 to 127.0.0.1:\d+ within 0 s"):
        Gathering(HEAD, 3).wait(address, 0, SILENCE_S)
    with pytest.raises(RunError, match=r"no head at 127.0.0.1.*within 0 s.*refused"):
        join_head(Member("n", 1, 1), address, 0.4, SILENCE_S)


def test_the_end_of_a_node_is_told_at_once(pool: ThreadPoolExecutor, address: tuple[str, int]) -> None:
    joined, (link,) = assemble(pool, address, Member("n", 1, 1, FACTS))
    nodes, told = watch(joined)
    link.close()
    assert told.get(timeout=5).startswith("node n (data-parallel ranks 1) is gone")
    nodes.end(None)


def test_a_node_says_why_it_ends(pool: ThreadPoolExecutor, address: tuple[str, int]) -> None:
    joined, (link,) = assemble(pool, address, Member("n", 1, 1, FACTS))
    nodes, told = watch(joined)
    link.send("gone", reason="EngineCore_DP1 died")
    assert told.get(timeout=5) == "node n (data-parallel ranks 1): EngineCore_DP1 died"
    nodes.end(None)
    link.close()


def test_a_node_that_falls_silent_is_lost(pool: ThreadPoolExecutor, address: tuple[str, int]) -> None:
    joined, (link,) = assemble(pool, address, Member("n", 1, 1, FACTS))
    nodes, told = watch(joined, silence_s=0.5)
    assert "has said nothing for" in told.get(timeout=5)
    nodes.end(None)
    link.close()


def test_beats_keep_both_sides_going(pool: ThreadPoolExecutor, address: tuple[str, int]) -> None:
    joined, (link,) = assemble(pool, address, Member("n", 1, 1, FACTS))
    nodes, told = watch(joined, silence_s=2.5)
    stop = time.monotonic() + 3.5
    while time.monotonic() < stop:
        assert listen_to(link, wait_readable(link, 0.5), silence_s=2.5)
    assert told.empty()
    nodes.end(None)
    assert not wait_for_end(link)
    link.close()


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (lambda nodes, joined: nodes.end(None), False),
        (lambda nodes, joined: nodes.end("the engine died"), "the head at .* has ended: the engine died"),
        (lambda nodes, joined: close(*joined), "the head at .* is gone"),
    ],
)
def test_the_end_of_the_head_ends_the_node(
    pool: ThreadPoolExecutor, address: tuple[str, int], end: Callable[[Nodes, Any], None], expected: Any
) -> None:
    joined, (link,) = assemble(pool, address, Member("n", 1, 1, FACTS))
    end(Nodes(["0", "1"], list(joined), SILENCE_S), joined)
    if expected is False:
        assert wait_for_end(link) is False
    else:
        with pytest.raises(RunError, match=expected):
            wait_for_end(link)
    link.close()


def wait_readable(link: Link, timeout_s: float) -> bool:
    import select

    return bool(select.select([link.fileno()], [], [], timeout_s)[0])


def wait_for_end(link: Link) -> bool:
    deadline = time.monotonic() + 10
    while listen_to(link, wait_readable(link, 1), SILENCE_S):
        assert time.monotonic() < deadline
    return False


def test_a_loss_interrupts_a_head_that_is_blocked_in_vllm(address: tuple[str, int]) -> None:
    """Starting the engines blocks the main thread in C; the reason must come through, and nothing else."""
    members: Queue[Link] = Queue()

    def node() -> None:
        members.put(join_head(replace(HEAD, host="n", first=1), address, 20, SILENCE_S))

    threading.Thread(target=node).start()
    with (
        pytest.raises(RunError, match=r"node n .data-parallel ranks 1. is gone"),
        all_nodes(HEAD, 2, address, 20, SILENCE_S) as nodes,
    ):
        assert nodes.places == ["data-parallel rank 0 on node h", "data-parallel rank 1 on node n"]
        members.get(timeout=5).close()
        left, _ = socket.socketpair()
        left.settimeout(20)
        left.recv(1)


def test_a_single_node_needs_no_address() -> None:
    with all_nodes(Member("h", 0, 2), 2, ("", 0), 1, 1) as nodes:
        assert nodes.places == ["data-parallel rank 0", "data-parallel rank 1"]


def test_wrong_addresses_are_named(address: tuple[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"parallel.address: no-such-host.invalid cannot be resolved"):
        resolve("no-such-host.invalid")
    with pytest.raises(
        ConfigError, match=r"cannot listen on 203.0.113.1:\d+ .*the address must be one of this machine"
    ):
        Gathering(HEAD, 2).wait(("203.0.113.1", address[1]), 1, SILENCE_S)
