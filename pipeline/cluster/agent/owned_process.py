"""A process that belongs to this one: it ends with it, and takes its own children along. Linux."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
# A killed process may need this long to leave a driver's call.
KILL_SECONDS = 10.0
_LIBC = ctypes.CDLL(None, use_errno=True)


def start_owned(
    command: Sequence[str],
    environment: Mapping[str, str],
    stdout: int,
    stderr: int,
    inherit: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a child that the system kills when this process ends in any way. This process becomes the parent
    of whatever the child leaves behind, so that nothing of it escapes.

    Args:
        command, environment, stdout, stderr: As for `subprocess.Popen`.
        inherit: Descriptors that the child keeps under their numbers.

    Raises:
        OSError: the command cannot be started.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    parent = os.getpid()

    def die_with_parent() -> None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before that took effect
            os.kill(os.getpid(), signal.SIGKILL)

    return subprocess.Popen(
        command,
        env=dict(environment),
        stdout=stdout,
        stderr=stderr,
        pass_fds=tuple(inherit),
        preexec_fn=die_with_parent,  # this process has one thread when it starts a rank
    )


def kill_all(left: Callable[[], Sequence[int]]) -> bool:
    """Kill what `left` names until it names nothing more (ten seconds at most: a process in a driver's call
    dies when that returns); whether it has named anything."""
    had_to = False
    deadline = time.monotonic() + KILL_SECONDS
    while (pids := left()) and time.monotonic() < deadline:
        had_to = True
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return had_to


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Be the parent of every descendant whose own parent ends, for so long: none escapes `descendants`."""
    before = ctypes.c_int()
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, before.value)


def descendants(ancestor: int) -> list[int]:
    """Process ids of the children of `ancestor`, their children, and so on; no zombies."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):  # it has ended, and its children have other parents
        for process in psutil.Process(ancestor).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
    return found


# DeepSpeed's launcher on a host: in its own command line, and in that of the shell that ssh starts it with.
_LAUNCHER = "deepspeed.launcher.launch"
_SSH = "the ssh connection by which it was started"
_ON_THIS_MACHINE = ("deepspeed", "deepspeed.launcher.runner")


class LaunchLine:
    """The processes over one that DeepSpeed's launcher has started, up to what keeps them going: the ssh
    connection by which they came here, or ``deepspeed`` on this machine. Of other launchers: none.

    What is above that may go: a shell that its user leaves, which nohup and tmux are for.

    Args:
        parent: DeepSpeed's launcher, or something else.
        has_launch: Who has started ``deepspeed`` looks at it, and at what it writes.
    """

    def __init__(self, parent: int, has_launch: bool) -> None:
        self._line: list[psutil.Process] = []
        self._has_launch = has_launch
        self._origin = ""
        with contextlib.suppress(psutil.Error):  # another user's, in a system that hides these
            self._find(psutil.Process(parent))

    def _find(self, process: psutil.Process | None) -> None:
        line = []
        while process is not None and any(_LAUNCHER in word for word in process.cmdline()):
            line.append(process)
            process = process.parent()
        if not line or process is None:
            return
        words = [word.rpartition("/")[2] for word in process.cmdline()]
        if process.name().startswith("sshd"):
            self._origin = _SSH
        elif not self._has_launch and any(word in _ON_THIS_MACHINE for word in words):
            self._origin = "the deepspeed command that started it"
        if self._origin:
            self._line = [*line, process]

    def broken(self) -> str:
        """What of it is gone; empty while all is there."""
        if not all(map(_is_alive, self._line)):
            return self._origin
        if self._origin == _SSH and not self._has_launch and _is_unread(sys.stdout.fileno()):
            return "who read its output through ssh"  # pdsh has ended, and its ssh has not noticed more
        return ""


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _is_unread(descriptor: int) -> bool:
    """Whether nobody reads any more what is written there."""
    watch = select.poll()
    watch.register(descriptor, 0)
    return bool(watch.poll(0))


def new_file_in_memory(name: str) -> IO[bytes]:
    """A file that has no place on any disk, and ends with the processes that hold it."""
    return os.fdopen(os.memfd_create(name), "r+b")


def _prctl(option: int, value: object) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")
