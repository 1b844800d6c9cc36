"""Keeping libraries from talking over the console."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Iterator

NOISY_LOGGERS = ("DeepSpeed", "torch", "transformers", "datasets")


def quiet_deepspeed(rank: int) -> None:
    """Let libraries log warnings on rank 0 and errors on the others, where each would repeat it.

    Call it after the imports, which set the levels of their own loggers.
    """
    level = logging.WARNING if rank == 0 else logging.ERROR
    for name in NOISY_LOGGERS:
        logger = logging.getLogger(name)
        logger.setLevel(level)
        for handler in logger.handlers:
            handler.setLevel(level)
    if rank != 0:
        warnings.simplefilter("ignore")


@contextlib.contextmanager
def captured_stdout() -> Iterator[io.StringIO]:
    """Hold back what the block prints; written to standard error if the block raises.

    For constructions that describe themselves with `print` on several ranks, such as DeepSpeed's
    pipeline module and process topology: the text is noise until something goes wrong there.
    """
    held = io.StringIO()
    try:
        with contextlib.redirect_stdout(held):
            yield held
    except BaseException:
        sys.stderr.write(held.getvalue())
        sys.stderr.flush()
        raise
