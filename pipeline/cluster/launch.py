"""``./launch.sh`` behind the set-up: check the job, start it with the deepspeed launcher, tell how it ended.

arguments ─┬─ launcher options ── world ─┬─ job, checked ── command ── supervised run ── outcome ── exit code
           └─ job options ───────────────┘
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from pipeline.checkpoints.folder import resume_problems
from pipeline.cluster.launcher_command import plan_launch
from pipeline.cluster.launcher_options import LauncherOptions, launcher_parser, split_arguments
from pipeline.cluster.run import run_launch
from pipeline.cluster.supervise import say
from pipeline.cluster.world import World, resolve_world
from pipeline.job.job import Job
from pipeline.job.options import parse_options
from pipeline.job.problems import EXIT_FAILED, EXIT_WRONG_JOB, JobError, Problem
from pipeline.job.report import console, describe, print_problems, verdict
from pipeline.job.resolve import examine


def check_job(options: LauncherOptions, job_arguments: Sequence[str]) -> tuple[World, Job] | None:
    """Print everything that can be known before a rank starts, all problems included; None if there are any.

    Raises:
        JobError: the file given with --config cannot be used.
        SystemExit: code 2 after a message, for an option that does not exist.
    """
    job_options = parse_options(job_arguments, prog="./launch.sh")
    world, problems = _world(options)
    draft = examine(job_options, world, problems)
    if draft.job is not None:
        draft.problems += resume_problems(draft.job)
    if draft.errors:
        draft.job = None
    out = console(stderr=draft.job is None)
    out.print(describe(draft))
    print_problems(out, draft.problems)
    out.print(verdict(draft))
    return None if world is None or draft.job is None else (world, draft.job)


def _world(options: LauncherOptions) -> tuple[World | None, tuple[Problem, ...]]:
    """The world, or why there is none; the rest of the job is examined all the same."""
    filters = (options.include, options.exclude, options.num_nodes, options.num_gpus)
    try:
        return resolve_world(options.hostfile, *filters), ()
    except JobError as error:
        return None, error.problems


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, start, wait. Returns the documented exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if "--help" in arguments or "-h" in arguments:
        launcher_parser().print_help()
        print("\njob options:\n", flush=True)
        parse_options(["--help"], prog="./launch.sh")  # ends this process with code 0
    try:
        options, job_arguments = split_arguments(arguments)
        checked = check_job(options, job_arguments)
    except JobError as error:
        print_problems(console(stderr=True), error.problems)
        return EXIT_WRONG_JOB
    if checked is None:
        return EXIT_WRONG_JOB
    world, job = checked
    launch = plan_launch(options, world, job_arguments, os.environ)
    say(f"Starting {world.size} ranks; rendezvous at port {launch.master_port}.")
    return run_launch(launch, job.output_dir, options.stop_timeout)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # before the ranks were started; after that it is a request to save
        say("\nInterrupted; nothing was started.")
        sys.exit(EXIT_FAILED)
