"""Paths, texts and lengths of time that a user gave. What cannot be reached is not there."""

from __future__ import annotations

import io
import os
import re
import stat
from pathlib import Path
from typing import IO

from pipeline.base.problems import job_error

# No description of a job, host list or model is as large; data is, and /dev/zero has no end.
MOST_BYTES = 2**20
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/|hub:")
_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
# As a shell reads them: $NAME, ${NAME}.
_VARIABLE = re.compile(r"\$(?:(\w+)|\{([^}]*)\})", re.ASCII)
_WITH_UNITS = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
# Slurm's: days-hours[:minutes[:seconds]], hours:minutes:seconds, minutes:seconds.
_WITH_COLONS = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


def exists(path: str | Path) -> bool:
    """Whether there is something at `path`; False for a name too long or a folder that may not be entered."""
    try:
        return Path(path).exists()
    except OSError:
        return False


def is_folder(path: str | Path) -> bool:
    return exists(path) and Path(path).is_dir()


def is_file(path: str | Path) -> bool:
    return exists(path) and Path(path).is_file()


def home_folder() -> Path:
    """The user's home folder.

    Raises:
        JobError: there is none. Libraries would make a folder called ~, or end in a traceback.
    """
    try:
        return Path.home()
    except RuntimeError as error:
        rule = f"is not set, and user id {os.getuid()} has no home folder on this machine"
        raise job_error("HOME", None, rule, "Set HOME to a folder that this user may write to") from error


def unwritable(folder: str | Path) -> str | None:
    """Why nothing can be written into a folder, which may not be there yet; None where it can."""
    if _ADDRESS.match(str(folder)):  # a path has one slash there
        return "is an address, and what is made is written into a folder"
    folder = Path(folder)
    try:
        folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        if folder.is_symlink():
            return "is a link that leads nowhere"
    except OSError as error:
        return f"cannot be reached ({error.strerror})"
    nearest = next(path for path in (folder, *folder.absolute().parents) if exists(path))
    if not nearest.is_dir():
        return "is a file" if nearest == folder else f"cannot be written: {nearest} is a file"
    writable = os.access(nearest, os.W_OK | os.X_OK)
    return None if writable else f"cannot be written: {nearest} is not writable"


def expanded(path: str) -> str:
    """A path with the ~ and the variables that a shell leaves in quotes and behind ``--option=`` replaced.

    Addresses stay as they are, and so does what exists under a name with $ in it.

    Raises:
        ValueError: a variable is not set, or nobody has that home folder.
    """
    if "://" in path:
        return path
    if path.startswith("~"):
        user, slash, rest = path[1:].partition("/")
        path = f"{_home_of(user)}{slash}{rest}"
    if "$" not in path or exists(path):
        return path
    return _VARIABLE.sub(_value_of, path)


def _home_of(user: str) -> str:
    try:
        return str(Path(f"~{user}").expanduser()).rstrip("/")
    except RuntimeError as error:
        raise ValueError(f"there is no home folder of {user or f'user id {os.getuid()}'}") from error


def _value_of(match: re.Match[str]) -> str:
    name = match[1] or match[2]
    if not os.environ.get(name):
        raise ValueError(f"the variable {name} is not set")
    return os.environ[name]


def read_text(path: str | Path, most: int = MOST_BYTES) -> str:
    """A whole file of UTF-8.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not UTF-8, larger than `most`, or no regular file: a pipe's content would be there
            for one reader, and there are several, with every start again.
    """
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise ValueError(f"it is larger than {most:,} bytes")
        return file.read().decode()


def open_regular(path: str | Path) -> IO[bytes]:
    """A file to read, without waiting for whoever writes into a pipe.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is a device, pipe or socket.
    """
    mode = Path(path).stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # opening a folder says that it is one
        raise ValueError("it is no regular file, and would be read once only")
    return Path(path).open("rb")


def lines_of(text: str) -> list[str]:
    """Its lines as Python's and a shell's readers see them; `str.splitlines` splits at seven more
    characters."""
    return [line.removesuffix("\n") for line in io.StringIO(text, newline=None)]


def unusual_space(line: str) -> str | None:
    """The first character in it that looks like a blank or a line's end and is neither blank nor tab, or
    that ends a string in C; as ``U+2028``."""
    found = next((c for c in line if c == "\0" or (c.isspace() and c not in " \t")), None)
    return None if found is None else f"U+{ord(found):04X}"


def is_text(value: str) -> bool:
    """Whether UTF-8 has bytes for it: not for half of a surrogate pair, nor for undecodable arguments."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def parse_duration(text: str) -> int:
    """Seconds: ``3600``, ``90m``, ``3h30m``, ``1-12:00:00``, ``12:30:00``, ``30:00`` (minutes and seconds).

    A bare number is seconds (Slurm takes it for minutes).

    Raises:
        ValueError: none of these.
    """
    if text.isdecimal():
        return int(text)
    if text and (match := _WITH_UNITS.fullmatch(text)):
        return sum(int(n or 0) * size for n, size in zip(match.groups(), _UNITS.values(), strict=True))
    if match := _WITH_COLONS.fullmatch(text):
        return _slurm_seconds(*match.groups())
    raise ValueError("is no length of time, such as 3600, 90m, 3h30m or 1-12:00:00")


def _slurm_seconds(days: str | None, *parts: str | None) -> int:
    given = [int(part) for part in parts if part is not None]
    if any(part > 59 for part in given[1:]) or (days is not None and given[0] > 23):
        raise ValueError("has more than 23 hours beside days, or more than 59 minutes or seconds")
    if days is None and len(given) == 2:
        given = [0, *given]  # minutes:seconds
    hours, minutes, seconds = [*given, 0, 0][:3]
    return int(days or 0) * _UNITS["d"] + hours * _UNITS["h"] + minutes * _UNITS["m"] + seconds
