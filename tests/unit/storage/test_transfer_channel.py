"""A wait for a message ends immediately when the peer exits, and at a deadline otherwise (I7)."""

import socket
import threading

import pytest

from prime_rl.storage.wait_for import DeadlineError
from prime_rl.storage.weights import transfer_channel
from prime_rl.storage.weights.transfer_channel import ChannelError, TransferChannel, connect, receive_all


@pytest.fixture
def pair():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = connect("127.0.0.1", listener.getsockname()[1], 60, "the other")
        connection, _ = listener.accept()
        there = TransferChannel(connection, "the first")
        yield here, there
        here.close()
        there.close()


def test_receive_returns_complete_messages_in_order(pair):
    here, there = pair
    large = {"names": [f"layer.{number}" for number in range(200_000)]}  # more than a socket's buffer
    sender = threading.Thread(target=lambda: [here.send({"n": 1}), here.send(large)])
    sender.start()
    assert there.receive(60) == {"n": 1}
    assert there.receive(60) == large
    sender.join()


def test_receive_all_raises_immediately_when_any_peer_disconnects(pair):
    here, there = pair
    threading.Timer(0.1, here.disconnect).start()
    with pytest.raises(ChannelError, match="the first disconnected"):
        there.receive(200)
    with pytest.raises(ChannelError, match="the first disconnected"):
        while True:
            there.send({})


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(transfer_channel, "_RECHECK_SECONDS", 0.01)
    monkeypatch.setattr(transfer_channel, "_GRACE_SECONDS", 0.1)


def test_receive_slow_or_partial_message_raises_at_the_deadline(pair, quick):
    """Each byte arrives in time, but the complete message does not."""
    here, there = pair
    stop = threading.Event()

    def trickle():
        while not stop.wait(0.01):
            here._socket.sendall(b" ")

    here._socket.sendall((1000).to_bytes(4, "big") + b" ")
    thread = threading.Thread(target=trickle)
    thread.start()
    try:
        with pytest.raises(DeadlineError, match="the first stopped in the middle of a message"):
            there.receive(0.05)
    finally:
        stop.set()
        thread.join()
    here, there = there, here
    here._socket.sendall(b"\x00\x00\x00\x02{")
    with pytest.raises(DeadlineError, match="the other stopped in the middle of a message"):
        there.receive(0.05)


def test_receive_all_at_the_deadline_names_the_silent_peers(pair, quick):
    here, there = pair
    with pytest.raises(DeadlineError, match="waited 0 s for the other, the first"):
        receive_all([here, there], 0.05)
    here.send({"n": 1})
    with pytest.raises(DeadlineError, match=r"waited 0 s for the other$"):
        receive_all([here, there], 0.05)


def test_receive_ends_when_check_raises(pair):
    def check():
        raise KeyError("stop")

    with pytest.raises(KeyError):
        pair[0].receive(60, check)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", ""),
        (b"\x00\x00\x00\x02{]", ""),
        (b"\x00\x00\x00\x02[]", ""),
        (b'\x00\x00\x00\x08{"n":10}', "a frame has 8 bytes, more than 7"),
    ],
)
def test_receive_malformed_message_or_one_above_the_limit_raises(pair, data, reason):
    here, there = pair
    here.send({"n": 1})
    assert there.receive(60, max_bytes=7) == {"n": 1}
    here._socket.sendall(data)
    with pytest.raises(ChannelError, match=f"the first sent a malformed message: .*{reason}"):
        there.receive(5, max_bytes=7)


def test_connect_without_listener_raises():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ChannelError, match=rf"the trainer cannot be reached at 127.0.0.1:{port} \("):
        connect("127.0.0.1", port, 5, "the trainer")
