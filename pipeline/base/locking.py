"""Work that one process of a host does while the others wait. No torch, no process group."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_POLL_SECONDS = 0.1
_MESSAGE_SECONDS = 10.0
# What is done sooner needs no word.
_PATIENCE_SECONDS = 2.0


@contextmanager
def file_lock(path: Path, time_limit: float, report: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock `path`; the operating system gives it up when its process ends, however it ends.

    The file stays behind, as removing it would let a third process lock a new file of the same name.

    Args:
        path: The lock file; made if missing.
        time_limit: Seconds to wait for another process.
        report: Receives a message after 2 seconds of a wait (half of a short limit), then every 10 seconds.

    Raises:
        TimeoutError: another process held it for longer than `time_limit`.
    """
    with path.open("a") as lock:
        _acquire(lock.fileno(), path, time_limit, report)
        yield  # closing the file gives the lock up


def _acquire(descriptor: int, path: Path, time_limit: float, report: Callable[[str], None]) -> None:
    begin = time.monotonic()
    next_message = min(_PATIENCE_SECONDS, time_limit / 2)
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            waited = time.monotonic() - begin
        if waited >= time_limit:
            raise TimeoutError(f"another process has held {path} for more than {time_limit:.0f} s")
        if waited >= next_message:
            report(f"waiting for another process that holds {path} ({waited:.0f} of {time_limit:.0f} s)")
            next_message = waited + _MESSAGE_SECONDS
        time.sleep(_POLL_SECONDS)
