"""Process bookkeeping (Linux): nothing that the harness starts may outlive it. No torch."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

# linux/prctl.h
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` ends, however it ends.

    `parent` is what the caller's parent was before the fork: it may be gone before prctl is reached.
    """
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that `end_descendants` finds them."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_descendants() -> list[int]:
    """Kill and reap every process below this one. Returns the pids, for those who want to report them."""
    ended = []
    while children := psutil.Process().children(recursive=True):
        for child in children:
            try:
                child.kill()
            except psutil.NoSuchProcess:
                continue
            ended.append(child.pid)
        _reap()
    return ended


def _reap() -> None:
    """Wait for the children, adopted ones included; each has been sent SIGKILL already."""
    try:
        while True:
            os.waitpid(-1, 0)
    except ChildProcessError:
        return


def redirect_standard_streams(stdout: Path, stderr: Path) -> None:
    """Append what this process and its children write to two files (or one, twice); read nothing."""
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for path, flags, descriptor in ((os.devnull, os.O_RDONLY, 0), (stdout, append, 1), (stderr, append, 2)):
        opened = os.open(path, flags, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
    # Written line by line: what a killed process printed is the most wanted output of all.
    sys.stdout.reconfigure(line_buffering=True)


def num_threads() -> int:
    """Threads of this process. A fork copies the calling one only, with whatever locks the others hold."""
    return psutil.Process().num_threads()


def exit_code(status: int) -> int:
    """The exit code in `subprocess` convention, negative for a signal, of a waitpid status."""
    return os.waitstatus_to_exitcode(status)


@contextmanager
def reserved_port() -> Iterator[int]:
    """A TCP port of 127.0.0.1 that nobody else is given while the context is open.

    The socket stays bound without listening. The kernel then neither hands the port to others nor refuses
    it to a listener that sets SO_REUSEADDR, as torch's TCPStore does.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]
