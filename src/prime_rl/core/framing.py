"""Frames in a stream of bytes: the length of the body (u32, big-endian), then the body.

What a body contains, and how long it may be, differs.
"""

import struct

_LENGTH = struct.Struct(">I")
LENGTH_BYTES = _LENGTH.size
"""Bytes in front of a body."""


class FrameTooLongError(ValueError):
    """The other side announces a longer body than the receiver accepts."""


def pack_frame(body: bytes | bytearray) -> bytes:
    """Return a frame."""
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Splits received bytes into the bodies of frames.

    Attributes:
        max_bytes: limit of a body.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._buffer = bytearray()

    @property
    def num_missing(self) -> int:
        """Number of bytes that complete the length of the next frame, or its body: nothing after it is received.

        Raises FrameTooLongError.
        """
        received = len(self._buffer)
        return (LENGTH_BYTES if received < LENGTH_BYTES else LENGTH_BYTES + self._length(0)) - received

    def feed(self, data: bytes) -> list[bytes]:
        """Return the bodies that `data` completes. Raises FrameTooLongError."""
        buffer, bodies, start = self._buffer, list[bytes](), 0
        buffer += data
        while len(buffer) >= (body := start + LENGTH_BYTES):
            end = body + self._length(start)
            if len(buffer) < end:
                break
            bodies.append(bytes(memoryview(buffer)[body:end]))
            start = end
        del buffer[:start]
        return bodies

    def _length(self, start: int) -> int:
        (length,) = _LENGTH.unpack_from(self._buffer, start)
        if length > self.max_bytes:
            raise FrameTooLongError(f"a frame has {length} bytes, more than {self.max_bytes}")
        return int(length)
