"""Files replaced whole or not at all, files of lines, locks, kinds of file systems, this system's name."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import logging
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

logger = logging.getLogger(__name__)

_Self = TypeVar("_Self", bound="LineFile")
# EACCES is what locks over a network may answer.
_HELD = (errno.EAGAIN, errno.EACCES)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_POLL_SECONDS = 0.1
_MESSAGE_SECONDS = 10.0
# What is done sooner needs no word.
_PATIENCE_SECONDS = 2.0
_MOUNTS = Path("/proc/self/mountinfo")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_PROCESSES = Path("/proc/self/ns/pid")
# Disks of one machine: whoever writes there runs on this system, or has the disk by its network service.
LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "ramfs", "overlay"})


@contextmanager
def replaced_atomically(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file to write the new content of `path` to; it takes the name when the block ends.

    The temporary file is a neighbour, because a rename is atomic within one file system only. Content
    is on the disk before the rename, and the rename before the return. If the block raises, `path` is
    untouched and the temporary file is gone.
    """
    temporary = path.with_name(f"{path.name}.tmp{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def remove_unfinished(path: Path) -> None:
    """Remove what processes that were killed while they replaced `path` have left beside it; for the only
    process that replaces it."""
    for temporary in path.parent.glob(f"{glob.escape(path.name)}.tmp*"):
        if temporary.name.removeprefix(f"{path.name}.tmp").isdecimal():
            temporary.unlink(missing_ok=True)


def remove_tree(path: Path) -> None:
    """Remove what has this name, a folder with all in it. Of a link only the link goes: what it leads to may
    have been put there to be kept."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync_files(folder: Path) -> None:
    """Return once all that is below `folder`, whichever process of this host wrote it, is on the disk."""
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def sync_folder(folder: Path) -> None:
    """Make renames and new names in `folder` survive a crash of the host."""
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        # What ends the run is reported, not its full disk: a resumed run takes these steps again.
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


@contextmanager
def file_lock(
    path: Path, time_limit: float = 0.0, *, shared: bool = False, quiet: bool = False
) -> Iterator[None]:
    """Hold the lock `path`; the operating system gives it up when its process ends, however it ends.

    The file stays behind, as removing it would let a third process lock a new file of the same name.

    Args:
        path: The lock file; made if missing.
        time_limit: Seconds to wait for another process.
        shared: Others may hold it shared, too.
        quiet: Log a wait at the level of debugging, else as information: after 2 seconds (half of a short
            limit), then every 10 seconds.

    Raises:
        TimeoutError: another process held it for longer than `time_limit`.
    """
    with path.open("a") as lock:
        begin, next_message = time.monotonic(), min(_PATIENCE_SECONDS, time_limit / 2)
        while not lock_now(lock, shared):
            waited = time.monotonic() - begin
            if waited >= time_limit:
                raise TimeoutError(f"another process has held {path} for more than {time_limit:.0f} s")
            if waited >= next_message:
                text = f"waiting for another process that holds {path} ({waited:.0f} of {time_limit:.0f} s)"
                logger.log(logging.DEBUG if quiet else logging.INFO, text)
                next_message = waited + _MESSAGE_SECONDS
            time.sleep(_POLL_SECONDS)
        yield  # closing the file gives the lock up


def make_folder(folder: Path) -> list[Path]:
    """Make a folder with its parents; those that were not there, the innermost first."""
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return made


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove them up to the first that holds something."""
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()


def lock_now(file: IO[Any], shared: bool = False) -> bool:
    """Lock an open file, without waiting; False where another process holds it.

    Raises:
        OSError: the file system has no locks.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            return False
        raise
    return True


def file_system_of(folder: Path) -> str:
    """The type, such as ``ext4`` or ``nfs4``, of the mount that holds a folder; empty where nobody says."""
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ""
    path, found, kind = folder.resolve(), -1, ""
    for line in lines:
        # 36 35 98:0 /root /mount/point rw,noatime shared:1 - ext4 /dev/sda1 rw
        before, _, after = line.partition(" - ")
        point = Path(_unescaped(before.split()[4]))
        if point == path or point in path.parents:
            depth = len(point.parts)
            if depth >= found:  # of two mounts on one point the later one is seen
                found, kind = depth, after.split()[0]
    return kind


def _unescaped(text: str) -> str:
    """Blanks and the like are written in octal."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def is_local(folder: Path) -> bool:
    """Whether a folder lies on a disk of this machine."""
    return file_system_of(folder) in LOCAL


def this_system() -> tuple[str, str]:
    """Names of this run of the operating system, and of the space that process ids belong to: containers have
    one of their own. Empty where the system does not say."""
    boot = _BOOT.read_text(encoding="ascii").strip() if _BOOT.exists() else ""
    return boot, str(_PROCESSES.stat().st_ino) if _PROCESSES.exists() else ""
