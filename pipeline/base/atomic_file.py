"""Replacing a file so that a crash leaves either the old or the new one, whole."""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


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
