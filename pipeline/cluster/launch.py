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

from pipeline.check import can_ask_hosts, check, check_with_hosts, print_draft, read_arguments
from pipeline.cluster.hosts.table import hosts_line, hosts_table
from pipeline.cluster.running import running_problems
from pipeline.cluster.start import start_job
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
    draft = check(options, launcher)
    if can_ask_hosts(draft, launcher):
        draft, found = check_with_hosts(draft, launcher)
        console(stderr=True).print(hosts_table(found) if found.problems else hosts_line(found))
    if launcher.is_first_host or draft.job is None:
        print_draft(draft, stderr=draft.job is None)
    if draft.job is None:
        return EXIT_WRONG_JOB
    # On another host than the first, the job that runs in the folder may be this one.
    if launcher.is_first_host and (problems := running_problems(draft.job.output_dir)):
        print_problems(console(stderr=True), problems)
        return EXIT_WRONG_JOB
    if options.time_limit is not None and options.started_at is None:
        job_arguments = [*job_arguments, "--started_at", f"{started_at:.3f}"]
    return start_job(draft.job, launcher, job_arguments)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # before the ranks were started; after that it is a request to save
        say("\nInterrupted; nothing was started.")
        sys.exit(EXIT_FAILED)
