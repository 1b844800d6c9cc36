"""``./launch.sh`` behind the set-up: check the job, start it with the deepspeed launcher, tell how it ended.

arguments ─┬─ launcher options ── world ─┬─ job, checked ── command ── launcher ── outcome ── exit code
           └─ job options ───────────────┘
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

if __name__ == "__main__":
    # A script's own folder comes first on sys.path; the package is two above.
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from pipeline.base.command import leave_at_stop, take_stop_signals

    take_stop_signals(leave_at_stop)

from pipeline.base.command import run_command, say, show_messages, take_stop_signals
from pipeline.base.problems import EXIT_STOPPED, EXIT_WRONG_JOB, JobError
from pipeline.job.options import Options
from pipeline.job.report import console, print_problems
from pipeline.launch.launcher_command import launch_program
from pipeline.launch.preflight import read_arguments
from pipeline.launch.restart_loop import run_job

PROGRAM = "./launch.sh"


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, start, wait. Returns the documented exit code."""
    started_at = time.time()
    show_messages(say, "pipeline.cluster.agent")  # what the coordinator logs
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        launcher, options, job_arguments = read_arguments(arguments, Options, PROGRAM)
    except JobError as error:
        print_problems(console(stderr=True), error.problems)
        return EXIT_WRONG_JOB
    if options.time_limit is not None and options.started_at is None:
        job_arguments = [*job_arguments, "--started_at", f"{started_at:.3f}"]
    return run_job(options, launcher, job_arguments, [launch_program(), *arguments])


def _interrupt(number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


if __name__ == "__main__":
    take_stop_signals(_interrupt)
    try:
        run_command(main)
    except KeyboardInterrupt as interrupt:  # while ranks run, it is a request to them
        say(f"\nStopped by {interrupt} while no rank was running.")
        sys.exit(EXIT_STOPPED)
