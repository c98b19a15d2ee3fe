"""Framing of messages."""

import pytest

from prime_rl.core.framing import FrameReader, FrameTooLongError, pack_frame


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
def test_feed_any_parts_gives_the_bodies_in_order(size):
    bodies = [b"", b"a", b"bcd" * 100]
    stream, reader, received = b"".join(map(pack_frame, bodies)), FrameReader(300), list[bytes]()
    for start in range(0, len(stream), size):
        received += reader.feed(stream[start : start + size])
    assert received == bodies


def test_num_missing_never_reaches_into_the_next_frame():
    stream, reader, received = pack_frame(b"abc") + pack_frame(b""), FrameReader(3), list[list[bytes]]()
    while stream:
        part, stream = stream[: reader.num_missing], stream[reader.num_missing :]
        received.append(reader.feed(part))
    assert received == [[], [b"abc"], [b""]]


def test_frame_above_the_limit_is_refused_before_its_body():
    reader = FrameReader(2)
    with pytest.raises(FrameTooLongError, match="a frame has 3 bytes, more than 2"):
        reader.feed(pack_frame(b"abc")[:4])
    with pytest.raises(FrameTooLongError):
        _ = reader.num_missing


def test_length_is_big_endian():
    assert pack_frame(b"abc") == b"\0\0\0\3abc"
