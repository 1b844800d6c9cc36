"""``python -m pipeline.check [options]``: everything that can be known before a rank starts. No torch.

Takes the options of ``./launch.sh``. Exit code 0 if the job can start, 2 with every problem if it cannot.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence

from pipeline.checkpoints.folder import resume_problems
from pipeline.cluster.launcher_options import launcher_parser, split_arguments
from pipeline.cluster.world import World, resolve_world
from pipeline.job.options import CheckOptions, Options, parse_options
from pipeline.job.problems import EXIT_FINISHED, EXIT_WRONG_JOB, JobError
from pipeline.job.report import console, describe, print_problems, verdict
from pipeline.job.resolve import Draft, examine

PROGRAM = "python -m pipeline.check"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the job and its problems; the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if "--help" in arguments or "-h" in arguments:
        launcher_parser().print_help()
        arguments = ["--help"]  # the job's half, which ends this process
    try:
        launcher, job_arguments = split_arguments(arguments)
        options = parse_options(job_arguments, CheckOptions, PROGRAM)
    except JobError as error:
        print_problems(console(stderr=True), error.problems)
        return EXIT_WRONG_JOB
    filters = (launcher.include, launcher.exclude, launcher.num_nodes, launcher.num_gpus)
    draft = check(options, lambda: resolve_world(launcher.hostfile, *filters, options.world_size))
    return EXIT_FINISHED if draft.job is not None else EXIT_WRONG_JOB


def check(options: Options, find_world: Callable[[], World]) -> Draft:
    """Examine a job and print it with all its problems, those of the world included."""
    try:
        draft = examine(options, find_world())
    except JobError as error:
        draft = examine(options, None, error.problems)
    if draft.job is not None and (problems := resume_problems(draft.job)):
        draft.problems += problems
        draft.job = None
    print_draft(draft)
    return draft


def print_draft(draft: Draft) -> None:
    """What is known of the job, what is wrong with it, and whether it can start."""
    out = console()
    out.print(describe(draft))
    if draft.options.print_config and draft.job is not None:
        print(json.dumps(draft.job.deepspeed, indent=2))
    print_problems(out, draft.problems)
    out.print(verdict(draft))


if __name__ == "__main__":
    sys.exit(main())
