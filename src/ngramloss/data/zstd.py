"""a file compressed by Zstandard → its bytes, or an error if it is truncated."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, BinaryIO

from ngramloss.errors import UserError

CHUNK = 1 << 10
"""Bytes that are decompressed at a time. Four of them can become 128 KiB, so this bounds the memory to 32 MiB."""


class ZstdFile(io.RawIOBase):
    """Decompressed bytes of all frames of a file.

    The package's own reader stops after the first frame, and takes a truncated file for a whole one.
    """

    def __init__(self, file: BinaryIO) -> None:
        try:
            from zstandard import ZstdDecompressor, ZstdError
        except ImportError:
            raise UserError("reading .zst files needs the package zstandard: pip install 'ngramloss[score]'") from None
        self._file, self._error = file, ZstdError
        self._new_frame: Any = lambda: ZstdDecompressor().decompressobj()
        self._frame: Any = None
        self._compressed = b""
        self._ready = memoryview(b"")  # a part of it is not a copy

    def readable(self) -> bool:
        """Whether it can be read: yes."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer as far as possible; 0 at the end of the file."""
        while not self._ready and self._more():
            pass
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()

    def _more(self) -> bool:
        """Decompress the next bytes; False at the end of the file."""
        self._compressed = self._compressed or self._file.read(CHUNK)
        if not self._compressed:
            if self._frame is not None:
                raise EOFError("the compressed data end before their end marker")
            return False
        self._frame = self._frame or self._new_frame()
        try:
            self._ready = memoryview(self._frame.decompress(self._compressed))
        except self._error as error:
            raise EOFError(str(error)) from error
        self._compressed = self._frame.unused_data if self._frame.eof else b""
        self._frame = None if self._frame.eof else self._frame
        return True


def open(path: Path) -> ZstdFile:
    """Open a file for reading."""
    return ZstdFile(path.open("rb"))
