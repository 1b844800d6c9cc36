"""What a run's checkpoint folder holds, and how a checkpoint comes into it and leaves it. No torch.

    checkpoints/global_step100/...            DeepSpeed's shards
    checkpoints/global_step100/shards.json    which slice of which parameter is where in them
    checkpoints/global_step100/manifest.json  written when every rank's shards are complete (`manifest`)
    checkpoints/global_step150.partial/       being written, or left by a crash; never read
    checkpoints/global_step150.partial.replaced/  gives way to a newer state of that step (`publish`)
    checkpoints/global_step50.deleted/        being removed, or left by a crash; never read
    checkpoints/global_step100.left_behind/   moved aside when a run that had gone back came by its step again
    checkpoints/latest                        the tag of the newest; replaced atomically, last
    checkpoints/lineage.json                  what was left behind when the run went back (`lineage`)

A crash at any moment, of the host too, leaves the newest complete checkpoint as it was: a checkpoint takes
its name when all of it is on the disk, and loses it before any of it is removed. Which one counts: `resume`.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from pipeline.base.files import remove_tree, remove_unfinished, replaced_atomically, sync_folder
from pipeline.base.problems import JobError, job_error
from pipeline.base.user_input import read_text
from pipeline.checkpoints.lineage import LINEAGE, Lineage, saved_lineage
from pipeline.checkpoints.manifest import read_checkpoint
from pipeline.job.job import SaveRules
from pipeline.job.run_file import CHECKPOINT_NAME, LEFT_BEHIND, MOVED_ASIDE, REPLACED

logger = logging.getLogger(__name__)

LATEST = "latest"
PARTIAL = ".partial"
DELETED = ".deleted"
SEEN = ".seen-"  # begins the names of files by which a start finds out who shares the folder
_LEFTOVER = re.compile(
    rf"global_step\d+({re.escape(PARTIAL)}|{re.escape(REPLACED)}|{MOVED_ASIDE}{re.escape(DELETED)})"
    rf"|{re.escape(SEEN)}.*"
)


def tag_of(step: int) -> str:
    """The folder name of the checkpoint after `step` steps, as DeepSpeed names it."""
    return f"global_step{step}"


def remove_leftovers(folder: Path) -> None:
    """Remove what crashes in the middle of a save or of a removal have left; for one rank, before any rank
    writes. What cannot be removed is a warning, and tried again before the next save."""
    removals = [partial(_clear, path) for path in sorted(folder.iterdir()) if _LEFTOVER.fullmatch(path.name)]
    removals += [partial(remove_unfinished, folder / name) for name in (LATEST, LINEAGE)]
    for remove in removals:
        try:
            remove()
        except OSError as error:
            logger.warning(f"{remove.args[0]} could not be removed: {error}")


def _clear(path: Path) -> None:
    """Remove a leftover. What `publish` has moved aside gets its name back if a crash came before the new one
    had it."""
    name = path.name.removesuffix(REPLACED)
    if name != path.name and not os.path.lexists(path.with_name(name)):
        path.rename(path.with_name(name))
    else:
        remove_tree(path)


def publish(written: Path, keeps: bool = False) -> Path:
    """Give a complete checkpoint its own name; for one rank.

    What has the name already is moved aside first, so that at no moment shards of both are in one folder. A
    crash in between leaves it where `resume` finds it; `remove_leftovers` removes it then.

    Args:
        keeps: It stays, as ``global_stepN.left_behind``: a run that went back has come by the step again.

    Returns:
        The checkpoint's folder.
    """
    path = written.with_name(written.name.removesuffix(PARTIAL))
    aside = _free_name(path) if keeps else path.with_name(f"{path.name}{REPLACED}")
    if path.exists() or path.is_symlink():
        path.rename(aside)
    written.rename(path)
    sync_folder(path.parent)
    return path


def _free_name(path: Path) -> Path:
    """``global_stepN.left_behind``, or with the first number that nothing has."""
    names = (f"{path.name}{LEFT_BEHIND}{number or ''}" for number in itertools.count())
    return next(free for name in names if not os.path.lexists(free := path.with_name(name)))


def point_latest(folder: Path, tag: str) -> None:
    """Name `tag` in `latest`, for people and for DeepSpeed's own tools."""
    with replaced_atomically(folder / LATEST) as file:
        file.write(f"{tag}\n".encode())


def named_by_latest(folder: Path) -> str | None:
    """The tag in `latest`; None where there is no such file, or no text in it."""
    try:
        return read_text(folder / LATEST).strip() or None
    except (OSError, ValueError):
        return None


def steps_in(folder: Path) -> dict[int, list[Path]]:
    """The folders that are named as checkpoints, complete or not, by step: ``global_stepN`` first, and then
    those that were moved aside for it.

    Raises:
        JobError: the folder cannot be listed.
    """
    try:
        found = [(path, CHECKPOINT_NAME.fullmatch(path.name)) for path in folder.iterdir() if path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        rule = f"cannot be listed ({error.strerror})"
        raise job_error("resume", str(folder), rule, "See to its permissions") from error
    steps: dict[int, list[Path]] = {}
    for path, match in sorted(found, key=lambda each: each[0].name):
        if match:
            steps.setdefault(int(match[1]), []).append(path)
    return steps


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint so that a crash in between leaves nothing that could be taken for one."""
    doomed = path.with_name(path.name + DELETED)
    remove_tree(doomed)
    path.rename(doomed)
    sync_folder(path.parent)
    remove_tree(doomed)


def retain(folder: Path, newest: int, rules: SaveRules) -> None:
    """Remove the run's checkpoints that ``--keep_last``, ``--keep_every`` and ``--keep_best`` do not keep;
    for one process of each file system, after the checkpoint of step `newest` counts, which knows the best.

    Nothing is removed unless that one is complete. Only complete checkpoints of this run are: not what it
    left behind when it went back, nor anything that is broken or has another name. What cannot be removed is
    a warning and tried again after the next save.
    """
    if rules.keep_last is None:
        return
    try:
        too_old = list(_too_old(folder, newest, rules.keep_last))
        best = []
        if too_old and rules.keep_best is not None:
            best = read_checkpoint(folder / tag_of(newest)).state.best_steps[: rules.keep_best]
    except JobError as error:  # it cannot be listed
        logger.warning(f"no old checkpoint was removed: {error}")
        return
    for step, path in too_old:
        if step in best or (rules.keep_every is not None and step % rules.keep_every == 0):
            continue
        try:
            remove_checkpoint(path)
        except OSError as error:
            logger.warning(f"{path} could not be removed: {error}")


def _too_old(folder: Path, newest: int, keep_last: int) -> Iterator[tuple[int, Path]]:
    """Complete checkpoints of the run that are not among the last, if `newest` is the first of these."""
    lineage = saved_lineage(folder)
    kept = 0
    for step, paths in sorted(steps_in(folder).items(), reverse=True):
        own = [path for path in paths if lineage is not None and belongs(path, step, lineage)]
        if step > newest or not own:
            continue
        if kept == 0 and step != newest:
            return
        kept += 1
        if kept > keep_last:
            yield from ((step, path) for path in own)


def belongs(path: Path, step: int, lineage: Lineage) -> bool:
    """Whether the checkpoint of `step` at `path` is complete, and a run of that lineage resumes from it."""
    try:
        checkpoint = read_checkpoint(path)
    except JobError:
        return False
    return checkpoint.state.step == step and lineage.owns(checkpoint.branches, step)
