"""Processes that tests look at."""

from __future__ import annotations

import psutil


def is_running(pid: int) -> bool:
    """Whether there is such a process, and its parent has not only forgotten to take note of its end."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
