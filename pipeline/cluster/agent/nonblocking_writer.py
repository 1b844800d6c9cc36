"""Output that nobody waits for: a thread writes, and what it cannot write in time is left out. No torch.

A stopped terminal (Ctrl-S) or a file server that is away must not keep an agent from its work.
"""

from __future__ import annotations

import os
import re
import threading
from collections import deque
from pathlib import Path

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
                # A terminal that is gone, a disk that is full. The run goes on: its output is no part of it.
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
        self._pieces: deque[bytes] = deque()
        self._length = 0
        self._size = size

    def feed(self, data: bytes) -> None:
        self._pieces.append(data)
        self._length += len(data)
        while self._length - len(self._pieces[0]) >= self._size:
            self._length -= len(self._pieces.popleft())

    @property
    def text(self) -> str:
        """All that is kept."""
        return b"".join(self._pieces)[-self._size :].decode(errors="replace")

    def lines(self, count: int) -> str:
        """The last `count` lines."""
        return "\n".join(self.text.splitlines()[-count:])
