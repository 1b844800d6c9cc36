"""Where a command may make a folder of its own. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pipeline.base.files import file_lock
from pipeline.base.problems import JobError, Problem
from pipeline.base.user_input import exists
from pipeline.checkpoints.lineage import LINEAGE
from pipeline.checkpoints.select import LATEST, steps_in
from pipeline.job.options import RUN_FILE
from pipeline.job.run_file import CHECKPOINTS


def output_problems(key: str, given: str) -> list[Problem]:
    """Why a command must not make the folder `given`: what lies among a run's checkpoints is the run's, which
    chooses from there what it goes on from, replaces it and removes it.

    Raises:
        JobError: a folder cannot be listed.
    """
    path = Path(given)
    # As it was named, and where it is: the run's own folder may be a link to another disk.
    around = {parent for each in (path.absolute(), path.resolve()) for parent in (each, *each.parents)}
    for folder in sorted(each for each in around if _holds_checkpoints(each, path.resolve())):
        rule = f"lies in {folder}, and what is there belongs to that run"
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
            stack.enter_context(file_lock(lock, 0.0, lambda _: None))
        except TimeoutError as error:  # of a disk, inside, it would be something else
            rule, remedy = f"another process is {doing} into it", "Wait for it, or name another folder"
            raise JobError([Problem(key, str(folder), rule, remedy)]) from error
        yield


def _holds_checkpoints(folder: Path, made: Path) -> bool:
    """Whether a run saves there, or has saved; `made` may be there from an earlier time."""
    if folder.name != CHECKPOINTS:
        return False
    marks = (folder.parent / RUN_FILE, folder / LATEST, folder / LINEAGE)
    found = (path.resolve() for paths in steps_in(folder).values() for path in paths)
    return any(map(exists, marks)) or any(path != made for path in found)
