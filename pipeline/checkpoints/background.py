"""The writing of one rank's files: at once, or by a thread while training goes on."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

from pipeline.checkpoints.planned import PlannedFiles
from pipeline.checkpoints.written import WrittenFile


@dataclass(frozen=True)
class WriteReport:
    """What became of one rank's files.

    Attributes:
        files: All of them, complete and on the disk; none where it failed.
        failure: What went wrong, None if nothing did.
    """

    files: tuple[WrittenFile, ...]
    failure: str | None


class Writing:
    """Writes `planned` into `folder`, beginning now.

    A thread is enough: it waits in system calls and in hashing of large blocks, both of which leave the
    interpreter to training. What goes wrong is reported, never raised: it concerns every rank.
    """

    def __init__(self, planned: PlannedFiles, folder: Path, in_background: bool) -> None:
        self._planned, self._folder = planned, folder
        self._report: WriteReport | None = None
        self._thread: threading.Thread | None = None
        if in_background:
            # No daemon: an interpreter that ends would cut it short.
            self._thread = threading.Thread(target=self._write, name="checkpoint-writer")
            self._thread.start()
        else:
            self._write()

    @property
    def busy(self) -> bool:
        """Whether files are still being written."""
        return self._thread is not None and self._thread.is_alive()

    def report(self) -> WriteReport:
        """Wait for the end; what became of the files."""
        if self._thread is not None:
            self._thread.join()
        assert self._report is not None
        return self._report

    def _write(self) -> None:
        files: tuple[WrittenFile, ...] = ()
        failure = None
        try:
            files = tuple(self._planned.write(self._folder))
        except BaseException as error:  # noqa: BLE001  (reported to every rank, which the save fails on)
            failure = describe_failure(error)
        self._report = WriteReport(files, failure)


def describe_failure(error: BaseException) -> str:
    """An error in one line; an OSError names its file itself."""
    return f"{type(error).__name__}: {error}"
