"""Whether a job may go on from the checkpoint that it would resume from, and what changes by it. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.base.problems import JobError, Problem
from pipeline.checkpoints.manifest import SHARDS, Checkpoint, layout_of
from pipeline.checkpoints.select import differences, select_checkpoint
from pipeline.job.initial_weights import initial_weights
from pipeline.job.job import Job
from pipeline.job.run_file import identity
from pipeline.job.run_settings import setting_changes

PARTS_APART = "each of its hosts holds a part: copy all parts into one folder that every host sees"


@dataclass(frozen=True)
class Resumption:
    """What a job would go on from.

    Attributes:
        lines: For the console: the checkpoint, what was passed over, what changes; none for a new start.
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
    """Why this job cannot go on from a complete checkpoint."""
    problems = []
    path = str(checkpoint.path)
    if rule := _unreadable(checkpoint, job):
        remedy = "Resume in the layout it was saved in, or start anew in another --output_dir"
        problems.append(Problem("resume", path, rule, remedy))
    # Whether the data is the same, the fingerprints of its sources tell when it has been read.
    same = identity(job.options, job.model, job.batch.sequence_length)
    if differing := differences(checkpoint.identity, same):
        rule = f"belongs to another run: {differing}"
        problems.append(Problem("resume", path, rule, "Give that run's settings, or start anew"))
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
    said = "resumed" if is_done else "a start resumes"
    lines = [f"{said} from {checkpoint.path}{changed}"]
    if folder := initial_weights(job.options.model).folder:
        lines.append(f"its weights go on; those in {folder} were for step 0")
    if settings := setting_changes(checkpoint.settings, job):
        lines += ["settings changed since it was saved:", *(f"  {change}" for change in settings)]
    return lines


def _unreadable(checkpoint: Checkpoint, job: Job) -> str | None:
    """Why a checkpoint of another layout cannot be converted to that of `job`; None where it can, or need
    not be."""
    there, here = checkpoint.layout, layout_of(job)
    if there == here:
        return None
    reason = None
    if not checkpoint.has_shard_index:
        reason = f"it has no {SHARDS}, without which only its own layout can read it"
    elif there["optimizer"] != here["optimizer"]:
        reason = "one optimizer's state is nothing to another"
    elif there["nvme"] or here["nvme"]:
        reason = "state on NVMe drives is not converted"
    elif checkpoint.missing:  # not shared
        reason = PARTS_APART
    changes = ", ".join(layout_changes(checkpoint, job))
    return reason and f"was saved in another layout ({changes}), and {reason}"
