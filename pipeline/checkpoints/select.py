"""Which checkpoint a run goes on from: the newest that its manifest proves complete. No torch.

Newest is the highest step. Neither file times nor what `latest` says decide: clocks jump, and a crash may
come between the last rename of a save and the replacement of `latest`. Passed over, each with its reason, are
checkpoints that are not complete, those that the run left behind when it went back (`lineage`), and those of
another run. Where some exist and none can be used, that is an error: a run never starts anew beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.base.problems import JobError, Problem
from pipeline.checkpoints.lineage import BEFORE_ALL, Lineage, branched, read_lineage, saved_lineage
from pipeline.checkpoints.manifest import CHOOSE_ANOTHER, Checkpoint, read_checkpoint, saved_branches
from pipeline.job.job import Job
from pipeline.job.model_source import CHECKPOINT_NAME
from pipeline.job.run_file import CHECKPOINTS, identity

LATEST = "latest"
# Places in the order of candidates: a checkpoint of this folder has its step; these come behind it.
ORIGIN, NOTHING = -1, -2


@dataclass(frozen=True)
class Selection:
    """What a run goes on from.

    Attributes:
        checkpoint: None: it starts at step 0.
        notes: Newer checkpoints that were passed over and why, in sentences.
    """

    checkpoint: Checkpoint | None = None
    notes: tuple[str, ...] = ()

    def told(self, say: Callable[[str], object]) -> Checkpoint:
        """The checkpoint, where there must be one, after what was passed over for it."""
        assert self.checkpoint is not None
        for note in self.notes:
            say(note)
        return self.checkpoint


@dataclass
class Candidates:
    """The checkpoints that ``--resume auto`` may take, newest first.

    Attributes:
        wanted: The run's identity; None: any run's.
        passed: Why those that were looked at so far are not among them, by path.
    """

    folder: Path
    wanted: Mapping[str, Any] | None = None
    passed: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._lineage = read_lineage(self.folder)
        self._steps = steps_in(self.folder)

    @property
    def exist(self) -> bool:
        """Whether there is anything that a new start would have to answer for."""
        return bool(self._steps) or self._lineage.origin is not None or (self.folder / LATEST).exists()

    def newest(self, below: int | None = None) -> tuple[int, Checkpoint | None]:
        """The first usable one below a place, and its own place: its step, or `ORIGIN` for the checkpoint of
        another folder that the run came from, or `NOTHING` with None."""
        for place, path in self._places():
            if below is not None and place >= below:
                continue
            found = self._usable(path, place)
            if isinstance(found, Checkpoint):
                return place, found
            self.passed[str(path)] = found
        return NOTHING, None

    def refusal(self) -> JobError:
        """That none of them can be used."""
        problems = [Problem("resume", path, rule, CHOOSE_ANOTHER) for path, rule in self.passed.items()]
        if not problems:
            here = (self.folder / LATEST).exists()
            rule = "names a checkpoint, and none is here" if here else "has none, and other hosts have some"
            path = self.folder / LATEST if here else self.folder
            problems = [Problem("resume", str(path), rule, CHOOSE_ANOTHER)]
        return JobError(problems)

    def notes(self, chosen: Checkpoint) -> tuple[str, ...]:
        """What was passed over on the way to `chosen`, in sentences."""
        said = [f"passed over {path}: it {rule}" for path, rule in self.passed.items()]
        named = named_by_latest(self.folder)
        if named != chosen.tag and not self._lineage.origin:
            said.append(f"{self.folder / LATEST} {_what_latest_is(self.folder, named)}")
        return tuple(said)

    def _places(self) -> Iterator[tuple[int, Path]]:
        for step in sorted(self._steps, reverse=True):
            for path in self._steps[step]:
                yield step, path
        if self._lineage.origin is not None:
            yield ORIGIN, Path(self._lineage.origin)

    def _usable(self, path: Path, place: int) -> Checkpoint | str:
        """The checkpoint, or why it is passed over."""
        try:
            checkpoint = read_checkpoint(path)
        except JobError as error:
            return error.problems[0].rule
        step = checkpoint.state.step
        if place not in (ORIGIN, step):
            return f"is no complete checkpoint: its manifest is that of step {step}"
        if place != ORIGIN and not self._lineage.owns(checkpoint.branches, step):
            return "was left behind when the run went back to an earlier checkpoint"
        if self.wanted is not None and (differing := differences(checkpoint.identity, self.wanted)):
            return f"belongs to another run: {differing}"
        return checkpoint


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
        raise JobError([Problem("resume", str(folder), rule, "See to its permissions")]) from error
    steps: dict[int, list[Path]] = {}
    for path, match in sorted(found, key=lambda each: each[0].name):
        if match:
            steps.setdefault(int(match[1]), []).append(path)
    return steps


def candidates_of(job: Job) -> Candidates:
    """What ``--resume auto`` may take in this job's folder."""
    return Candidates(
        Path(job.output_dir) / CHECKPOINTS, identity(job.options, job.model, job.batch.sequence_length)
    )


def select_checkpoint(job: Job) -> Selection:
    """What this job goes on from.

    Raises:
        JobError: the checkpoint that was named is not complete, or some exist and none can be used.
    """
    resume = job.options.resume
    if resume == "never":
        return Selection()
    if resume != "auto":
        return Selection(read_checkpoint(Path(resume)))
    candidates = candidates_of(job)
    return _newest(candidates)


def find_selection(output_dir: str) -> Selection:
    """The newest checkpoint of whatever run lies in `output_dir`.

    Raises:
        JobError: some exist and none can be used.
    """
    return _newest(Candidates(Path(output_dir) / CHECKPOINTS))


def find_checkpoint(output_dir: str, resume: str) -> Checkpoint | None:
    """As `select_checkpoint`, of whatever run lies in `output_dir`."""
    if resume == "never":
        return None
    if resume != "auto":
        return read_checkpoint(Path(resume))
    return find_selection(output_dir).checkpoint


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


def named_by_latest(folder: Path) -> str | None:
    """The tag in `latest`; None where there is no such file, or no text in it."""
    try:
        return (folder / LATEST).read_text(encoding="utf-8").strip() or None
    except (OSError, ValueError):
        return None


def _what_latest_is(folder: Path, named: str | None) -> str:
    if named is None:
        return "names no checkpoint" if (folder / LATEST).exists() else "is missing"
    there = (folder / named).is_dir()
    return f"names {named}, {'another one' if there else 'which is not there'}"


def lineage_after(folder: Path, checkpoint: Checkpoint, name: str) -> Lineage:
    """The lineage of a run in `folder` that goes on from `checkpoint`: as it was or, where something would
    count otherwise that the run does not come from, with a new branch `name`."""
    current = saved_lineage(folder) or Lineage(((name, BEFORE_ALL),))  # unreadable: it is written anew
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
    """Whether a run of that lineage would go on from what lies there, now or when what is missing of it comes
    back, as from a mount that was away or from a backup."""
    saved = saved_branches(path)
    return saved is None or lineage.owns(*saved)
