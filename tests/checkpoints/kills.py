"""Processes that kill themselves at a chosen moment."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any


def kill_at_call(number: int) -> None:
    """This process kills itself instead of its `number`-th call that changes names on the disk or waits for
    it."""
    count = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    for name in ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir"):
        setattr(os, name, counted(getattr(os, name)))
