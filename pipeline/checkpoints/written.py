"""Files that are on the disk when the call returns, each with its size and digest. No torch.

The digest is taken from the bytes on their way to the file, so that nothing is read back. XXH3 costs a tenth
of what the copying costs, SHA-256 more than the writing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pipeline.checkpoints.digests import ALGORITHMS, DEFAULT, digest_of

_CHUNK = 1 << 24


@dataclass(frozen=True)
class WrittenFile:
    """A file that is complete and on the disk.

    Attributes:
        name: Relative to the checkpoint's folder, with forward slashes.
        bytes: Its size.
        digest: As `pipeline.checkpoints.digests` writes it.
    """

    name: str
    bytes: int
    digest: str


class DigestStream:
    """Passes writes on to a file, counting and hashing them.

    A write never raises: torch's archive writes once more when it is destroyed, where an exception ends the
    process. What is written after a failure is dropped, and `written` raises it.

    Attributes:
        failure: The first error of the file.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.failure: OSError | None = None
        self._file = file
        self._hash = ALGORITHMS[DEFAULT]()
        self._bytes = 0

    def write(self, data: Any) -> int:
        if self.failure is None:
            try:
                self._file.write(data)
            except OSError as error:
                self.failure = error
            self._hash.update(data)
            self._bytes += len(data)
        return len(data)

    def written(self, name: str) -> WrittenFile:
        """What went through.

        Raises:
            OSError: not all of it could be written.
        """
        if self.failure is not None:
            raise self.failure
        return WrittenFile(name, self._bytes, f"{DEFAULT}:{self._hash.hexdigest()}")


@contextlib.contextmanager
def synced(folder: Path, name: str) -> Iterator[IO[bytes]]:
    """A new file below `folder` to write to; on the disk when the block ends.

    Raises:
        OSError: it cannot be written; it is named.
    """
    path = folder / name
    try:
        if not folder.is_dir():  # it is not made anew where a mount has vanished
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def write_bytes(folder: Path, name: str, content: bytes) -> WrittenFile:
    """Write a small file.

    Raises:
        OSError: it cannot be written.
    """
    with synced(folder, name) as file:
        stream = DigestStream(file)
        stream.write(content)
        return stream.written(name)


def copy_file(source: Path, folder: Path, name: str) -> WrittenFile:
    """Copy a file.

    Raises:
        OSError: it cannot be read or written.
    """
    with source.open("rb") as original, synced(folder, name) as file:
        stream = DigestStream(file)
        shutil.copyfileobj(original, stream, _CHUNK)  # type: ignore[misc]
        return stream.written(name)


def sync_existing(folder: Path, name: str) -> WrittenFile:
    """Bring a file that somebody else wrote to the disk.

    Raises:
        OSError: it cannot be read.
    """
    path = folder / name
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return WrittenFile(name, path.stat().st_size, digest_of(path))
