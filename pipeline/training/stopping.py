"""Why a run stops before its last step: a signal, its time limit, or a file that somebody made.

Each rank looks at its own signals, rank 0 also at the clock and the file. What a rank finds is a code that
goes into the agreement of the next boundary, so that all ranks stop there, for the same reason.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from pathlib import Path

from pipeline.job.stop_file import Stamp, stamp_of
from pipeline.training.signals import StopRequest

# Codes beside the numbers of signals, which are below 65.
TIME_LIMIT, STOP_FILE = 101, 102
# Seconds between two looks for the file: often enough for people, seldom enough for a shared file system.
FILE_SECONDS = 2.0
# Seconds kept for leaving: the summary, the end of process groups.
LEAVING_SECONDS = 5.0


def reason_text(reason: tuple[int, int]) -> str:
    """A rank's code in words, such as ``SIGTERM on rank 3``."""
    rank, code = reason
    if code == TIME_LIMIT:
        return "time limit"
    if code == STOP_FILE:
        return "stop file"
    return f"{signal.Signals(code).name} on rank {rank}"


class TimeLimit:
    """The moment by which a run must be over.

    The run stops when what is left of its time is what the slowest save and the longest of the last steps
    took, half of that again, and `LEAVING_SECONDS`. Until a save has been measured, it is taken to last
    `first_save` seconds.

    Args:
        seconds: Length of the job.
        started_at: When it was launched, in seconds since 1970; None: now. The clock is asked this once, so
            that one that jumps later changes nothing.
    """

    def __init__(
        self,
        seconds: float,
        started_at: float | None,
        first_save: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        gone = 0.0 if started_at is None else max(0.0, time.time() - started_at)
        self._clock = clock
        self._end = clock() + seconds - gone
        self._save = first_save
        self._measured = False
        self._step = 0.0

    def record_save(self, seconds: float) -> None:
        """A save took so long."""
        self._save = max(self._save, seconds) if self._measured else seconds
        self._measured = True

    def record_step(self, seconds: float) -> None:
        """A step took so long; older ones are slowly forgotten, the first with its compilations too."""
        self._step = max(seconds, 0.98 * self._step)

    @property
    def margin(self) -> float:
        """Seconds that the stop needs."""
        return 1.5 * (self._save + self._step) + LEAVING_SECONDS

    @property
    def reached(self) -> bool:
        """Whether it is time to stop."""
        return self._clock() + self.margin >= self._end


class StopFile:
    """A file whose appearing, or being touched again, stops the run.

    One that lies there when the run starts is left over from an earlier stop, or meant for other jobs: it
    does not count until it is changed.

    Args:
        before: What lay there when the run started.
    """

    def __init__(self, path: Path, removed_when_obeyed: bool, before: Stamp) -> None:
        self.path = path
        self._removed_when_obeyed = removed_when_obeyed
        self._before = before
        self._next_look = 0.0
        self._seen = False

    def seen(self) -> bool:
        """Whether it has appeared; looks at most every `FILE_SECONDS`."""
        now = time.monotonic()
        if not self._seen and now >= self._next_look:
            self._next_look = now + FILE_SECONDS
            stamp = stamp_of(self.path)
            self._seen = stamp is not None and stamp != self._before
        return self._seen

    def obeyed(self) -> None:
        """Remove it, if it is this run's own: a file for several jobs is for its maker to remove."""
        if self._removed_when_obeyed:
            with contextlib.suppress(OSError):  # a folder, say: at the next start it does not count
                self.path.unlink()


class Stopping:
    """This rank's reasons to stop; the clock and the file are rank 0's."""

    def __init__(
        self, signals: StopRequest, time_limit: TimeLimit | None = None, file: StopFile | None = None
    ) -> None:
        self._signals, self.time_limit, self._file = signals, time_limit, file

    def code(self) -> int:
        """0 to continue, else a reason."""
        if self._signals.number is not None:
            return int(self._signals.number)
        if self.time_limit is not None and self.time_limit.reached:
            return TIME_LIMIT
        return STOP_FILE if self._file is not None and self._file.seen() else 0

    def record_step(self, seconds: float) -> None:
        """A step took so long."""
        if self.time_limit is not None:
            self.time_limit.record_step(seconds)

    def record_save(self, seconds: float) -> None:
        """A save took so long."""
        if self.time_limit is not None:
            self.time_limit.record_save(seconds)

    def obeyed(self) -> None:
        """The run has stopped, with everything saved."""
        if self._file is not None and self._file.seen():
            self._file.obeyed()
