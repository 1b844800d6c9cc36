"""Paths and texts that a user gave. No question raises: what cannot be reached is not there."""

from __future__ import annotations

import io
from pathlib import Path

# No description of a job, host list or model is as large; data is, and /dev/zero has no end.
MOST_BYTES = 2**20


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


def read_text(path: str | Path) -> str:
    """A whole file of UTF-8.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not UTF-8, or larger than 1 MiB.
    """
    with Path(path).open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"it is larger than {MOST_BYTES:,} bytes")
    return content.decode()


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
