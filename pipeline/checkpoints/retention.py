"""Which checkpoints a run keeps, and the removal of the others. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from pipeline.base.problems import JobError
from pipeline.checkpoints.folder import remove_checkpoint
from pipeline.checkpoints.lineage import Lineage, saved_lineage
from pipeline.checkpoints.manifest import read_checkpoint
from pipeline.checkpoints.select import steps_in
from pipeline.job.options import Options


def retain(folder: Path, newest: int, options: Options, say: Callable[[str], object] = print) -> None:
    """Remove the run's checkpoints that ``--keep_last`` and ``--keep_every`` do not keep; for one process of
    each file system, after the checkpoint of step `newest` counts.

    Nothing is removed unless that one is complete. Only complete checkpoints of this run are: not what it
    left behind when it went back, nor anything that is broken or has another name. What cannot be removed is
    told by `say` and tried again after the next save.
    """
    if options.keep_last is None:
        return
    try:
        too_old = list(_too_old(folder, newest, options.keep_last))
    except JobError as error:  # it cannot be listed
        say(f"no old checkpoint was removed: {error}")
        return
    for step, path in too_old:
        if options.keep_every is not None and step % options.keep_every == 0:
            continue
        try:
            remove_checkpoint(path)
        except OSError as error:
            say(f"{path} could not be removed: {error}")


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
    """Whether the checkpoint of `step` at `path` is complete, and a run of that lineage goes on from it."""
    try:
        checkpoint = read_checkpoint(path)
    except JobError:
        return False
    return checkpoint.state.step == step and lineage.owns(checkpoint.branches, step)
