"""``./launch.sh`` behind the set-up: check the job, start it with the deepspeed launcher, tell how it ended.

arguments ─┬─ launcher options ── world ─┬─ job, checked ── command ── supervised run ── outcome ── exit code
           └─ job options ───────────────┘
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from pipeline.check import print_job
from pipeline.cluster.launcher_command import plan_launch
from pipeline.cluster.launcher_options import LauncherOptions, launcher_parser, split_arguments
from pipeline.cluster.run import run_launch
from pipeline.cluster.supervise import say
from pipeline.cluster.world import World, resolve_world
from pipeline.job.job import Job
from pipeline.job.options import parse_options
from pipeline.job.problems import EXIT_WRONG_JOB, JobError
from pipeline.job.resolve import resolve


def check_job(options: LauncherOptions, job_arguments: Sequence[str]) -> tuple[World, Job]:
    """Everything that can be known before a rank starts, printed.

    Raises:
        JobError: with every problem found.
        SystemExit: code 2 after a message, for an option that does not exist.
    """
    job_options = parse_options(job_arguments, prog="./launch.sh")
    world = resolve_world(
        options.hostfile, options.include, options.exclude, options.num_nodes, options.num_gpus
    )
    job = resolve(job_options, world)
    print_job(job)
    return world, job


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, start, wait. Returns the documented exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if "--help" in arguments or "-h" in arguments:
        launcher_parser().print_help()
        arguments = ["--help"]  # the job's half, which ends this process
    try:
        options, job_arguments = split_arguments(arguments)
        world, job = check_job(options, job_arguments)
    except JobError as error:
        say(str(error))
        return EXIT_WRONG_JOB
    launch = plan_launch(options, world, job_arguments, os.environ)
    return run_launch(launch, job.output_dir, options.stop_timeout)


if __name__ == "__main__":
    sys.exit(main())
