"""``python -m pipeline.reshard CHECKPOINT FOLDER [options]``: a checkpoint for another layout, offline.

Exit codes: 0 done, 2 with every problem if the options are wrong or the checkpoint cannot be converted, 1
anything else. Killed or interrupted, the same command continues.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.base.command import end_interrupts, run_command
from pipeline.base.problems import EXIT_FAILED, EXIT_FINISHED, EXIT_WRONG_JOB, JobError
from pipeline.checkpoints.conversion_rules import (
    ReshardOptions,
    conversion_problems,
    option_problems,
    options_for,
    run_file_of,
)
from pipeline.checkpoints.manifest import Checkpoint
from pipeline.checkpoints.resume import checkpoint_at, layout_changes
from pipeline.cluster.launcher_options import LauncherOptions, launcher_problems
from pipeline.cluster.world import resolve_world
from pipeline.job.job import Job
from pipeline.job.report import console, print_interruption, print_problems
from pipeline.job.resolve import examine
from pipeline.launch.preflight import read_arguments
from pipeline.training.quiet import quiet_deepspeed

if TYPE_CHECKING:
    from pipeline.checkpoints.conversion import ConversionProgress

PROGRAM = "python -m pipeline.reshard"
LINE_SECONDS = 5.0  # between lines of progress


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert; the exit code."""
    try:
        with end_interrupts():
            checkpoint, job, options = _read(sys.argv[1:] if arguments is None else arguments)
            _convert(checkpoint, job, options)
    except JobError as error:
        print_problems(console(stderr=True), error.problems)
        return EXIT_WRONG_JOB
    except (OSError, KeyboardInterrupt) as error:
        print_interruption(error)
        return EXIT_FAILED
    except (RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    return EXIT_FINISHED


def _read(arguments: Sequence[str]) -> tuple[Checkpoint, Job, ReshardOptions]:
    """What is to be converted, and the job that is to resume from it.

    Raises:
        SystemExit: as `parse_options`.
        JobError: with everything that is wrong.
    """
    launcher, options, _ = read_arguments(arguments, ReshardOptions, PROGRAM)
    if problems := option_problems(options, PROGRAM):
        raise JobError(problems)
    checkpoint = checkpoint_at(Path(options.checkpoint), "CHECKPOINT").announced()
    run_file = run_file_of(checkpoint)
    if options.config is None and run_file is not None:
        launcher, options, _ = read_arguments(
            ["--config", str(run_file), *arguments], ReshardOptions, PROGRAM
        )
    return checkpoint, _job(checkpoint, options, launcher), options


def _job(checkpoint: Checkpoint, options: ReshardOptions, launcher: LauncherOptions) -> Job:
    """The job that is to resume, on paper.

    Raises:
        JobError: it is no legal job, or cannot read the checkpoint even when it is converted.
    """
    options = options_for(options, checkpoint)
    filters = (launcher.include, launcher.exclude, launcher.num_nodes, launcher.num_gpus)
    try:
        draft = examine(options, resolve_world(launcher.hostfile, *filters, options.world_size))
    except JobError as error:
        draft = examine(options, None, error.problems)
    problems = [*draft.errors, *launcher_problems(launcher)]
    if draft.job is not None:
        problems += conversion_problems(checkpoint, draft.job)
    if problems or draft.job is None:
        raise JobError(problems)
    return draft.job


def _convert(checkpoint: Checkpoint, job: Job, options: ReshardOptions) -> None:
    quiet_deepspeed(rank=0)
    # Only now, torch and DeepSpeed: whatever is wrong with the command line is said at once.
    from pipeline.checkpoints.conversion import convert

    changes = ", ".join(layout_changes(checkpoint, job)) or "the same"
    print(f"{checkpoint.path}, step {checkpoint.state.step}; layout: {changes}", flush=True)
    begin = time.monotonic()
    folder = Path(options.folder)
    if convert(checkpoint, job, folder, options.workers, _Lines()):
        print(f"{folder} made in {time.monotonic() - begin:.1f} s", flush=True)
    else:
        print(f"{folder} was made before", flush=True)
    print(f"to resume: --resume {folder}", flush=True)


class _Lines:
    """A line of progress every few seconds."""

    def __init__(self) -> None:
        self._next = time.monotonic() + LINE_SECONDS

    def __call__(self, progress: ConversionProgress) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + LINE_SECONDS
            share = progress.bytes / progress.all_bytes
            print(
                f"{share:6.1%}  {progress.parameters} of {progress.all_parameters} parameters, "
                f"{progress.bytes / 1e9:,.2f} of {progress.all_bytes / 1e9:,.2f} GB",
                flush=True,
            )


if __name__ == "__main__":
    run_command(main)
