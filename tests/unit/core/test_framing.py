"""Framing of messages."""

import pytest

from prime_rl.core.framing import FrameReader, FrameTooLongError, pack_frame


def test_feed_any_parts_gives_the_bodies_in_order():
    bodies = [b"", b"a", b"bcd" * 100]
    stream = b"".join(map(pack_frame, bodies))
    for size in (1, 2, 3, 5, 1000):
        reader, received = FrameReader(300), list[bytes]()
        for start in range(0, len(stream), size):
            received += reader.feed(stream[start : start + size])
        assert received == bodies
    assert pack_frame(b"abc") == b"\0\0\0\3abc", "the length is big-endian"


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
