"""Where a command may make a folder of its own. No torch."""

from __future__ import annotations

from pathlib import Path

from pipeline.checkpoints.lineage import LINEAGE
from pipeline.checkpoints.select import LATEST, steps_in
from pipeline.job.options import RUN_FILE
from pipeline.job.problems import Problem
from pipeline.job.run_file import CHECKPOINTS
from pipeline.job.user_input import exists


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


def _holds_checkpoints(folder: Path, made: Path) -> bool:
    """Whether a run saves there, or has saved; `made` may be there from an earlier time."""
    if folder.name != CHECKPOINTS:
        return False
    marks = (folder.parent / RUN_FILE, folder / LATEST, folder / LINEAGE)
    found = (path.resolve() for paths in steps_in(folder).values() for path in paths)
    return any(map(exists, marks)) or any(path != made for path in found)
