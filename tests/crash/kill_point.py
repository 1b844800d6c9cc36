"""Where a process is killed: at the nth time that it touches a folder, or a little later.

Every Python call that changes or lists a file raises an audit event (`sys.addaudithook`). The events below a
folder, counted, are therefore a list of all the moments between two operations of a save, of a removal and of
a load; a delay after the event reaches what happens in between, such as the middle of a write.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

# The first of two arguments of these is a path (`os.rename` has the other one in second place).
_FILE_EVENTS = frozenset(
    {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "shutil.rmtree"}
)


@dataclass(frozen=True)
class KillPoint:
    """One kill.

    Attributes:
        folder: Events below it count.
        rank: Whose events count.
        event: Which of them, from 1.
        delay: Seconds that pass after it.
        victims: ``rank``: that rank alone. ``all``: every rank of the job at once, that one last.
    """

    folder: str
    rank: int
    event: int
    delay: float
    victims: Literal["rank", "all"]


def kill_at(_: list[str], rank: int, point: KillPoint, log: str) -> None:
    """A fault for `run_faulty_job`: rank ``point.rank`` comes to its end at `point`, and writes what it did
    then to the file `log`."""
    if rank != point.rank:
        return
    seen = 0

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event not in _FILE_EVENTS or not _below(arguments[0], point.folder):
            return
        seen += 1
        if seen == point.event:
            words = f"{event} {Path(os.fsdecode(arguments[0])).relative_to(point.folder)}"
            _end(point, log, words)

    sys.addaudithook(count)


def _below(path: object, folder: str) -> bool:
    return isinstance(path, (str, bytes, os.PathLike)) and os.fsdecode(path).startswith(f"{folder}/")


def _end(point: KillPoint, log: str, words: str) -> None:
    victims = [os.getpid()]
    if point.victims == "all":
        peers = psutil.Process(os.getppid()).children()
        victims = [peer.pid for peer in peers if peer.pid != os.getpid()] + victims
    # Not through `open`, which would raise the event again.
    note = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(note, f"{words}\n".encode())
    os.close(note)
    if point.delay:
        threading.Thread(target=_later, args=(victims, point.delay), daemon=True).start()
    else:
        _kill(victims)


def _later(victims: list[int], delay: float) -> None:
    time.sleep(delay)
    _kill(victims)


def _kill(victims: list[int]) -> None:
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
