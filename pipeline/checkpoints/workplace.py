"""The folder in which a checkpoint is converted: a crash at any moment costs little and spoils nothing.

    out.partial/task.json        what is made from what; another task's work is thrown away
                proven           every file of the source was read and is what was saved
                written/<name>   which files of a parameter are on the disk; it is not written a second time
                checkpoint/      takes the name `out` when its manifest is on the disk
                lock             one process at a time

There is either no `out` or a complete one, and the next call goes on.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.base.files import replaced_atomically, sync_folder
from pipeline.checkpoints.folder import PARTIAL
from pipeline.checkpoints.manifest import size_of
from pipeline.checkpoints.written import WrittenFile

_OWN = ("task.json", "proven", "written", "checkpoint", "lock")


@dataclass(frozen=True)
class Workplace:
    """The folder in which `folder` is made."""

    folder: Path

    @property
    def path(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}{PARTIAL}")

    @property
    def content(self) -> Path:
        """The checkpoint."""
        return self.path / "checkpoint"

    def foreign(self) -> list[str]:
        """What lies there and is of no conversion: the folder is somebody else's, and must not be removed."""
        there = self.path.iterdir() if self.path.is_dir() else ()
        return sorted(each.name for each in there if each.name.partition(".tmp")[0] not in _OWN)

    def prepare(self, task: dict[str, Any]) -> None:
        """Keep what an earlier call left of the same task; throw away anything else."""
        task_file = self.path / "task.json"
        if task_file.exists() and json.loads(task_file.read_text(encoding="utf-8")) == task:
            return
        task_file.unlink(missing_ok=True)  # first: from here on a crash leaves no task
        (self.path / "proven").unlink(missing_ok=True)
        for folder in (self.content, self.path / "written"):
            if folder.exists():
                shutil.rmtree(folder)
            folder.mkdir()
        with replaced_atomically(task_file) as file:
            file.write(json.dumps(task).encode())

    @property
    def is_proven(self) -> bool:
        """Whether the source is what was saved."""
        return (self.path / "proven").exists()

    def note_proof(self) -> None:
        """The source is what was saved."""
        (self.path / "proven").touch()

    def written(self, name: str) -> list[WrittenFile] | None:
        """The files of a parameter, if all of them are on the disk."""
        note = self.path / "written" / name
        if not note.exists():
            return None
        files = [WrittenFile(**entry) for entry in json.loads(note.read_text(encoding="utf-8"))]
        return files if all(size_of(self.content / f.name) == f.bytes for f in files) else None

    def note_written(self, name: str, files: list[WrittenFile]) -> None:
        """All files of a parameter are on the disk."""
        with replaced_atomically(self.path / "written" / name) as file:
            file.write(json.dumps([asdict(each) for each in files]).encode())

    def publish(self) -> None:
        """Give the complete checkpoint its name."""
        self.content.rename(self.folder)
        sync_folder(self.folder.parent)

    def remove(self) -> None:
        """What was needed until the checkpoint had its name."""
        shutil.rmtree(self.path)
