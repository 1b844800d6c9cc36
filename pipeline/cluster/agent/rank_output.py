"""What a rank writes: through its agent to the console and to a file of its own.

The agent never waits for either: a thread writes, and what it cannot write in time is left out. A stopped
terminal (Ctrl-S) or a file server that is away must not keep an agent from its work.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import shutil
import signal
import sys
import termios
import threading
import tty
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from pipeline.base.command import CLEAR, columns
from pipeline.cluster.agent.owned_process import new_file_in_memory

# Starts of a run whose logs are kept.
KEPT_STARTS = 10
# How much of a rank's last output goes with the report of its end.
_TAIL_LINES = 30
# What goes to the first host of the log of a rank whose host has a file system of its own, in bytes.
MAX_GATHERED = 2**20
# Lies beside the logs, so that a host can tell whether it sees the first host's folder.
MARK_FILE = ".first_host"
_START_NAME = re.compile(r"\d{8}-\d{6}")
_CLOSE_SECONDS = 2.0
_PIECE = 2**16
# What one call takes of a stream: a rank that writes without a pause leaves its agent time for the rest.
_PIECES_PER_CALL = 4
# More bytes than a pipe (1 MiB at most) or a terminal holds: behind them comes what outlives the rank.
_PIECES_AT_END = 32
_MAX_STACKS = 2**20
# Bytes that wait; more are dropped, oldest first.
MAX_WAITING = 4 * 2**20
# A longer line is cut.
MAX_LINE = 2**16
_CONTROL_SEQUENCE = re.compile(rb"\x1b\[([0-?]*)[ -/]*([@-~])")


class NonBlockingWriter:
    """Bytes go in at any time, and out of a descriptor when it takes them.

    Args:
        descriptor: Where they go; None until `open_file`.

    Attributes:
        error: Why bytes could not be written, the last time that they could not.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = descriptor
        self._waiting: deque[bytes] = deque()
        self._size = 0
        self._dropped = 0
        self._change = threading.Condition()
        self._closing = False
        self._path: Path | None = None
        self.error: OSError | None = None
        self._thread: threading.Thread | None = None

    def write(self, data: bytes) -> None:
        """Take `data`; never waits, never fails."""
        with self._change:
            self._waiting.append(data)
            self._size += len(data)
            while self._size > MAX_WAITING and len(self._waiting) > 1:
                dropped = len(self._waiting.popleft())
                self._size -= dropped
                self._dropped += dropped
            self._change.notify()
        self._start()

    def open_file(self, path: Path) -> None:
        """Write to this file from now on, what has come before first. Its folder is made."""
        with self._change:
            self._path = path
            self._change.notify()
        self._start()

    def close(self, seconds: float) -> None:
        """Give the thread so long for what is left."""
        with self._change:
            self._closing = True
            self._change.notify()
        if self._thread is not None:
            self._thread.join(seconds)

    def _start(self) -> None:
        # Not before a rank was started: a process with threads does not fork well.
        if self._thread is None and (self._descriptor is not None or self._path is not None):
            self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                pieces, self._waiting, self._size = self._waiting, deque(), 0
                dropped, self._dropped = self._dropped, 0
            data = b"".join(pieces)
            try:
                if dropped:
                    self._put(f"[{dropped:,} bytes could not be written]\n".encode())
                self._put(data)
            except OSError as error:
                # A terminal that is gone, a disk that is full. The run continues without it.
                self.error = error
                with self._change:
                    self._dropped += dropped + len(data)

    def _put(self, data: bytes) -> None:
        if self._path is not None and self._descriptor is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        while data:
            data = data[os.write(self._descriptor, data) :]  # type: ignore[arg-type]


class PlainLines:
    """Turns what a terminal shows into lines for a file: what is drawn over is left out, colours are."""

    def __init__(self) -> None:
        self._line = b""

    def feed(self, data: bytes) -> bytes:
        """The lines that `data` completes."""
        *lines, self._line = (self._line + data).split(b"\n")
        if len(self._line) > MAX_LINE:
            # A progress bar draws over itself for days without completing a line.
            self._line = self._line[self._line.rstrip(b"\r").rfind(b"\r") + 1 :]
        if len(self._line) > MAX_LINE:
            lines.append(self._line)
            self._line = b""
        text = b"".join(line + b"\n" for line in lines)
        if b"\r" not in text and b"\x1b" not in text:  # a rank may write millions of such lines
            return text
        return b"".join(self._plain(line) + b"\n" for line in lines)

    def rest(self) -> bytes:
        """The line that was never completed."""
        line, self._line = self._plain(self._line), b""
        return line + b"\n" if line.strip() else b""

    @staticmethod
    def _plain(line: bytes) -> bytes:
        line = line.rstrip(b"\r")
        # Erasing the line, or going back to its start, takes away what stood there.
        line = re.split(rb"\r|\x1b\[2K", line)[-1]
        return _CONTROL_SEQUENCE.sub(b"", line)


