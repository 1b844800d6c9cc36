"""What the commands of the pipeline share: what they show, who reads it may leave, who ends them is heard."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import select
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, NoReturn

from pipeline.base.problems import EXIT_FAILED, EXIT_STOPPED, EXIT_WRONG_JOB
from pipeline.base.words import wrapped

HELP, HELP_ALL = "--help", "--help_all"
# To the line's beginning, whatever another process has drawn on it.
CLEAR = "\r\x1b[K"
_USUAL = 80  # columns, where a terminal does not tell
_SIZE = re.compile(r"[1-9][0-9]{0,4}")
# Requests to stop a job.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def run_command(main: Callable[[], int]) -> NoReturn:
    """Run a command and end this process with its exit code; with 1 where its reader has left, or a file or
    device failed for a reason that no check had foreseen, as where its output goes to a full disk."""
    complete_process()
    try:
        with reader_may_leave():
            sys.exit(main())
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        say(f"error: {where}{error.strerror or error}")
        _drop_output()
        sys.exit(EXIT_FAILED)


def help_asked(args: Sequence[str]) -> str:
    """Which of the two helps a command line asks for; empty for none."""
    asked = {HELP if each == "-h" else each.replace("-", "_").replace("__", "--", 1) for each in args}
    return next((each for each in (HELP_ALL, HELP) if each in asked), "")


def complete_process() -> None:
    """What every command takes for granted: standard streams, which a caller may have closed (``>&-``), a
    terminal's size that is a number where one is set, and a current folder.

    Raises:
        SystemExit: code 2 after a message: the current folder has been removed.
    """
    nowhere = Path(os.devnull)
    sys.stdin = sys.stdin or nowhere.open()
    sys.stdout = sys.stdout or nowhere.open("w")
    sys.stderr = sys.stderr or nowhere.open("w")
    for name in ("COLUMNS", "LINES"):
        if not _SIZE.fullmatch(os.environ.get(name, "1")):  # libraries end at it
            del os.environ[name]
    try:
        os.getcwd()  # noqa: PTH109  (it is not the path that is asked for)
    except OSError as error:
        say(f"error: the current folder cannot be used ({error.strerror}): change to one that exists.")
        sys.exit(EXIT_WRONG_JOB)


def _drop_output() -> None:
    """The interpreter flushes once more when it ends, and what is left has nowhere to go."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _MessageHandler(logging.Handler):
    """Passes the text of each record on; what `write` raises ends the command as any other error does."""

    def __init__(self, write: Callable[[str], object]) -> None:
        super().__init__()
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        self._write(record.getMessage())


def show_messages(write: Callable[[str], object], of: str = "pipeline") -> None:
    """Give what the modules below `of` log, from INFO on, to `write`; to it alone, if called again.

    Process-wide, so it is for whoever owns the process: modules log, and never ask who listens.
    """
    logger = logging.getLogger(of)
    for handler in [each for each in logger.handlers if isinstance(each, _MessageHandler)]:
        logger.removeHandler(handler)
    logger.addHandler(_MessageHandler(write))
    logger.setLevel(logging.INFO)


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
        _drop_output()
        sys.exit(EXIT_FAILED)


def stop_signals() -> tuple[signal.Signals, ...]:
    """Those that the owner of a job takes: a job started with nohup must outlive its terminal, so an ignored
    SIGHUP stays ignored."""
    hang_up_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return STOP_SIGNALS[:-1] if hang_up_ignored else STOP_SIGNALS


def take_stop_signals(handler: Callable[[int, FrameType | None], object]) -> None:
    """Let `handler` have them; one that the caller set to be ignored (nohup) stays ignored."""
    for number in STOP_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def leave_at_stop(number: int, _frame: FrameType | None) -> NoReturn:
    """The end of a command that is still reading its own code and has started nothing."""
    # Not an exception, which would come out of the middle of an import.
    with contextlib.suppress(OSError):  # of a terminal that has hung up
        os.write(2, f"Stopped by {signal.Signals(number).name} before anything was started.\n".encode())
    os._exit(EXIT_STOPPED)


def say(line: str) -> None:
    """One line for the user, beside the job's own output: on standard error, at a terminal's width."""
    width = columns(sys.stderr)
    shown = line if width is None else CLEAR + wrapped(line, width)
    with contextlib.suppress(OSError):  # the terminal is gone; the job continues
        print(shown, file=sys.stderr, flush=True)


def draw(line: str) -> bool:
    """Show `line` on a terminal until anything else is shown there; False, and nothing, elsewhere."""
    width = columns(sys.stderr)
    if width is None:
        return False
    with contextlib.suppress(OSError, ValueError):
        # Whoever draws has other work: a terminal that is stopped (Ctrl-S) is left alone.
        if select.select([], [sys.stderr], [], 0)[1]:
            print(CLEAR + line[: width - 1], end="", file=sys.stderr, flush=True)
    return True


def columns(stream: IO[str]) -> int | None:
    """The width of the terminal that `stream` is; None where it is none, or a dumb one."""
    if not stream.isatty() or os.environ.get("TERM", "").lower() in ("dumb", "unknown"):
        return None
    with contextlib.suppress(OSError, ValueError):
        return int(os.environ.get("COLUMNS", 0)) or os.get_terminal_size(stream.fileno()).columns or _USUAL
    return _USUAL
