"""One job at a time in an output folder: two would write the same files and checkpoints.

Rank 0 holds a lock on ``<output_dir>/lock`` while it runs; the system gives it up when that process ends,
however it ends. The launch looks first, so that a second start is refused before its ranks are started.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
from collections.abc import Iterator
from pathlib import Path

from pipeline.job.problems import JobError, Problem

LOCK_FILE = "lock"
_HELD = (errno.EAGAIN, errno.EACCES)


@contextlib.contextmanager
def only_job(output_dir: str | Path) -> Iterator[None]:
    """Be the job that runs in this folder, which is made if it is missing.

    On a file system without locks nothing is held, and nothing refused.

    Raises:
        JobError: another job runs in it, or it cannot be written.
    """
    path = Path(output_dir) / LOCK_FILE
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(path.open("a"))
        except OSError as error:
            rule = f"cannot be written: {error.strerror}"
            remedy = "Choose another --output_dir, or see to its permissions"
            raise JobError([Problem("output_dir", str(output_dir), rule, remedy)]) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                raise JobError([_taken(output_dir)]) from error
        yield


def running_problems(output_dir: str | Path) -> list[Problem]:
    """Says whether a job runs in this folder now. Writes nothing."""
    try:
        file = (Path(output_dir) / LOCK_FILE).open("r")
    except OSError:
        return []
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return [_taken(output_dir)] if error.errno in _HELD else []
    return []


def _taken(output_dir: str | Path) -> Problem:
    remedy = "Wait for its end, stop it, or choose another --output_dir"
    return Problem("output_dir", str(output_dir), "another job is running in this folder", remedy)
