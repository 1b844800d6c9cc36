"""``python -m pipeline.check [options]``: everything that can be known before a rank starts. No torch.

Exit code 0 if the job can start, 2 with every problem if it cannot.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from pipeline.cluster.world import World, resolve_world
from pipeline.job.options import CheckOptions, parse_options
from pipeline.job.problems import EXIT_FINISHED, EXIT_WRONG_JOB, JobError, Problem
from pipeline.job.report import console, describe, print_problems, verdict
from pipeline.job.resolve import examine


def main(args: Sequence[str] | None = None) -> int:
    """Print the job and its problems; the exit code."""
    try:
        options = parse_options(
            sys.argv[1:] if args is None else args, CheckOptions, "python -m pipeline.check"
        )
    except JobError as error:
        print_problems(console(stderr=True), error.problems)
        return EXIT_WRONG_JOB
    world, problems = _world(options)
    draft = examine(options, world, problems)
    out = console()
    out.print(describe(draft))
    if options.print_config and draft.job is not None:
        print(json.dumps(draft.job.deepspeed, indent=2))
    print_problems(out, draft.problems)
    out.print(verdict(draft))
    return EXIT_FINISHED if draft.job is not None else EXIT_WRONG_JOB


def _world(options: CheckOptions) -> tuple[World | None, tuple[Problem, ...]]:
    """The world, or why there is none; the rest of the job is examined all the same."""
    try:
        world = resolve_world(
            options.hostfile,
            options.include,
            options.exclude,
            options.num_nodes,
            options.num_gpus,
            options.world_size,
        )
    except JobError as error:
        return None, error.problems
    return world, ()


if __name__ == "__main__":
    sys.exit(main())
