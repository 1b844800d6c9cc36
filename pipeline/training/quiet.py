"""Keeping libraries from talking over the console."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Iterator

# Warnings of DeepSpeed that say what the job has chosen on purpose. Everything else gets through.
EXPECTED_WARNINGS = (
    "Setting accelerator to CPU",  # the console says which device the job runs on
    "**** You are using ZeRO with an untested optimizer",  # torch's own, compared to a plain loop in tests
)


class _NotExpected(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(EXPECTED_WARNINGS)


_NOT_EXPECTED = _NotExpected()


def quiet_deepspeed(rank: int, reports: bool = False) -> None:
    """Let every library log warnings on rank 0, and errors on the others, which would repeat them.

    `reports`: the JSON asks for DeepSpeed's own reports (wall_clock_breakdown and the like), which it logs as
    information; rank 0 then lets that through.

    Process-wide, so it is for entry points. Call it before DeepSpeed is imported, which warns already
    then; later imports cannot undo it, as they can the level of a logger.
    """
    if rank == 0:
        logging.disable(logging.DEBUG if reports else logging.INFO)
    else:
        logging.disable(logging.WARNING)
    logging.getLogger("DeepSpeed").addFilter(_NOT_EXPECTED)
    # DeepSpeed 0.19 calls collectives by names that torch renames in a later release.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
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
