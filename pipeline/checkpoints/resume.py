"""Which checkpoint a run resumes from, and what changes by it. No torch.

It is the newest that its manifest shows to be complete, the one with the highest step. Neither file times nor
the content of `latest` decide: clocks jump, and a crash may come between the last rename of a save and the
replacement of `latest`. Skipped, each with its reason, are checkpoints that are not complete, those that
the run left behind when it went back (`lineage`), and those of another run. Where some exist and none can be
used, that is an error: a run never starts from step 0 beside them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.base.problems import JobError, Problem, job_error
from pipeline.base.user_input import is_file, is_folder
from pipeline.base.words import cut, ends
from pipeline.checkpoints.folder import LATEST, named_by_latest, steps_in
from pipeline.checkpoints.lineage import BEFORE_ALL, Lineage, branched, read_lineage, saved_lineage
from pipeline.checkpoints.manifest import (
    CHOOSE_ANOTHER,
    MANIFEST,
    SHARDS,
    Checkpoint,
    layout_of,
    read_checkpoint,
    saved_branches,
)
from pipeline.job.job import Job
from pipeline.job.run_file import CHECKPOINTS, setting_changes

# Positions in the order of candidates: a checkpoint of this folder has its step; these come behind it.
ORIGIN, NOTHING = -1, -2
# Of what was skipped, for the console.
_NOTES = 12


@dataclass(frozen=True)
class Selection:
    """What a run resumes from.

    Attributes:
        checkpoint: None: it starts at step 0.
        notes: Newer checkpoints that were skipped and why, in sentences.
    """

    checkpoint: Checkpoint | None = None
    notes: tuple[str, ...] = ()

    def reported(self) -> Checkpoint:
        """The checkpoint, where there must be one; what was skipped for it is printed to stderr."""
        assert self.checkpoint is not None
        for note in self.notes:
            print(note, file=sys.stderr)
        return self.checkpoint


@dataclass
class Candidates:
    """The checkpoints that ``--resume auto`` may take, newest first.

    Attributes:
        wanted: The run's identity; None: any run's.
        skipped: Why those that were looked at so far are not among them, by path.
    """

    folder: Path
    wanted: Mapping[str, Any] | None = None
    skipped: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._lineage = read_lineage(self.folder)
        self._steps = steps_in(self.folder)

    @property
    def exist(self) -> bool:
        """Whether there is any, so that a start from step 0 would be wrong."""
        return bool(self._steps) or self._lineage.origin is not None or (self.folder / LATEST).exists()

    def newest(self, below: int | None = None) -> tuple[int, Checkpoint | None]:
        """The first usable one below a position, and its own: its step, or `ORIGIN` for the checkpoint of
        another folder that the run came from, or `NOTHING` with None."""
        for position, path in self._positions():
            if below is not None and position >= below:
                continue
            found = self._usable(path, position)
            if isinstance(found, Checkpoint):
                return position, found
            self.skipped[str(path)] = found
        return NOTHING, None

    def refusal(self) -> JobError:
        """The error that none of them can be used."""
        problems = [Problem("resume", path, rule, CHOOSE_ANOTHER) for path, rule in self.skipped.items()]
        if not problems:
            here = (self.folder / LATEST).exists()
            rule = "names a checkpoint, and none is here" if here else "has none, and other hosts have some"
            path = self.folder / LATEST if here else self.folder
            problems = [Problem("resume", str(path), rule, CHOOSE_ANOTHER)]
        return JobError(problems)

    def notes(self, chosen: Checkpoint) -> tuple[str, ...]:
        """What was skipped on the way to `chosen`, in sentences."""
        notes = ends([f"skipped {path}: it {rule}" for path, rule in self.skipped.items()], _NOTES)
        named = named_by_latest(self.folder)
        if named != chosen.tag and not self._lineage.origin:
            notes.append(f"{self.folder / LATEST} {_what_latest_is(self.folder, named)}")
        return tuple(notes)

    def _positions(self) -> Iterator[tuple[int, Path]]:
        for step in sorted(self._steps, reverse=True):
            for path in self._steps[step]:
                yield step, path
        if self._lineage.origin is not None:
            yield ORIGIN, Path(self._lineage.origin)

    def _usable(self, path: Path, position: int) -> Checkpoint | str:
        """The checkpoint, or why it is skipped."""
        try:
            checkpoint = read_checkpoint(path)
        except JobError as error:
            return error.problems[0].rule
        step = checkpoint.state.step
        if position not in (ORIGIN, step):
            return f"is no complete checkpoint: its manifest is that of step {step}"
        if position != ORIGIN and not self._lineage.owns(checkpoint.branches, step):
            return "was left behind when the run went back to an earlier checkpoint"
        if self.wanted is not None and (differing := differences(checkpoint.identity, self.wanted)):
            return f"belongs to another run: {differing}"
        return checkpoint


def candidates_of(job: Job) -> Candidates:
    """What ``--resume auto`` may take in this job's folder."""
    return Candidates(Path(job.output_dir) / CHECKPOINTS, job.identity)


