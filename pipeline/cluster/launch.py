"""``./launch.sh`` behind the set-up: check the job, start it with the deepspeed launcher, tell how it ended.

arguments ─┬─ launcher options ── world ─┬─ job, checked ── command ── supervised run ── outcome ── exit code
           └─ job options ───────────────┘
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    # A script's own folder comes first on sys.path; the package is two above.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from pipeline.check import read_arguments
from pipeline.cluster.campaign import run_job
from pipeline.cluster.supervise import say
from pipeline.job.options import Options
from pipeline.job.problems import EXIT_FAILED, EXIT_WRONG_JOB, JobError
from pipeline.job.report import console, print_problems

PROGRAM = "./launch.sh"


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, start, wait. Returns the documented exit code."""
    started_at = time.time()
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        launcher, options, job_arguments = read_arguments(arguments, Options, PROGRAM)
    except JobError as error:
        print_problems(console(stderr=True), error.problems)
        return EXIT_WRONG_JOB
    if options.time_limit is not None and options.started_at is None:
        job_arguments = [*job_arguments, "--started_at", f"{started_at:.3f}"]
    return run_job(options, launcher, job_arguments)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # before the ranks were started; after that it is a request to save
        say("\nInterrupted; nothing was started.")
        sys.exit(EXIT_FAILED)