class Tail:
    """The last bytes of a stream."""

    def __init__(self, size: int = 2**14) -> None:
        self._bytes = bytearray()
        self._size = size

    def feed(self, data: bytes) -> None:
        self._bytes += data
        if len(self._bytes) > 2 * self._size:
            del self._bytes[: -self._size]

    @property
    def text(self) -> str:
        """All that is kept."""
        return self._bytes[-self._size :].decode(errors="replace")

    def lines(self, count: int) -> str:
        """The last `count` lines."""
        return "\n".join(self.text.splitlines()[-count:])


class RankOutput:
    """The streams of one rank.

    Standard output of every rank is meant for the console: only rank 0 writes there, and whoever tokenizes.
    Standard error of the other ranks is not: the failures of all ranks but the first are its consequences.
    Both are in the rank's log, without the drawing of progress bars.

    On a terminal rank 0 gets one, too, so that it draws its progress there.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._console = {1: NonBlockingWriter(1), 2: NonBlockingWriter(2) if rank == 0 else None}
        self._has_left_console = False
        self._at_start = {1: True, 2: True}  # whether the next byte of the stream begins a line
        self._is_drawn_on = {1: columns(sys.stdout) is not None, 2: columns(sys.stderr) is not None}
        self._log = NonBlockingWriter()
        self._lines = {1: PlainLines(), 2: PlainLines()}
        self._tail = Tail()
        self._kept = Tail(MAX_GATHERED)
        self._streams: dict[int, int] = {}  # reading end -> 1 or 2
        self._given: list[int] = []
        self.stacks = new_file_in_memory("stacks")
        self.folder: Path | None = None
        self._trouble: OSError | None = None
        self._said_trouble = False

    def open(self) -> tuple[int, int]:
        """Descriptors for the rank's standard output and error; call `started` when it has them."""
        given = []
        for number in (1, 2):
            is_terminal = self._rank == 0 and number == 1 and os.isatty(1)
            reader, writer = _terminal() if is_terminal else os.pipe()
            os.set_blocking(reader, False)
            self._streams[reader] = number
            given.append(writer)
        self._given = given
        return given[0], given[1]

    def started(self) -> None:
        """Close the rank's ends."""
        for descriptor in self._given:
            os.close(descriptor)

    @property
    def readers(self) -> tuple[int, ...]:
        """Readable when `pump` has something to do."""
        return tuple(self._streams)

    def pump(self, at_end: bool = False) -> list[int]:
        """Pass on what has come, or the first of it if it is much; the streams that have ended since the last
        call. `at_end`: the rank has ended, and all that it has written is taken."""
        pieces = _PIECES_AT_END if at_end else _PIECES_PER_CALL
        ended = [reader for reader, number in self._streams.items() if self._drain(reader, number, pieces)]
        for reader in ended:
            del self._streams[reader]
        if at_end:
            for lines in self._lines.values():
                self.log(lines.rest())
        return ended

    def _drain(self, reader: int, number: int, pieces: int) -> bool:
        """Take what is there, and no more than so many pieces; True at the end of the stream."""
        for _ in range(pieces):
            try:
                data = os.read(reader, _PIECE)
            except BlockingIOError:
                return False
            except OSError:  # EIO: the terminal's other end is closed
                return True
            if not data:
                return True
            self._take(number, data)
        return False

    def _over_drawing(self, number: int, data: bytes) -> bytes:
        """On a terminal, what begins a line begins it: the coordinator's clock may stand there, and below the
        last line of standard output rank 0's progress bar."""
        begins, self._at_start[number] = self._at_start[number], data.endswith(b"\n")
        return CLEAR.encode() + data if begins and self._is_drawn_on[number] else data

    def leave_console(self) -> None:
        """What it writes on standard error from now on is for the log only."""
        self._has_left_console = True

    def _take(self, number: int, data: bytes) -> None:
        console = self._console[number]
        if console is not None and not (number == 2 and self._has_left_console):
            console.write(self._over_drawing(number, data))
        if number == 2:
            self._tail.feed(data)
        self.log(self._lines[number].feed(data))

    def log(self, data: bytes) -> None:
        """Into the rank's log only."""
        if data:
            self._log.write(data)
            self._kept.feed(data)

    def log_to(self, folder: Path) -> None:
        """The rank's log is in this folder from now on, what has been kept so far included."""
        if self.folder is None:
            self.folder = folder
            self._log.open_file(folder / log_name(self._rank))

    def new_trouble(self) -> str:
        """Why a log cannot be written here, the first time that one cannot; else nothing."""
        error = self._log.error or self._trouble
        if error is None or self._said_trouble:
            return ""
        self._said_trouble = True
        return f"logs cannot be written in {self.folder}: {error.strerror}. The job continues without them"

    def write_mark(self, mark: str) -> None:
        """Rank 0: leave a sign for the hosts that share this folder."""
        assert self.folder is not None
        with contextlib.suppress(OSError):  # a full disk: every host then sends its logs here
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / MARK_FILE).write_text(mark, encoding="utf-8")

    def kept_elsewhere(self, mark: str) -> str:
        """The end of this rank's log where its folder is not the first host's; else nothing."""
        if self.folder is None:
            return ""
        try:
            is_shared = (self.folder / MARK_FILE).read_text(encoding="utf-8") == mark
        except OSError:
            is_shared = False
        return "" if is_shared else self._kept.text

    def add_log_of(self, rank: int, text: str) -> None:
        """Rank 0: keep the log of a rank of another host, beside its own."""
        if self.folder is None:
            return
        try:
            with (self.folder / log_name(rank)).open("x", encoding="utf-8") as file:
                file.write(text)
        except (
            FileExistsError
        ):  # written by its own agent: the folder is shared, and the mark was not readable
            return
        except OSError as error:  # a full disk: that host has it still
            self._trouble = error

    def missing_logs(self, ranks: Sequence[int]) -> list[int]:
        """Rank 0: those of `ranks` whose logs are not in its folder."""
        if self.folder is None:
            return []
        return [rank for rank in ranks if not (self.folder / log_name(rank)).exists()]

    def take_stacks(self) -> str:
        """What faulthandler has written since the last call."""
        # The rank writes through the same open file, whose position goes back for it, too.
        descriptor = self.stacks.fileno()
        text = os.pread(descriptor, _MAX_STACKS, 0).decode(errors="replace")
        os.ftruncate(descriptor, 0)
        os.lseek(descriptor, 0, os.SEEK_SET)
        return text

    def tail(self) -> str:
        """The last lines of standard error."""
        return self._tail.lines(_TAIL_LINES)

    def close(self) -> None:
        """Wait a moment for what has not been written."""
        for writer in (*self._console.values(), self._log):
            if writer is not None:
                writer.close(_CLOSE_SECONDS)


def log_name(rank: int) -> str:
    return f"rank_{rank:05}.log"


def is_start_name(name: str) -> bool:
    """Whether a folder of logs is called so: by the time of the start."""
    return _START_NAME.fullmatch(name) is not None


def forget_old_starts(logs: Path) -> None:
    """Remove all but the last starts' folders in `logs`. One that cannot be removed is no reason to stop."""
    with contextlib.suppress(OSError):
        starts = [path for path in logs.iterdir() if path.is_dir() and is_start_name(path.name)]
        for folder in sorted(starts)[:-KEPT_STARTS]:
            shutil.rmtree(folder, ignore_errors=True)


def _terminal() -> tuple[int, int]:
    """Both ends of a terminal as wide as this one's, which passes bytes on as they are."""
    leader, follower = pty.openpty()
    tty.setraw(follower)

    def copy_size(*_: object) -> None:
        with contextlib.suppress(OSError):
            size = fcntl.ioctl(sys.stdout.fileno(), termios.TIOCGWINSZ, b"\0" * 8)
            fcntl.ioctl(leader, termios.TIOCSWINSZ, size)

    copy_size()
    signal.signal(signal.SIGWINCH, copy_size)
    return leader, follower
