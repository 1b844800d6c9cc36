"""The place where an exported folder is made: by one process at a time, and a crash takes no folder away.

.out.export-partial/lock    one export into `out` at a time
.out.export-partial/model   takes the name `out` when all of it is on the disk
.out.export-replaced        what had the name before; removed when the new folder has it
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipeline.base.files import remove_tree, sync_folder
from pipeline.checkpoints.output import only_one


@dataclass(frozen=True)
class StagingFolder:
    """Where `folder`, a resolved path, is made."""

    folder: Path

    @property
    def path(self) -> Path:
        return self.folder.with_name(f".{self.folder.name}.export-partial")

    @property
    def content(self) -> Path:
        """The folder that is being written."""
        return self.path / "model"

    @property
    def replaced(self) -> Path:
        return self.folder.with_name(f".{self.folder.name}.export-replaced")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, no other process exports to there, and what crashes have left is put right. Afterwards
        nothing of the place is left.

        Raises:
            JobError: another process is at it.
            OSError: the place cannot be made.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with only_one(self.path / "lock", "folder", self.folder, "exporting"):
            try:
                self._recover()
                yield
            finally:
                # Within the lock, so that the folder of the next process is not taken from it. What cannot be
                # removed must not hide why; the next export tries again.
                shutil.rmtree(self.path, ignore_errors=True)

    def _recover(self) -> None:
        self._give_back()
        remove_tree(self.replaced)
        remove_tree(self.content)

    def _give_back(self) -> None:
        """What came between the two renames of `publish` has left the name to nobody: the folder that had it
        gets it back."""
        if self.replaced.exists() and not _has_content(self.folder):
            self.replaced.rename(self.folder)
            sync_folder(self.folder.parent)

    def publish(self, report: Callable[[str], None]) -> None:
        """Give what was written its name, in the place of an earlier folder."""
        try:
            if _has_content(self.folder):
                self.folder.rename(self.replaced)
            self.content.rename(self.folder)  # an empty folder of that name gives way
        except BaseException:
            self._give_back()
            raise
        sync_folder(self.folder.parent)
        try:
            remove_tree(self.replaced)
        except OSError as error:  # the export is done nevertheless
            report(f"{self.replaced}, which was replaced, cannot be removed: {error}")


def _has_content(folder: Path) -> bool:
    return folder.exists() and any(folder.iterdir())
