"""Files of a checkpoint: on the disk when the call returns, each with its size and digest. No torch.

A digest is ``"sha256:<hex>"`` or ``"xxh3_128:<hex>"``, taken from the bytes on their way to the file, so that
nothing is read back. Both find every accident (a flipped bit, a truncated or mixed-up file). XXH3 costs a
tenth of what the copying costs and is what a save writes; SHA-256 costs more than the writing. Neither
protects against deliberate forgery: for that there is the list of types that a file may
hold (`pipeline.checkpoints.torch_file`).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import xxhash

DEFAULT = "xxh3_128"
ALGORITHMS: dict[str, Callable[[], Any]] = {"sha256": hashlib.sha256, "xxh3_128": xxhash.xxh3_128}
BLOCK = 1 << 23  # bytes that are read at once


def digest_steps(path: Path, algorithm: str = DEFAULT) -> Iterator[str | None]:
    """Digest a file block by block: None after each 8 MiB, the digest at the end.

    Raises:
        OSError: it cannot be read.
        KeyError: an algorithm that is not in `ALGORITHMS`.
    """
    state = ALGORITHMS[algorithm]()
    memory = memoryview(bytearray(BLOCK))  # one for all blocks: fresh memory costs as much as the digest
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while count := file.readinto(memory):
            state.update(memory[:count])
            yield None
    yield f"{algorithm}:{state.hexdigest()}"


def digest_of(path: Path, algorithm: str = DEFAULT) -> str:
    """The digest of a whole file; raises as `digest_steps`."""
    *_, found = digest_steps(path, algorithm)
    return str(found)


def has_digest(path: Path, digest: str) -> bool:
    """Whether a file's content is what `digest` was taken of; raises as `digest_steps`."""
    return digest_of(path, digest.partition(":")[0]) == digest


_CHUNK = 1 << 24
# A file's bytes go to the disk in portions of this size, while the next are copied into the page cache.
_PORTION = 1 << 25


class _Writable(Protocol):
    def write(self, data: Any, /) -> int: ...


@dataclass(frozen=True)
class WrittenFile:
    """A file that is complete and on the disk.

    Attributes:
        name: Relative to the checkpoint's folder, with forward slashes.
        bytes: Its size.
        digest: As `pipeline.checkpoints.files` writes it.
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

    def __init__(self, file: _Writable) -> None:
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


class _EarlySync:
    """A file whose bytes are sent to the disk while more of them come.

    A disk that begins to work when the last byte is written makes a save take the time of the copying plus
    that of the disk. So a thread sends what there is after each portion; a small file has no thread.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._since = 0
        self._sender = ThreadPoolExecutor(1, "early-sync")
        self._sent: Future[None] | None = None

    def write(self, data: Any) -> int:
        count = self._file.write(data)
        self._since += count
        if self._since >= _PORTION and (self._sent is None or self._sent.done()):
            self._check()
            self._since = 0
            self._file.flush()
            # An interpreter that ends begins nothing new; `finish` syncs all.
            with contextlib.suppress(RuntimeError):
                self._sent = self._sender.submit(os.fdatasync, self._file.fileno())
        return count

    def finish(self) -> None:
        """Return when every byte is on the disk.

        Raises:
            OSError: the disk refused some.
        """
        self._check()
        self._file.flush()
        os.fsync(self._file.fileno())

    def _check(self) -> None:
        """Raise what the thread met: the system reports a failed write once, to whichever call comes next."""
        if self._sent is not None:
            self._sent.result()

    def close(self) -> None:
        """End the thread."""
        self._sender.shutdown()


@contextlib.contextmanager
def synced(folder: Path, name: str) -> Iterator[_EarlySync]:
    """A new file below `folder` to write to; on the disk when the block ends.

    Raises:
        OSError: it cannot be written; it is named.
    """
    path = folder / name
    try:
        if not folder.is_dir():  # it is not made again where a mount has vanished
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file, contextlib.closing(_EarlySync(file)) as early:
            yield early
            early.finish()
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
    """Sync a file that other code wrote.

    Raises:
        OSError: it cannot be read.
    """
    path = folder / name
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return WrittenFile(name, path.stat().st_size, digest_of(path))
