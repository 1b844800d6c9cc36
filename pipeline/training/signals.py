"""Stopping on request: a signal sets a flag, and the training loop looks at it between steps.

    SIGINT    Ctrl-C
    SIGTERM   the launcher, a batch system or a container runtime ends the job
    SIGUSR1   a batch system's early warning (Slurm: ``--signal=USR1@300``)

Signals reach ranks at different times, so a rank must not act on its own flag: the loop reduces the
flags of all ranks each step and all of them stop at the same boundary.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

# One Ctrl-C can arrive twice: from the terminal and forwarded by a launcher, milliseconds apart.
SAME_KEYPRESS_SECONDS = 0.5


class StopRequest:
    """Context manager that turns `STOP_SIGNALS` into a flag, and a second Ctrl-C into exit code 1.

    A Python signal handler waits until the main thread returns from C, and a rank that waits in a
    collective for a peer that is gone never does. The second Ctrl-C must work then above all, so a
    thread watches the interpreter's wakeup descriptor, which the C-level handler writes to at once.

    Args:
        announce: Say so on standard error when the first signal arrives; for rank 0.

    Forked children (data workers) inherit the handlers. There SIGTERM ends the child as usual, and the
    other two are ignored: the parent decides when it no longer needs its workers.

    Raises:
        ValueError: on entry, outside the main thread: only it can install handlers.
    """

    def __init__(self, announce: bool = False) -> None:
        self._announce = announce
        self._signal: signal.Signals | None = None
        self._previous: dict[signal.Signals, object] = {}
        self._pid = os.getpid()

    @property
    def requested(self) -> bool:
        return self._signal is not None

    @property
    def signal_name(self) -> str | None:
        """The first signal that arrived on this rank, e.g. ``"SIGTERM"``; None if none did."""
        return None if self._signal is None else self._signal.name

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
            # A hung-up terminal takes no words; the stop itself is what counts.
            with contextlib.suppress(OSError):
                os.write(2, f"\n{self._signal.name}: stopping after this step.{hint}\n".encode())

    def _handle_in_child(self, number: int) -> None:
        if number == signal.SIGTERM:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _watch(self) -> None:
        first: float | None = None
        while received := self._reader.recv(64):
            if signal.SIGINT not in received:
                continue
            now = time.monotonic()
            if first is None:
                first = now
            elif now - first > SAME_KEYPRESS_SECONDS:
                # Not sys.exit: the main thread may never run again, and nothing is left to clean up.
                os._exit(1)
