"""One start of the launcher, and the exit code that the job's own word gives it."""

from __future__ import annotations

import signal
from pathlib import Path

from pipeline.cluster.launcher_command import Launch
from pipeline.cluster.outcome import Outcome, clear_outcome, read_outcome
from pipeline.cluster.supervise import Ended, Supervisor, say
from pipeline.job.problems import EXIT_FAILED, EXIT_FINISHED


def run_launch(
    launch: Launch, output_dir: str | Path, stop_timeout: float, is_first_host: bool = True
) -> int:
    """Start, wait, and return the exit code that the job's own word gives.

    With a launch on each host, only the first forgets the word of an earlier start: the others may come after
    a word of this one.
    """
    if is_first_host:
        clear_outcome(output_dir)
    ended = Supervisor(stop_timeout, say).run(launch.command, launch.environment)
    return conclude(read_outcome(output_dir, launch.master_port), ended)


def conclude(outcome: Outcome | None, ended: Ended) -> int:
    """The exit code, after a line about anything but success: 0 only where the job says it finished."""
    if outcome is None:
        say(f"The job ended without a word: {_describe(ended)}. Nothing was saved since the last checkpoint.")
        return EXIT_FAILED
    if outcome.exit_code == EXIT_FINISHED and ended.return_code != 0:
        say(f"The job finished, then its launcher failed: {_describe(ended)}.")
    elif outcome.exit_code != EXIT_FINISHED:
        reason = f": {outcome.message}" if outcome.message else ""
        status = outcome.status.replace("_", " ")
        say(f"{status.capitalize()} after step {outcome.step} (rank {outcome.rank}){reason}")
    return outcome.exit_code


def _describe(ended: Ended) -> str:
    if ended.stopped_by is not None:
        return f"{ended.stopped_by.name} {'and then a kill' if ended.killed else 'before it could save'}"
    if ended.return_code < 0:
        return f"its launcher was killed by {_signal_name(-ended.return_code)}"
    # The launcher exits with its rank's negative code for a signal, of which eight bits arrive.
    if ended.return_code > 256 - signal.NSIG:
        return f"a rank was killed by {_signal_name(256 - ended.return_code)}"
    return f"its launcher returned {ended.return_code}"


def _signal_name(number: int) -> str:
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    # Nobody else sends it unasked: the kernel does when memory runs out.
    return f"{name} (out of memory?)" if number == signal.SIGKILL else name
