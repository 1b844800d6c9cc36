"""What lies at a stop file's path before a run begins: only what comes later stops the run. No torch.

    5f0c2e..:4026531836:1441:1712345678901234567     system, its processes, inode, last change in nanoseconds
    5f0c2e..:4026531836:none                         nothing is there

A launch looks at its first moment and tells rank 0 (`--stop_stamp`). On another system the path may lead to
another file, so there rank 0 looks for itself, as soon as it knows the path.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from pipeline.cluster.lease import own_lease
from pipeline.job.options import Options

STOP_FILE = "STOP"
# Inode, and time of the last change in nanoseconds; None: there is no file.
Stamp = tuple[int, int] | None


def stop_path(options: Options, output_dir: str | None) -> Path | None:
    """The stop file; None where it is in a folder that is not known yet."""
    if options.stop_file is not None:
        return Path(options.stop_file)
    return None if output_dir is None else Path(output_dir) / STOP_FILE


def stamp_of(path: Path) -> Stamp:
    """What is there now."""
    try:
        found = os.stat(path)  # noqa: PTH116  (one call, whatever kind of file it is)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def written_stamp(path: Path) -> str:
    """The same as text, with the system that it was seen on."""
    stamp = stamp_of(path)
    return f"{_system()}:{'none' if stamp is None else f'{stamp[0]}:{stamp[1]}'}"


def with_stamp(options: Options, output_dir: str | None) -> Options:
    """Options with a stamp of this system, where the path is known: the one that they have, or a new one."""
    path = stop_path(options, output_dir)
    if path is None or (options.stop_stamp or "").startswith(f"{_system()}:"):
        return options
    return replace(options, stop_stamp=written_stamp(path))


def read_stamp(written: str) -> Stamp:
    """What `written_stamp` saw."""
    last = written.rsplit(":", 2)
    return None if last[-1] == "none" else (int(last[-2]), int(last[-1]))


def _system() -> str:
    lease = own_lease()
    return f"{lease.boot}:{lease.processes}"
