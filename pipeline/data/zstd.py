"""Reading .zst files, with an error where one is cut off. No torch."""

from __future__ import annotations

import io
from typing import IO

import zstandard

_BLOCK = 1 << 17


class ZstdReader(io.RawIOBase):
    """The unpacked content of `stream`, frame after frame.

    The library's own reader takes the end of a file for the end of the data, and a file cut off in
    transfer for a shorter one.

    Raises:
        EOFError: while reading, where the file ends inside a frame, or is no zstd file.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._packed = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._ready:
            if not self._packed and not (block := self._stream.read(_BLOCK)):
                if self._frame is not None:
                    raise EOFError("the file ends inside a zstd frame")
                return 0
            self._ready = memoryview(self._unpack(self._packed or block))
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _unpack(self, packed: bytes) -> bytes:
        if self._frame is None:
            self._frame = zstandard.ZstdDecompressor().decompressobj()
        try:
            unpacked = self._frame.decompress(packed)
        except zstandard.ZstdError as error:
            raise EOFError(f"no zstd data ({error})") from error
        self._packed = b""
        if self._frame.eof:
            self._packed, self._frame = self._frame.unused_data, None
        return unpacked
