"""Which of a folder's checkpoints belong to the run that continues in it. No torch.

A run that goes back to an earlier checkpoint leaves the later ones behind: they stay on the disk, and must
not be chosen by the next start. Each return begins a branch, which `checkpoints/lineage.json` records:

    step      1 --- 2 --- 3 --- 4          branch "" (a run that never went back has no lineage.json)
                    |
                    '---- 3 --- 4 --- 5    branch "9f3c", from step 2

    {"branches": [["9f3c", 2]], "origin": null}

A checkpoint's manifest keeps the branches it was saved under. It belongs to the run if the two lists agree
about the steps up to its own. A start from a checkpoint of another folder begins at step -1, so that
nothing that is here already belongs to it, and keeps that checkpoint's path as `origin`: until the first
save it is what the run resumes from.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.base.files import replaced_atomically
from pipeline.base.json_reader import saved_json
from pipeline.base.problems import JobError, job_error

LINEAGE = "lineage.json"
BEFORE_ALL = -1  # a step before every checkpoint's
Branches = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Lineage:
    """The content of `lineage.json`.

    Attributes:
        branches: Name of each branch and the step that it begins after, in order.
        origin: The checkpoint of another folder that the run came from, None if it began here.
    """

    branches: Branches = ()
    origin: str | None = None

    def owns(self, branches: Branches, step: int) -> bool:
        """Whether a checkpoint saved under `branches` after `step` steps is part of this run."""
        return _until(self.branches, step) == _until(branches, step)


def _until(branches: Branches, step: int) -> Branches:
    return tuple(branch for branch in branches if branch[1] < step)


def branched(branches: Branches, step: int, name: str) -> Branches:
    """The branches of a run that goes back to a checkpoint after `step` steps, saved under `branches`."""
    return (*_until(branches, step), (name, step))


def read_lineage(folder: Path) -> Lineage:
    """The lineage of the run in a checkpoint folder.

    Raises:
        JobError: it cannot be read, so that it is unknown which checkpoints are the run's.
    """
    path = folder / LINEAGE
    try:
        content = saved_json(path)
        branches, origin = parse_branches(content["branches"]), content["origin"]
        if origin is not None and not isinstance(origin, str):
            raise TypeError("the origin is a path")
        return Lineage(branches, origin)
    except (FileNotFoundError, NotADirectoryError):
        return Lineage()
    except (OSError, ValueError, KeyError, TypeError) as error:
        rule = (
            f"cannot be read ({type(error).__name__}: {error}), and records which checkpoints this run left "
            f"behind when it went back to an earlier one"
        )
        remedy = "Name the checkpoint to resume from with --resume PATH, which replaces the file"
        raise job_error("resume", str(path), rule, remedy) from error


def saved_lineage(folder: Path) -> Lineage | None:
    """As `read_lineage`; None where it cannot be read."""
    try:
        return read_lineage(folder)
    except JobError:
        return None


def write_lineage(folder: Path, lineage: Lineage) -> None:
    """Replace `lineage.json` atomically."""
    content = {"branches": lineage.branches, "origin": lineage.origin}
    with replaced_atomically(folder / LINEAGE) as file:
        file.write((json.dumps(content) + "\n").encode())


def parse_branches(saved: Any) -> Branches:
    """Branches from JSON.

    Raises:
        TypeError, ValueError: it is something else.
    """
    branches = tuple((name, step) for name, step in saved)
    if not all(isinstance(name, str) and isinstance(step, int) for name, step in branches):
        raise TypeError("a branch is a name and a step")
    return branches
