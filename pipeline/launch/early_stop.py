"""Requests to stop that come while a launch is still reading its own code: nothing has been started yet."""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType

from pipeline.base.problems import EXIT_STOPPED

REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def take_early_stops() -> None:
    """From now on such a request is the end, with the documented exit code; one that the caller has been told
    to ignore stays ignored."""
    for number in REQUESTS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _leave)


def _leave(number: int, _frame: FrameType | None) -> None:
    # Not an exception, which would come out of the middle of an import.
    with contextlib.suppress(OSError):  # of a terminal that has hung up
        os.write(2, f"Stopped by {signal.Signals(number).name} before anything was started.\n".encode())
    os._exit(EXIT_STOPPED)
