"""Questions about paths and texts that a user gave. None raises: what cannot be reached is not there."""

from __future__ import annotations

from pathlib import Path


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


def is_text(value: str) -> bool:
    """Whether UTF-8 has bytes for it: not for half of a surrogate pair, nor for undecodable arguments."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
