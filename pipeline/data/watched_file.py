"""A memory-mapped file that must stay as it was when a run opened it. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeline.data.packing import TokenError


@dataclass(frozen=True)
class WatchedFile:
    """What a file was like: bytes, time of the last change in nanoseconds, and which file its name meant."""

    path: Path
    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> WatchedFile:
        """`path` as it is now.

        Raises:
            OSError: it cannot be found.
        """
        status = path.stat()
        return cls(path, status.st_size, status.st_mtime_ns, status.st_ino)

    def check(self) -> None:
        """Costs two microseconds, so that every batch can ask.

        Raises:
            TokenError: the file was written to, replaced or removed.
        """
        try:
            now = WatchedFile.of(self.path)
        except OSError as error:
            raise TokenError(f"{self.path} cannot be found any more ({error.strerror})") from error
        if now != self:
            raise TokenError(
                f"{self.path} changed under the run ({self.size:,} bytes when it was opened, {now.size:,} "
                f"now): its samples are no longer those that the order was made for"
            )
