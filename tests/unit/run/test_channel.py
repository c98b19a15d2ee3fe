"""I7: whoever waits for a message learns of a death at once, and of silence in time."""

import socket
import threading
import time

import pytest

from prime_rl.run.channel import Channel, ChannelError, connect, receive_all
from prime_rl.run.wait import DeadlineError


@pytest.fixture
def pair():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = connect("127.0.0.1", listener.getsockname()[1], 5, "the other")
        connection, _ = listener.accept()
        there = Channel(connection, "the first")
        yield here, there
        here.close()
        there.close()


def test_messages_arrive_whole_and_in_order(pair):
    here, there = pair
    large = {"names": [f"layer.{number}" for number in range(200_000)]}  # more than a socket's buffer
    sender = threading.Thread(target=lambda: [here.send({"n": 1}), here.send(large)])
    sender.start()
    assert there.receive(10) == {"n": 1}
    assert there.receive(10) == large
    sender.join()


def test_a_death_is_noticed_at_once_also_by_who_waits_for_somebody_else(pair):
    here, there = pair
    threading.Timer(0.1, here.hang_up).start()
    begun = time.monotonic()
    with pytest.raises(ChannelError, match="the first has gone"):
        there.receive(60)
    with pytest.raises(ChannelError, match="the first has gone"):
        while True:
            there.send({})
    assert time.monotonic() - begun < 5


def test_silence_is_named(pair):
    here, there = pair
    with pytest.raises(DeadlineError, match="waited 0 s for the other, the first"):
        receive_all([here, there], 0.3)
    here.send({"n": 1})
    with pytest.raises(DeadlineError, match=r"waited 0 s for the other$"):
        receive_all([here, there], 0.3)


def test_a_check_may_end_the_wait(pair):
    def check():
        raise KeyError("stop")

    with pytest.raises(KeyError):
        pair[0].receive(60, check)


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x02{]", b"\x00\x00\x00\x02[]"])
def test_another_language_is_told_from_ours(pair, data):
    here, there = pair
    here._socket.sendall(data)
    with pytest.raises(ChannelError, match="the first sent what is no message"):
        there.receive(5)


def test_half_a_message_keeps_nobody(pair):
    here, there = pair
    here._socket.sendall(b"\x00\x00\x00\x02{")
    with pytest.raises(DeadlineError, match="the first stopped in the middle of a message"):
        there.receive(0.3)


def test_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ChannelError, match=rf"the trainer cannot be reached at 127.0.0.1:{port} \("):
        connect("127.0.0.1", port, 5, "the trainer")
