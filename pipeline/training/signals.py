"""Stopping on request: a signal sets a flag, and the training loop looks at it between steps.

    SIGINT    Ctrl-C
    SIGTERM   the launcher, a batch system or a container runtime ends the job
    SIGUSR1   a batch system's early warning (Slurm: ``--signal=USR1@300``)

Signals reach ranks at different times, so a rank must not act on its own flag: the loop reduces the
flags of all ranks each step and all of them stop at the same boundary.

Before the ranks have met there is no boundary, and nothing to save: the first signal ends the process. It
raises `StoppedEarly` wherever the main thread is, and where that thread does not come back to Python, the
watching thread ends the process.

While they meet, some may have met already and count on this one, which cannot know. So a signal is kept for
what they agree on first; only where they have not met `EARLY_SECONDS` after it, because one of them does not
come, the watching thread ends the process.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

from pipeline.base.problems import EXIT_STOPPED, JobError

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

# One Ctrl-C can arrive twice: from the terminal and forwarded by a launcher, milliseconds apart.
SAME_KEYPRESS_SECONDS = 0.5

# How long a process may take to leave by itself before the ranks have met.
EARLY_SECONDS = 3.0
_SHORTEST_WAIT = 0.01  # of a socket, for which 0 means none at all


class StoppedEarly(BaseException):
    """A signal asked for the end before the ranks had met. Its text is the signal's name."""


class StopRequest:
    """Context manager that turns `STOP_SIGNALS` into a flag, and a second Ctrl-C into exit code 1.

    A Python signal handler waits until the main thread returns from C, and a rank that waits in a
    collective for a peer that is gone never does. The second Ctrl-C must work then above all, so a
    thread watches the interpreter's wakeup descriptor, which the C-level handler writes to at once.

    Args:
        announce: Say so on standard error when the first signal arrives; for rank 0.
        early: The ranks have not met yet; `meeting` ends that.

    Attributes:
        leave: Ends the process early, when it cannot do so by itself; receives the signal's name. Whoever has
            more to say than an exit code sets it.

    Forked children (data workers) inherit the handlers. There SIGTERM ends the child as usual, and the
    other two are ignored: the parent decides when it no longer needs its workers.

    Raises:
        ValueError: on entry, outside the main thread: only it can install handlers.
    """

    def __init__(self, announce: bool = False, early: bool = False) -> None:
        self._announce, self._early, self._meeting = announce, early, False
        self.leave: Callable[[str], None] = lambda name: None
        self._signal: signal.Signals | None = None
        self._previous: dict[signal.Signals, object] = {}
        self._pid = os.getpid()

    @property
    def number(self) -> signal.Signals | None:
        """The first signal that arrived on this rank; None if none did."""
        return self._signal

    @contextlib.contextmanager
    def meeting(self) -> Iterator[None]:
        """Inside, the ranks meet; afterwards a signal asks for a stop that all of them agree on.

        Raises:
            StoppedEarly: they could not meet after a signal, which has ended others.
        """
        self._meeting = True
        try:
            yield
        except JobError:
            raise
        except Exception as error:
            if self._signal is None:
                raise
            raise StoppedEarly(self._signal.name) from error
        self._early = False

    def __enter__(self) -> StopRequest:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)  # the C-level handler must never wait
        self._previous_wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)
        self._watcher = threading.Thread(target=self._watch, name="stop-request", daemon=True)
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            # None: a handler that was not installed from Python, which Python cannot put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()
        signal.set_wakeup_fd(self._previous_wakeup)
        self._writer.close()  # end of file ends the watcher
        self._watcher.join()
        self._reader.close()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            self._handle_in_child(number)
            return
        if self._signal is not None:
            return
        self._signal = signal.Signals(number)
        if self._announce:
            # os.write, since a print in the middle of another print raises "reentrant call".
            hint = " Ctrl-C again: stop at once, without saving." if number == signal.SIGINT else ""
            what = "stopping before the first step." if self._early else f"stopping after this step.{hint}"
            # A hung-up terminal takes no words; the stop itself is what counts.
            with contextlib.suppress(OSError):
                os.write(2, f"\n{self._signal.name}: {what}\n".encode())
        if self._early and not self._meeting:
            raise StoppedEarly(self._signal.name)

    def _handle_in_child(self, number: int) -> None:
        if number == signal.SIGTERM:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _watch(self) -> None:
        first: float | None = None
        later = b""
        while received := later or self._reader.recv(64):
            later, now = b"", time.monotonic()
            if signal.SIGINT in received:
                if first is not None and now - first > SAME_KEYPRESS_SECONDS:
                    # Not sys.exit: the main thread may never run again, and nothing is left to clean up.
                    os._exit(1)
                first = first or now
            asked = [number for number in STOP_SIGNALS if number in received]
            if asked and self._early:
                later = self._watch_leaving(asked[0])

    def _watch_leaving(self, number: signal.Signals) -> bytes:
        """End the process if it does not end by itself soon; unless the ranks meet after all: what arrives
        then is returned."""
        deadline = time.monotonic() + EARLY_SECONDS
        try:
            while self._early:
                self._reader.settimeout(max(deadline - time.monotonic(), _SHORTEST_WAIT))
                received = self._reader.recv(64)
                if not received or not self._early:  # the context has been left, or the ranks have met
                    return received
        except TimeoutError:
            if self._early:
                self.leave(number.name)
                os._exit(EXIT_STOPPED)
        finally:
            self._reader.settimeout(None)
        return b""


def end_process(code: int) -> NoReturn:
    """End this process as Python does, except that the interpreter is not torn down.

    A worker thread of gloo frees the tensors of the last collective when it gets to it. If it asks for the
    interpreter's lock while the interpreter is torn down, Python ends the thread inside a C++ destructor, and
    the process dies by SIGABRT ("terminate called without an active exception") with all its work done.

    Call it in the main thread; all other threads that are not daemons are waited for.
    """
    threading._shutdown()  # wakes the workers of executors, too, that nobody has shut down
    atexit._run_exitfuncs()  # what other libraries have asked for, such as monitors that send their last data
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
