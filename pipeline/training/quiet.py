"""Keeping libraries from talking over the console."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator

# Warnings of DeepSpeed that say what the job has chosen on purpose. Everything else gets through.
EXPECTED_WARNINGS = (
    "Setting accelerator to CPU",  # the console says which device the job runs on
    "**** You are using ZeRO with an untested optimizer",  # torch's own, compared to a plain loop in tests
)


class _Unexpected(logging.Filter):
    """Lets records from a level on through, but for the warnings that are expected."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least = least

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= self.least and not record.getMessage().startswith(EXPECTED_WARNINGS)


def quiet_deepspeed(rank: int, reports: bool = False) -> None:
    """Let every library log warnings on rank 0, and errors on the others, which would repeat them.

    `reports`: the JSON asks for DeepSpeed's own reports (wall_clock_breakdown and the like), which it logs as
    information; rank 0 then lets that through.

    Process-wide, so it is for entry points. Call it before DeepSpeed is imported, which warns already
    then; it sets its logger's level at that time, and so has a filter.
    """
    least = logging.ERROR if rank != 0 else logging.INFO if reports else logging.WARNING
    logging.getLogger("DeepSpeed").addFilter(_Unexpected(least))
    if rank != 0:
        logging.getLogger().setLevel(least)
        import torch  # noqa: F401  (sets the levels of its loggers at that time)

        for logger in logging.Logger.manager.loggerDict.values():
            if isinstance(logger, logging.Logger) and logger.level != logging.NOTSET:
                logger.setLevel(max(logger.level, least))
    # DeepSpeed 0.19 calls collectives by names that torch renames in a later release.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    if rank != 0:
        warnings.simplefilter("ignore")


@contextlib.contextmanager
def captured_stdout() -> Iterator[io.StringIO]:
    """Hold back what the block prints; it stands below the traceback if the block raises.

    For constructions that describe themselves with `print` on several ranks, such as DeepSpeed's
    pipeline module and process topology: the text is noise until something goes wrong there.
    """
    held = io.StringIO()
    try:
        with contextlib.redirect_stdout(held):
            yield held
    except BaseException as error:
        if held.getvalue():
            error.add_note(held.getvalue().rstrip())
        raise
