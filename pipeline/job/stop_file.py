"""What lies at a stop file's path before a run begins: only what comes later stops the run.

    5f0c2e..:4026531836:1441:1712345678901234567:runs/mine/STOP     system, its processes, inode, time of the
    5f0c2e..:4026531836:none:runs/mine/STOP                         last change in nanoseconds; none: no file

A launch looks at its first moment and tells rank 0 (`--stop_stamp`). On another system the path may lead to
another file: there, and without a launch, rank 0's agent looks as soon as it is started. What neither could
know, such as a folder that the model's name decides, rank 0 sees when it has read its options.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.base.files import this_system

if TYPE_CHECKING:  # an agent starts faster without
    from pipeline.job.options import Options

STOP_FILE = "STOP"
# Inode, and time of the last change in nanoseconds; None: there is no file.
Stamp = tuple[int, int] | None
STAMP = re.compile(r"([^:]*:[^:]*):(?:none|(\d+):(-?\d+)):(.+)", re.DOTALL)


def stop_path(stop_file: str | None, output_dir: str | None) -> Path | None:
    """The stop file; None where it is in a folder that is not known yet."""
    if stop_file is not None:
        return Path(stop_file)
    return None if output_dir is None else Path(output_dir) / STOP_FILE


def stamp_of(path: Path) -> Stamp:
    """What is there now."""
    try:
        found = os.stat(path)  # noqa: PTH116  (one call, whatever kind of file it is)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def read_stamp(written: str) -> Stamp:
    """What was there then, in a stamp that the options' rules let through."""
    match = STAMP.fullmatch(written)
    assert match is not None, written
    return None if match[2] is None else (int(match[2]), int(match[3]))


def with_stamp(options: Options, output_dir: str | None) -> Options:
    """Options with a stamp of this system and of their stop file, where that is known: the one that they
    have, or a new one."""
    path = stop_path(options.stop_file, output_dir)
    if path is None or _is_of(options.stop_stamp, path):
        return options
    return replace(options, stop_stamp=_written(path))


def stamped(arguments: Sequence[str]) -> list[str]:
    """The same for a command line that nobody has read yet. Where it is misread, the path in the stamp
    tells."""
    path = stop_path(_value(arguments, "stop_file"), _value(arguments, "output_dir"))
    if path is None or _is_of(_value(arguments, "stop_stamp"), path):
        return [*arguments]
    return [*arguments, "--stop_stamp", _written(path)]


def _value(arguments: Sequence[str], name: str) -> str | None:
    found = None
    for argument, following in zip_longest(arguments, arguments[1:]):
        if argument == f"--{name}":
            found = following
        elif argument.startswith(f"--{name}="):
            found = argument.partition("=")[2]
    return found


def _written(path: Path) -> str:
    stamp = stamp_of(path)
    return f"{_system()}:{'none' if stamp is None else f'{stamp[0]}:{stamp[1]}'}:{path}"


def _is_of(written: str | None, path: Path) -> bool:
    """Whether a stamp was taken here, of that file."""
    match = STAMP.fullmatch(written or "")
    return match is not None and (match[1], match[4]) == (_system(), str(path))


def _system() -> str:
    return ":".join(this_system())
