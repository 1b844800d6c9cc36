"""What a run's checkpoint folder holds, and how a checkpoint comes into it and leaves it. No torch.

    checkpoints/global_step100/...            DeepSpeed's shards
    checkpoints/global_step100/shards.json    which part of which parameter lies where in them
    checkpoints/global_step100/manifest.json  written when every rank's shards are complete (`manifest`)
    checkpoints/global_step150.partial/       being written, or left by a crash; never read
    checkpoints/global_step50.deleted/        being removed, or left by a crash; never read
    checkpoints/latest                        the tag of the newest; replaced atomically, last
    checkpoints/lineage.json                  what was left behind when the run went back (`lineage`)

A crash at any moment, of the host too, leaves the newest complete checkpoint as it was: a checkpoint takes
its name when all of it is on the disk, and loses it before any of it is removed. Which one counts: `select`.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.checkpoints.lineage import LINEAGE
from pipeline.checkpoints.manifest import (
    CHOOSE_ANOTHER,
    MANIFEST,
    SHARDS,
    Checkpoint,
    FileEntry,
    TrainState,
    files_below,
    layout_of,
    read_checkpoint,
    write_manifest,
)
from pipeline.checkpoints.resume import layout_changes, resume_problems
from pipeline.checkpoints.select import LATEST, find_checkpoint, select_checkpoint
from pipeline.training.atomic_file import remove_tree, remove_unfinished, replaced_atomically, sync_folder

__all__ = [
    "CHOOSE_ANOTHER",
    "LATEST",
    "MANIFEST",
    "PARTIAL",
    "SHARDS",
    "Checkpoint",
    "FileEntry",
    "TrainState",
    "files_below",
    "find_checkpoint",
    "layout_changes",
    "layout_of",
    "point_latest",
    "publish",
    "read_checkpoint",
    "remove_partial",
    "resume_problems",
    "select_checkpoint",
    "tag_of",
    "write_manifest",
]

PARTIAL = ".partial"
DELETED = ".deleted"
SEEN = ".seen-"  # begins the names of files by which a start finds out who shares the folder


def tag_of(step: int) -> str:
    """The folder name of the checkpoint after `step` steps, as DeepSpeed names it."""
    return f"global_step{step}"


def remove_partial(folder: Path) -> None:
    """Remove what crashes in the middle of a save or of a removal have left; for one rank, before any rank
    writes."""
    for pattern in (f"global_step*{PARTIAL}*", f"global_step*{DELETED}", f"{SEEN}*"):
        for path in folder.glob(pattern):
            remove_tree(path)
    for name in (LATEST, LINEAGE):
        remove_unfinished(folder / name)


def publish(partial: Path) -> Path:
    """Give a complete checkpoint its own name; for one rank.

    A run that went back to an earlier checkpoint comes by its later steps again. What it wrote there the
    first time is moved aside and goes last, so that at no moment shards of both lie in one folder.

    Returns:
        The checkpoint's folder.
    """
    path = partial.with_name(partial.name.removesuffix(PARTIAL))
    replaced = path.with_name(f"{partial.name}.replaced")
    if path.exists() or path.is_symlink():
        path.rename(replaced)
    partial.rename(path)
    sync_folder(path.parent)
    remove_tree(replaced)
    return path


def point_latest(folder: Path, tag: str) -> None:
    """Name `tag` in `latest`, for people and for DeepSpeed's own tools."""
    with replaced_atomically(folder / LATEST) as file:
        file.write(f"{tag}\n".encode())


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint so that a crash in between leaves nothing that could be taken for one."""
    doomed = path.with_name(path.name + DELETED)
    remove_tree(doomed)
    path.rename(doomed)
    sync_folder(path.parent)
    remove_tree(doomed)
