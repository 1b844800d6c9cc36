"""One job at a time in an output folder: two would write the same files and checkpoints.

Rank 0 holds a lock on ``<output_dir>/lock`` while it runs; the system gives it up when that process ends,
however it ends. Some file systems do not pass locks on to other hosts, and some have none at all, so there is
a lease beside it (`pipeline.cluster.lease`), which a dead host cannot hold for longer than 45 seconds. The
launch looks first, so that a second start is refused before its ranks are started.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO

from pipeline.base.files import is_local
from pipeline.base.problems import JobError, Problem
from pipeline.cluster.lease import (
    FolderLease,
    Lease,
    LeaseTaken,
    Timing,
    own_lease,
    read_lease,
    verdict_of_process,
)

LOCK_FILE = "lock"
DEFAULT_TIMING = Timing()
_HELD = (errno.EAGAIN, errno.EACCES)


@contextlib.contextmanager
def only_job(output_dir: str | Path, timing: Timing = DEFAULT_TIMING) -> Iterator[None]:
    """Be the job that runs in this folder, which is made if it is missing.

    Takes up to 45 seconds where a job on another host, or in another container, did not end by itself.

    Raises:
        JobError: another job runs in it, or it cannot be written.
    """
    folder = Path(output_dir)
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((folder / LOCK_FILE).open("a"))
            works = _lock(file, folder)
            say = partial(print, file=sys.stderr, flush=True)
            decides = works and is_local(folder)
            lease = FolderLease(folder, lock_decides=decides, lock_works=works, timing=timing, say=say)
            lease.take()
        except OSError as error:
            rule = f"cannot be written: {error.strerror}"
            remedy = "Choose another --output_dir, or see to its permissions"
            raise JobError([Problem("output_dir", str(output_dir), rule, remedy)]) from error
        except LeaseTaken as taken:
            raise JobError([_taken(folder, taken.lease)]) from taken
        stack.callback(lease.release)
        yield


def _lock(file: IO[str], folder: Path) -> bool:
    """Lock a file; False where the file system has no locks.

    Raises:
        JobError: another job has it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            raise JobError([_taken(folder, read_lease(folder))]) from error
        return False
    return True


def running_problems(output_dir: str | Path) -> list[Problem]:
    """Says whether a job is known to run in this folder now. Writes nothing, and does not wait: what only
    watching can tell, the start finds."""
    folder = Path(output_dir)
    try:
        file = (folder / LOCK_FILE).open("r")
        lease = read_lease(folder)
    except OSError:
        return []
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            held = error.errno in _HELD or (lease is not None and _is_alive(lease))
            return [_taken(folder, lease)] if held else []
    return []


def _is_alive(lease: Lease) -> bool:
    here = own_lease()
    return lease.boot == here.boot and verdict_of_process(lease, here) == "alive"


def _taken(folder: Path, lease: Lease | None) -> Problem:
    by = ""
    if lease:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(lease.started))
        by = f" (process {lease.pid} on {lease.host}, since {since})"
    remedy = "Wait for its end, stop it, or choose another --output_dir"
    return Problem("output_dir", str(folder), f"another job is running in this folder{by}", remedy)
