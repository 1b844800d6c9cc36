"""What the commands of the pipeline share: who reads their output may leave, and who ends them is heard."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn

from pipeline.base.problems import EXIT_FAILED


def run_command(main: Callable[[], int]) -> NoReturn:
    """Run a command and end this process with its exit code; with 1 where its reader has left."""
    with reader_may_leave():
        sys.exit(main())


@contextlib.contextmanager
def end_interrupts() -> Iterator[None]:
    """Inside, SIGTERM raises a KeyboardInterrupt, as Ctrl-C does, so that what was begun is put away."""

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


@contextlib.contextmanager
def reader_may_leave() -> Iterator[None]:
    """Inside, the end of a pipe's reader (``| head``) ends this process with code 1 and without a traceback.

    Raises:
        SystemExit: that end, also where it is seen only when the last output is flushed.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes once more, and what is left has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_FAILED)


def say(line: str) -> None:
    """One line for the user, beside the job's own output: on standard error."""
    with contextlib.suppress(OSError):  # the terminal is gone; the job goes on
        print(line, file=sys.stderr, flush=True)
