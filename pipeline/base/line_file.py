"""A file that a run appends a line to at each step, on a disk that may be full for a while. No torch."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import TypeVar

T = TypeVar("T", bound="LineFile")
_FULL = (errno.ENOSPC, errno.EDQUOT)


class LineFile:
    """Lines, written as they come, in a folder that is made if it is missing.

    What a full disk does not take waits for the next line; only `sync` and `close` fail of it.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        self._waiting = b""

    def append(self, line: bytes) -> None:
        """Write a line, given without its end."""
        self._waiting += line + b"\n"
        try:
            self._write()
        except OSError as error:
            if error.errno not in _FULL:
                raise

    def sync(self) -> None:
        """Return once every line so far is on the disk.

        Raises:
            OSError: it is full.
        """
        self._write()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Raises OSError if lines are lost because the disk is full."""
        try:
            self._write()
        finally:
            self._file.close()

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        # What ends the run is told, not that its disk is full besides: a resumed run takes these steps again.
        with contextlib.suppress(OSError) if kind is not None else contextlib.nullcontext():
            self.close()

    def _write(self) -> None:
        """Write what waits; what has been written of it does not wait any more."""
        while self._waiting:
            try:
                written = self._file.write(self._waiting)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self.path)) from error
            self._waiting = self._waiting[written:]
