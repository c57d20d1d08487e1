"""Separates the messages in a byte stream: a mark, then for each message its length (4 bytes, big-endian) and its bytes."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

MARK = b"\0dtype-engine\0"
MOST_BYTES = 16 << 20
"""Maximum number of bytes of a message."""
_MOST_BEFORE_THE_MARK = 1 << 20


class WireError(Exception):
    """Raised if the other process sends data that no dtype-engine of this version sends."""


class FrameReader:
    """Reads the messages of a byte stream. read: waits for bytes and returns at most n of them, or b"" at the end."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read = read
        self._decompressor: Any = None
        self._buffer = bytearray()

    def find_mark(self, compressed: bool) -> bool:
        """Skip all bytes up to the mark, such as text of a login shell. Returns False if the stream ends without the mark. Raises
        WireError if no mark comes within a megabyte. compressed: whether the rest of the stream is compressed.
        """
        while (index := self._buffer.find(MARK)) < 0:
            if len(self._buffer) > _MOST_BEFORE_THE_MARK:
                raise WireError("its first megabyte has no mark of dtype-engine")
            if not self._fill():
                return False
        rest = bytes(self._buffer[index + len(MARK) :])
        self._buffer.clear()
        if compressed:
            self._decompressor = zlib.decompressobj()
            self._take(rest)
        else:
            self._buffer += rest
        return True

    def next(self) -> bytes | None:
        """Return the next message, or None at the end of the stream. Raises WireError."""
        size = self._exactly(4)
        if size is None:
            return None
        length = int.from_bytes(size, "big")
        if length > MOST_BYTES:
            raise WireError(f"a message of {length:,} bytes")
        return self._exactly(length)

    def _exactly(self, count: int) -> bytes | None:
        while len(self._buffer) < count:
            if not self._fill():
                return None
        data = bytes(self._buffer[:count])
        del self._buffer[:count]
        return data

    def _fill(self) -> bool:
        data = self._read(1 << 16)
        self._take(data)
        return bool(data)

    def _take(self, data: bytes) -> None:
        if self._decompressor is None:
            self._buffer += data
            return
        try:
            while data:  # in pieces, because a few bytes may decompress to very many
                self._buffer += self._decompressor.decompress(data, MOST_BYTES)
                data = self._decompressor.unconsumed_tail
                if len(self._buffer) > 2 * MOST_BYTES:
                    raise WireError("too much at once")
        except zlib.error as error:
            raise WireError(str(error)) from None


class FrameWriter:
    """Writes messages to a stream. write: writes all bytes it is given, and raises OSError if the reader is gone."""

    def __init__(self, write: Callable[[bytes], object], compressed: bool = False) -> None:
        self._write = write
        self._compressor = zlib.compressobj() if compressed else None

    def mark(self) -> None:
        self._write(MARK)

    def put(self, message: bytes) -> None:
        data = len(message).to_bytes(4, "big") + message
        if self._compressor is not None:
            data = self._compressor.compress(data) + self._compressor.flush(zlib.Z_SYNC_FLUSH)
        self._write(data)