def select_checkpoint(job: Job) -> Selection:
    """What this job resumes from.

    Raises:
        JobError: the checkpoint that was named is not complete, or some exist and none can be used.
    """
    resume = job.resume
    if resume == "never":
        return Selection()
    if resume != "auto":
        return Selection(read_checkpoint(Path(resume)))
    candidates = candidates_of(job)
    return _newest(candidates)


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is one of the folders that `checkpoint_at` takes, by its content."""
    return is_file(path / MANIFEST) or is_folder(path / CHECKPOINTS) or bool(steps_in(path))


def checkpoint_at(path: Path, key: str = "checkpoint") -> Selection:
    """The checkpoint at `path`: one by itself, or the newest of a run's folder or its folder of checkpoints.

    Args:
        key: How the command that was given `path` calls it.

    Raises:
        JobError: there is none, or none that is complete.
    """
    if not is_checkpoint(path):
        rule = "is no checkpoint, and no folder of a run" if is_folder(path) else "there is no such folder"
        raise job_error(key, str(path), rule, "Name a run's --output_dir, or a checkpoint")
    try:
        if is_file(path / MANIFEST):
            return Selection(read_checkpoint(path))
        found = _newest(Candidates(path / CHECKPOINTS if is_folder(path / CHECKPOINTS) else path))
    except JobError as error:
        remedy = "Name another checkpoint"
        raise JobError([replace(problem, key=key, remedy=remedy) for problem in error.problems]) from error
    if found.checkpoint is None:
        raise job_error(key, str(path), "the run has not saved yet", "Let it save first")
    return found


def _newest(candidates: Candidates) -> Selection:
    _, checkpoint = candidates.newest()
    if checkpoint is not None:
        return Selection(checkpoint, candidates.notes(checkpoint))
    if candidates.exist:
        raise candidates.refusal()
    return Selection()


def differences(saved: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """What of an identity is another one here."""
    return "; ".join(
        f"{key} {saved.get(key)} there, {here[key]} here" for key in here if here[key] != saved.get(key)
    )


def _what_latest_is(folder: Path, named: str | None) -> str:
    if named is None:
        return "names no checkpoint" if (folder / LATEST).exists() else "is missing"
    there = is_folder(folder / named)
    return f"names {cut(named)}, {'another one' if there else 'which is not there'}"


def lineage_after(folder: Path, checkpoint: Checkpoint, name: str) -> Lineage:
    """The lineage of a run in `folder` that resumes from `checkpoint`: as it was or, where something would
    count otherwise that the run does not come from, with a new branch `name`."""
    current = saved_lineage(folder) or Lineage(((name, BEFORE_ALL),))  # unreadable: it is replaced
    elsewhere = checkpoint.folder.resolve() != folder.resolve()
    step = checkpoint.state.step
    if elsewhere:
        origin = str(checkpoint.path.resolve())
        goes_on, first = current.origin == origin, BEFORE_ALL
    else:
        origin = current.origin
        goes_on, first = current.owns(checkpoint.branches, step), step
    later = [path for at, paths in steps_in(folder).items() if at > first for path in paths]
    if goes_on and not any(_may_count(path, current) for path in later):
        return current
    if elsewhere:
        return Lineage(((name, BEFORE_ALL),), origin)
    return Lineage(branched(checkpoint.branches, step, name), origin if goes_on else None)


def _may_count(path: Path, lineage: Lineage) -> bool:
    """Whether a run of that lineage would resume from what is there, now or when what is missing of it
    comes back, as from a mount that was away or from a backup."""
    saved = saved_branches(path)
    return saved is None or lineage.owns(*saved)


PARTS_APART = "each of its hosts holds a part"
ONE_FOLDER = "Copy all parts into one folder that every host sees"


@dataclass(frozen=True)
class Resumption:
    """What a job would resume from.

    Attributes:
        lines: For the console: the checkpoint, what was skipped, what changes; none for a new start.
        problems: Why it cannot.
    """

    lines: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()


def examine_resume(job: Job) -> Resumption:
    """All of that, found without reading more than manifests and file sizes."""
    try:
        selection = select_checkpoint(job)
    except JobError as error:
        return Resumption(problems=error.problems)
    if selection.checkpoint is None:
        return Resumption()
    lines = (*selection.notes, *origin_lines(job, selection.checkpoint, is_done=False))
    return Resumption(lines, tuple(continuation_problems(selection.checkpoint, job)))


def resume_problems(job: Job) -> list[Problem]:
    """Why the checkpoint that this job would resume from cannot be loaded by it."""
    return list(examine_resume(job).problems)


def continuation_problems(checkpoint: Checkpoint, job: Job) -> list[Problem]:
    """Why this job cannot resume from a complete checkpoint."""
    problems = []
    if checkpoint.layout != layout_of(job):
        changed = f"was saved in another layout ({', '.join(layout_changes(checkpoint, job))})"
        for problem in conversion_problems(checkpoint, job, "resume"):
            remedy = f"{problem.remedy}, or start from step 0 in another --output_dir"
            problems.append(replace(problem, rule=f"{changed}, and {problem.rule}", remedy=remedy))
    # Whether the data is the same is checked by the fingerprints of its sources, when it has been read.
    if differing := differences(checkpoint.identity, job.identity):
        rule = f"belongs to another run: {differing}"
        remedy = "Give that run's settings, or start from step 0 in another --output_dir"
        problems.append(Problem("resume", str(checkpoint.path), rule, remedy))
    return problems


def conversion_problems(checkpoint: Checkpoint, job: Job, key: str) -> list[Problem]:
    """Why a complete checkpoint cannot be converted to the layout of `job`; `key` is what named it."""
    there, here, path = checkpoint.layout, layout_of(job), str(checkpoint.path)
    problems = partial_problems(checkpoint, key)
    if there["optimizer"] != here["optimizer"]:
        rule = f"{here['optimizer']} cannot use the optimizer state of {there['optimizer']}"
        problems.append(Problem(key, path, rule, "Keep the optimizer"))
    if there["nvme"] or here["nvme"]:
        remedy = "Resume in the layout it was saved in" if there["nvme"] else "Offload to cpu, or not at all"
        problems.append(Problem(key, path, "state on NVMe drives is not converted", remedy))
    return problems


def partial_problems(checkpoint: Checkpoint, key: str) -> list[Problem]:
    """Why the whole state of a checkpoint cannot be read here, whatever it is read for."""
    path, problems = str(checkpoint.path), []
    if not checkpoint.has_shard_index:
        rule = f"it has no {SHARDS}, without which only its own layout can read it"
        problems.append(Problem(key, path, rule, "Resume in the layout it was saved in, and save"))
    if missing := checkpoint.missing:
        rule = f"{PARTS_APART}: {len(missing)} of its files are not here, {missing[0]} among them"
        problems.append(Problem(key, path, rule, ONE_FOLDER))
    return problems


def layout_changes(checkpoint: Checkpoint, job: Job) -> list[str]:
    """What of the layout is another one here, as ``data 2 -> 4``."""
    here = layout_of(job)
    return [
        f"{key} {checkpoint.layout[key]} -> {value}"
        for key, value in here.items()
        if value != checkpoint.layout[key]
    ]


def origin_lines(job: Job, checkpoint: Checkpoint, is_done: bool = True) -> list[str]:
    """Where the state comes from, and what is not as it was: the layout, then each setting on a line.
    `is_done`: it has been loaded; otherwise a start would."""
    changes = layout_changes(checkpoint, job)
    changed = f"; layout changed: {', '.join(changes)}" if changes else ""
    verb = "resumed" if is_done else "a start resumes"
    lines = [f"{verb} from {checkpoint.path}{changed}"]
    if folder := job.initial_weights.folder:
        lines.append(f"its weights are used; those in {folder} were for step 0")
    if settings := setting_changes(checkpoint.settings, job):
        lines += ["settings changed since it was saved:", *(f"  {change}" for change in settings)]
    return lines
