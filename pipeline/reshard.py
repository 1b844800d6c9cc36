"""``python -m pipeline.reshard CHECKPOINT FOLDER [options]``: a checkpoint for another layout, offline.

Exit codes: 0 done, 2 with every problem if the options are wrong or the checkpoint cannot be converted, 1
anything else. Killed or interrupted, the same command continues.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import tyro

from pipeline.base.command import end_interrupts, run_command
from pipeline.base.option_help import Group, Help
from pipeline.base.problems import EXIT_FAILED, EXIT_FINISHED, EXIT_WRONG_JOB, JobError, Problem
from pipeline.base.user_input import unwritable
from pipeline.checkpoints.manifest import Checkpoint
from pipeline.checkpoints.output import output_problems
from pipeline.checkpoints.resume import checkpoint_at, conversion_problems, differences, layout_changes
from pipeline.cluster.launcher_options import LauncherOptions, launcher_problems
from pipeline.cluster.world import Paper, resolve_world
from pipeline.job.job import Job
from pipeline.job.options import MOST_WORKERS, CheckOptions, PathName
from pipeline.job.report import console, print_interruption, print_problems
from pipeline.job.resolve import examine
from pipeline.job.run_file import CHECKPOINTS, RUN_FILE, TOKENIZER_FOLDER
from pipeline.launch.preflight import read_arguments
from pipeline.training.quiet import quiet_deepspeed

if TYPE_CHECKING:
    from pipeline.checkpoints.conversion import ConversionProgress

PROGRAM = "python -m pipeline.reshard"
_EXAMPLE = "The newest checkpoint of a run, for another recipe and number of ranks."
LINE_SECONDS = 5.0  # between lines of progress


@dataclass(frozen=True)
class ReshardOptions(CheckOptions):
    """Convert a checkpoint to another layout offline, on one machine. Takes the options of the launcher and
    those of pretrain.py: they describe the job that is to resume. Without --config, what is not given is as
    in the run.json of the checkpoint's run."""

    HELP: ClassVar[Help] = Help(
        (Group("options", "checkpoint folder workers"), *CheckOptions.HELP.groups),
        (("", "runs/mine converted --deepspeed_config ds_configs/zero3.json --world_size 2", _EXAMPLE),),
    )

    checkpoint: Annotated[PathName, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")] = ""
    """A checkpoint, or the folder of a run: its newest one."""
    folder: Annotated[PathName, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")] = ""
    """The folder to make. It is a checkpoint of its own, for --resume FOLDER."""
    workers: int = 4
    """Parameters that are converted at the same time; each takes the memory of one of its tensors in fp32."""


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
    if problems := _option_problems(options):
        raise JobError(problems)
    checkpoint = checkpoint_at(Path(options.checkpoint), "CHECKPOINT").reported()
    run_file = _run_file_of(checkpoint)
    if options.config is None and run_file is not None:
        launcher, options, _ = read_arguments(
            ["--config", str(run_file), *arguments], ReshardOptions, PROGRAM
        )
    return checkpoint, _job(checkpoint, options, launcher), options


def _option_problems(options: ReshardOptions) -> list[Problem]:
    """What is wrong with the options by themselves."""
    problems = []
    for name in ("checkpoint", "folder"):
        if not getattr(options, name):
            remedy = f"{PROGRAM} CHECKPOINT FOLDER [options]"
            problems.append(Problem(name.upper(), "", "is missing", remedy))
    if options.folder and Path(options.folder).name in ("", ".."):
        rule = "is not the name of a folder to make"
        problems.append(Problem("FOLDER", options.folder, rule, "Name a folder that does not exist"))
    elif options.folder:
        if rule := unwritable(options.folder) or unwritable(f"{options.folder}.partial"):
            problems.append(Problem("FOLDER", options.folder, rule, "Name another folder"))
        else:
            problems += output_problems("FOLDER", options.folder)
    if not 1 <= options.workers <= MOST_WORKERS:
        rule = f"must be at least 1, and at most {MOST_WORKERS:,}"
        problems.append(Problem("workers", options.workers, rule, "Correct --workers"))
    return problems


def _run_file_of(checkpoint: Checkpoint) -> Path | None:
    """The run.json of the run that a checkpoint is of; None where it is not in a run's folder."""
    path = checkpoint.folder.parent / RUN_FILE
    return path if checkpoint.folder.name == CHECKPOINTS and path.exists() else None


def _options_for(options: ReshardOptions, checkpoint: Checkpoint) -> ReshardOptions:
    """The options of the job that is to resume, without what a conversion does not touch: data and length."""
    tokenizer, steps = checkpoint.path / TOKENIZER_FOLDER, options.train_steps
    if steps is None and options.train_tokens is None:
        steps = max(checkpoint.state.step, 1)
    return replace(
        options,
        data=(),
        data_blend=None,
        validation=(),
        eval_samples=0,
        tokenizer=str(tokenizer) if tokenizer.exists() else options.tokenizer,
        seq_length=options.seq_length or checkpoint.identity.get("seq_length"),
        train_steps=steps,
        output_dir=options.folder,
        resume="auto",
    )


def _model_problems(checkpoint: Checkpoint, job: Job) -> list[Problem]:
    """What of the model is another one in the job that is to resume."""
    wanted = {k: v for k, v in job.identity.items() if k.startswith("model.") or k == "seq_length"}
    if differing := differences(checkpoint.identity, wanted):
        rule = f"is not the checkpoint's: {differing}"
        return [Problem("model", job.model.name, rule, "Give the options of the checkpoint's run")]
    return []


def _job(checkpoint: Checkpoint, options: ReshardOptions, launcher: LauncherOptions) -> Job:
    """The job that is to resume, on paper.

    Raises:
        JobError: it is no legal job, or cannot read the checkpoint even when it is converted.
    """
    options = _options_for(options, checkpoint)
    filters = (launcher.include, launcher.exclude, launcher.num_nodes, launcher.num_gpus)
    try:
        draft = examine(options, resolve_world(launcher.hostfile, *filters, Paper(options.world_size)))
    except JobError as error:
        draft = examine(options, None, error.problems)
    problems = [*draft.errors, *launcher_problems(launcher)]
    if draft.job is not None:
        problems += conversion_problems(checkpoint, draft.job, "CHECKPOINT")
        problems += _model_problems(checkpoint, draft.job)
    if problems or draft.job is None:
        raise JobError(problems)
    return draft.job


def _convert(checkpoint: Checkpoint, job: Job, options: ReshardOptions) -> None:
    quiet_deepspeed(rank=0)
    # Only now, torch and DeepSpeed: whatever is wrong with the command line is reported at once.
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
