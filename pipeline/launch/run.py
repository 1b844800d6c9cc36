"""One start of the launcher, and the exit code that the job's own word gives it."""

from __future__ import annotations

import contextlib
import signal
from dataclasses import dataclass
from pathlib import Path

from pipeline.base.problems import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, EXIT_WRONG_JOB
from pipeline.cluster.agent.coordinator import Coordinator
from pipeline.cluster.agent.rank_table import Verdict, signal_name
from pipeline.cluster.outcome import Outcome, clear_outcome, read_outcome, write_outcome
from pipeline.launch.launcher_command import Launch
from pipeline.launch.launcher_process import Ended, LauncherProcess, say


@dataclass(frozen=True)
class Result:
    """How one start ended.

    Attributes:
        code: The documented exit code.
        verdict: What the coordinator heard; None without a coordinator, or where no rank was reached.
        stopped: The user has asked for the end.
    """

    code: int
    verdict: Verdict | None = None
    stopped: bool = False


def run_launch(
    launch: Launch,
    output_dir: str | Path,
    stop_timeout: float,
    coordinator: Coordinator | None = None,
    is_first_host: bool = True,
) -> Result:
    """Start, wait, and tell how it ended.

    With a coordinator the ranks say it to the coordinator, whatever hosts they are on. With a launch on each
    host they say it in the output folder; only the first forgets the word of an earlier start then, because
    the others may come after a word of this one.
    """
    if is_first_host:
        clear_outcome(output_dir)
    ended = LauncherProcess(stop_timeout, say, coordinator).run(launch.command, launch.environment)
    verdict = coordinator.verdict if coordinator is not None else None
    if coordinator is None:
        outcome = read_outcome(output_dir, launch.master_port)
    else:
        port = coordinator.master[1] if coordinator.master else launch.master_port
        outcome = verdict.outcome(port) if verdict is not None else None
        _keep(outcome, output_dir)
    code = conclude(outcome, ended, says_by_code=coordinator is None)
    return Result(code, verdict, ended.stopped_by is not None)


def _keep(outcome: Outcome | None, output_dir: str | Path) -> None:
    """The first host has it in its folder, unless that host is gone. A folder that the job was refused, or
    that this machine does not share, is not written to."""
    if outcome is None or outcome.status == "wrong_job" or not Path(output_dir).is_dir():
        return
    with contextlib.suppress(OSError):  # a full disk: the exit code and the last line say it, too
        write_outcome(output_dir, outcome, is_verdict=True)


def conclude(outcome: Outcome | None, ended: Ended, says_by_code: bool = False) -> int:
    """The exit code, after a line about anything but success: 0 only where the job says it finished.

    `says_by_code`: no coordinator hears the agents of this host, which leave with the code for a wrong job
    where ranks had no output folder yet to say it in.
    """
    # Agents leave with that code, too, where ranks had no output folder yet to say it in.
    early = ended.before_ranks or ended.return_code == EXIT_STOPPED
    if outcome is None and early and not ended.killed and ended.stopped_by is not None:
        say(f"Stopped before the first step ({ended.stopped_by.name}): this start had nothing to save.")
        return EXIT_STOPPED
    if outcome is None and says_by_code and ended.return_code == EXIT_WRONG_JOB and not ended.killed:
        say("The job was refused before the first step, for the reason above.")
        return EXIT_WRONG_JOB
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
        return f"its launcher was killed by {signal_name(-ended.return_code)}"
    # The launcher exits with its rank's negative code for a signal, of which eight bits arrive.
    if ended.return_code > 256 - signal.NSIG:
        return f"a rank was killed by {signal_name(256 - ended.return_code)}"
    return f"its launcher returned {ended.return_code}"
