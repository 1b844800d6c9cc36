"""Where a command may make a folder, and whether a checkpoint fits on its disk. No torch.

A checkpoint is complete before an older one is removed, so that it needs its whole size beside what is there.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pipeline.base.files import file_lock
from pipeline.base.problems import Problem, job_error
from pipeline.base.user_input import exists
from pipeline.checkpoints.folder import LATEST, steps_in
from pipeline.checkpoints.lineage import LINEAGE
from pipeline.job.job import Job
from pipeline.job.run_file import CHECKPOINTS, RUN_FILE
from pipeline.model.counts import total_parameters
from pipeline.model.memory import BYTES


def output_problems(key: str, given: str) -> list[Problem]:
    """Why a command must not make the folder `given`: a folder among a run's checkpoints belongs to the run,
    which may resume from it, replace it and remove it.

    Raises:
        JobError: a folder cannot be listed.
    """
    path = Path(given)
    # As it was given, and resolved: the run's own folder may be a link to another disk.
    around = {parent for each in (path.absolute(), path.resolve()) for parent in (each, *each.parents)}
    for folder in sorted(each for each in around if _holds_checkpoints(each, path.resolve())):
        rule = f"is in {folder}, whose content belongs to that run"
        return [Problem(key, given, rule, "Name a folder elsewhere")]
    return []


@contextmanager
def only_one(lock: Path, key: str, folder: Path, doing: str) -> Iterator[None]:
    """Inside, no other process is `doing` ("exporting", say) into `folder`: this one has the file `lock`.

    Raises:
        JobError: another process has it.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(file_lock(lock))
        except TimeoutError as error:  # of a disk, inside, it would be something else
            rule, remedy = f"another process is {doing} into it", "Wait for it, or name another folder"
            raise job_error(key, str(folder), rule, remedy) from error
        yield


def _holds_checkpoints(folder: Path, made: Path) -> bool:
    """Whether a run saves there, or has saved; `made` may be there from an earlier time."""
    if folder.name != CHECKPOINTS:
        return False
    marks = (folder.parent / RUN_FILE, folder / LATEST, folder / LINEAGE)
    found = (path.resolve() for paths in steps_in(folder).values() for path in paths)
    return any(map(exists, marks)) or any(path != made for path in found)


_FP32 = 4
# What the manifest, the index and the like take, and file systems round up.
_SLACK = 1 << 20


def checkpoint_bytes(job: Job) -> int:
    """Bytes of one checkpoint: fp32 master weights, the optimizer's moments, and a copy of the model.

    ZeRO 3 and fp32 without ZeRO keep no copy beside the masters. Worked for GPT-2 124M with AdamW and bf16 at
    ZeRO 1: 124.4 M x (4 + 8 + 2) = 1.74 GB.
    """
    alone = job.zero_stage == 3 or (job.zero_stage == 0 and job.precision.compute == "fp32")
    model_copy = 0 if alone else BYTES[job.precision.compute]
    return total_parameters(job.model, padded=True) * (_FP32 * (1 + job.optimizer.moments) + model_copy)


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write to the file system of `folder`.

    Raises:
        OSError: it cannot be asked.
    """
    return shutil.disk_usage(folder).free


def lack_of_space(folder: Path, needed: int, free: int, what: str = "the checkpoint") -> str | None:
    """The reason where `needed` bytes for `what` do not fit; None where they do."""
    if needed + _SLACK <= free:
        return None
    return f"no space left: {folder} has {readable(free)} free, {what} takes {readable(needed)} there"


def space_problems(job: Job) -> list[Problem]:
    """Why a run could not save a single checkpoint on this host, or (a warning) not all that it keeps.

    Hosts may have file systems of their own, each for its share: what is refused cannot fit either way.
    """
    nearest, needed, free = _space(job)
    if rule := lack_of_space(nearest, needed, free):
        return [Problem("output_dir", job.output_dir, rule, "Make room, or choose another --output_dir")]
    most = _most_more(job)
    if most * needed + _SLACK <= free:
        return []
    rule = (
        f"the run saves up to {most} checkpoints of {readable(needed)} beside what is there, and {nearest} "
        f"has {readable(free)} free: the later ones will fail"
    )
    fit = free // needed - 1  # the new one is complete before the oldest is removed
    smaller = f"Give --keep_last {fit}" if fit and (job.saves.keep_last or most) > fit else "Make room"
    remedy = f"{smaller}, or choose another --output_dir"
    return [Problem("keep_last", job.saves.keep_last, rule, remedy, "warning")]


def space_line(job: Job) -> str:
    """How large checkpoints are, and what room they have."""
    _, needed, free = _space(job)
    most = _most_more(job)
    many = f", {most} at most: {readable(most * needed)}" if most > 1 else ""
    return f"{readable(needed)} each on this host{many}; {readable(free)} are free"


def _space(job: Job) -> tuple[Path, int, int]:
    """Where checkpoints go, what one takes there, and what is free."""
    folder = Path(job.output_dir).absolute() / CHECKPOINTS  # which may be a link to another disk
    nearest = next(path for path in (folder, *folder.parents) if exists(path))
    return nearest, checkpoint_bytes(job) // len(job.world.hosts), free_bytes(nearest)


def _most_more(job: Job) -> int:
    """Checkpoints that there are at most beside those that are there now."""
    there = steps_in(Path(job.output_dir) / CHECKPOINTS)
    done, last, saves = max(there, default=0), job.train_steps, job.saves
    if done >= last:
        return 0

    def multiples(interval: int) -> int:
        return last // interval - done // interval

    coming = multiples(saves.interval) + (last % saves.interval > 0) if saves.interval else 1
    if saves.keep_last is None:
        return coming
    kept = saves.keep_last + 1 - min(len(there), saves.keep_last)
    return min(coming, kept + (multiples(saves.keep_every) if saves.keep_every else 0))


def readable(size: int) -> str:
    """Bytes with a decimal prefix, as ``1.74 GB``."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size / 1e3:.3g} kB"
