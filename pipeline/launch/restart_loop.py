"""A job from its first start to its last: each start is checked, and a failure may be followed by another.

A restart costs a start-up and the steps since the last checkpoint, so it must lead somewhere: every restart
counts until the job has completed a checkpoint that it did not have before, and a failure that comes back at
the same step is not a matter of luck.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.base.command import say
from pipeline.base.command_line import without
from pipeline.base.problems import EXIT_STOPPED, EXIT_WRONG_JOB, JobError
from pipeline.base.words import after_step, counted
from pipeline.checkpoints.manifest import Checkpoint
from pipeline.checkpoints.resume import select_checkpoint
from pipeline.cluster.agent.launch_spec import Limits
from pipeline.cluster.folder_lock import running_problems
from pipeline.cluster.launcher_options import LauncherOptions
from pipeline.cluster.outcome import Failure, Outcome
from pipeline.hugging_face.folder_files import is_hub_name
from pipeline.job.job import Job
from pipeline.job.options import Options
from pipeline.job.report import console, print_problems
from pipeline.job.stop_file import with_stamp
from pipeline.launch.fewer_hosts import describe_return
from pipeline.launch.host_check.host_check import NoAddress
from pipeline.launch.preflight import Ready, prepare
from pipeline.launch.start import start_once

# A file system forgets the lock of a client that has vanished after about 90 s (NFS).
_LOCK_SECONDS = 120.0
FIRST_DELAY = 5.0
LONGEST_DELAY = 300.0
# Failures that a rank makes by itself. Hosts and launchers come and go.
_OWN = ("error", "died", "hung")


def run_job(
    options: Options, launcher: LauncherOptions, arguments: Sequence[str], command: Sequence[str]
) -> int:
    """Check, start, and start again as often as was asked for; the documented exit code of the last start.

    Args:
        arguments: The job's command line, of which `options` were read.
        command: The whole command, as the user gave it.
    """
    options = with_stamp(options, options.output_dir)  # before hosts are asked, which takes seconds
    ready = prepare(options, launcher)
    if ready is None:
        return EXIT_WRONG_JOB
    options = with_stamp(options, ready.job.output_dir)
    arguments = [*arguments, "--stop_stamp", str(options.stop_stamp)]
    # On another host than the first, the job that runs in the folder may be this one.
    if launcher.is_first_host and (problems := running_problems(ready.job.output_dir)):
        print_problems(console(stderr=True), problems)
        return EXIT_WRONG_JOB
    policy = RestartPolicy(launcher.max_restarts)
    while True:
        outcome = _start(ready, arguments)
        try:
            following = _next_start(ready, outcome, policy, options, launcher)
        except KeyboardInterrupt as request:
            say(f"\nStopped by {request} between two starts: no rank is running.")
            say_how_to_resume(ready.job, policy.saved, command)
            return EXIT_STOPPED
        if following is None:
            if outcome.status == "failed" or (outcome.status == "stopped" and outcome.saved is None):
                say_how_to_resume(ready.job, policy.saved, command)
            return outcome.exit_code
        if policy.saved is not None:
            options, arguments = replace(options, resume="auto"), resuming(arguments)
        if text := describe_return(ready.job, following.job):
            say(text)
        ready = following


def _next_start(
    ready: Ready, outcome: Outcome, policy: RestartPolicy, options: Options, launcher: LauncherOptions
) -> Ready | None:
    """Wait for the next start and check it, more than once where hosts are still away; None, after the
    reason, if there is none.

    Raises:
        KeyboardInterrupt: somebody has asked for the end meanwhile.
    """
    decision = policy.after(outcome)
    while decision.restart:
        delay = _delay(decision.delay, outcome, launcher)
        say(f"Starting again in {delay:.0f} s ({decision.reason}). Ctrl-C: no further start.")
        _wait(delay, ready.job.output_dir)
        resumed = options if policy.saved is None else replace(options, resume="auto")
        following = prepare(resumed, launcher, again=True)
        if following is not None:
            return following
        decision = policy.after(Outcome("failed", 0))
    if decision.reason:
        say(f"{decision.reason.capitalize()}.")
    return None


def say_how_to_resume(job: Job, saved: int | None, command: Sequence[str]) -> None:
    """After a failure, or a stop that has saved nothing: the command that resumes from the newest checkpoint,
    or from the one that it names, where there is one.

    Args:
        saved: Step of the newest one that a start has completed, where this machine may not see it.
    """
    found = _selected(job, "auto")
    named = None if saved is not None or job.resume in ("auto", "never") else job.resume
    if named is not None and (found is None or found.path.resolve() != Path(named).resolve()):
        found = _selected(job, named)  # no start has come so far as to note it for the next one
    else:
        named = None
    step = found.state.step if found is not None else saved
    if step is None:
        return
    given = any(word == "--resume" or word.startswith("--resume=") for word in command)
    again = shlex.join(resuming(command) if given and named is None else command)
    say(f"To resume from the checkpoint of step {step}: {again}")


def _selected(job: Job, resume: str) -> Checkpoint | None:
    """What the job resumes from with that ``--resume``; None where there is nothing, or nothing usable."""
    try:
        return select_checkpoint(replace(job, resume=resume)).checkpoint
    except JobError:
        return None


def with_commits(arguments: Sequence[str], options: Options) -> list[str]:
    """A job's arguments with hub:NAME as the check has found it, hub:NAME@COMMIT: all hosts read the same."""
    found = {f"--{key}": getattr(options, key) for key in ("model", "tokenizer")}
    named = {option: name for option, name in found.items() if is_hub_name(name)}
    return [*without(arguments, *named), *(word for pair in named.items() for word in pair)]


def _start(ready: Ready, arguments: Sequence[str]) -> Outcome:
    job = ready.job
    arguments = with_commits(arguments, job.options)
    try:
        return start_once(job.world, job.output_dir, ready.launcher, arguments, ready.batch, ready.inquiry)
    except NoAddress as error:
        say(f"error: {error}")
        return Outcome("failed", 0)


def _delay(seconds: float, outcome: Outcome, launcher: LauncherOptions) -> float:
    """Ranks on a host that is cut off end at the same time as this launch gives the host up, or a little
    later."""
    if not outcome.lost_hosts:
        return seconds
    limits = Limits.of(launcher.failure_timeout)
    return max(seconds, limits.grace + 2 * limits.beat)


def _wait(seconds: float, output_dir: str) -> None:
    """Wait, and then until nothing holds the folder any more."""
    time.sleep(seconds)
    deadline = time.monotonic() + _LOCK_SECONDS
    while running_problems(output_dir) and time.monotonic() < deadline:
        time.sleep(1.0)


@dataclass(frozen=True)
class RestartDecision:
    """What follows a failure.

    Attributes:
        restart: Whether to start again.
        delay: Seconds to wait before that.
        reason: Why not, or which restart it is.
    """

    restart: bool
    delay: float = 0.0
    reason: str = ""


class RestartPolicy:
    """Decides after each start.

    Args:
        max_restarts: Restarts in a row that may pass without a new checkpoint; 0: no restarts.
    """

    def __init__(self, max_restarts: int) -> None:
        self._max = max_restarts
        self._in_vain = 0
        self._saved: int | None = None
        self._last: tuple[str, int, str] | None = None

    @property
    def saved(self) -> int | None:
        """Step of the newest checkpoint that any of the starts has completed; None if none has."""
        return self._saved

    def after(self, outcome: Outcome) -> RestartDecision:
        """What follows a start that ended so."""
        if self._max == 0 or outcome.status != "failed":
            return RestartDecision(False)
        if outcome.on_request:
            return RestartDecision(False, reason="not started again: it was asked to end")
        progress = self._has_new_checkpoint(outcome.saved)
        failure = outcome.failure
        same = failure is not None and _key(failure) == self._last and not progress
        self._last = _key(failure) if failure is not None and failure.kind in _OWN else None
        if same and failure is not None:
            return RestartDecision(
                False,
                reason=f"not started again: the same failure {after_step(failure.step)}, twice in a row",
            )
        self._in_vain = 1 if progress else self._in_vain + 1
        if self._in_vain > self._max:
            have = "has" if self._max == 1 else "have"
            what = f"{counted(self._max, 'restart')} {have} brought no new checkpoint"
            return RestartDecision(False, reason=f"not started again: {what}")
        delay = min(LONGEST_DELAY, FIRST_DELAY * 2 ** (self._in_vain - 1))
        return RestartDecision(
            True, delay, f"restart {self._in_vain} of {self._max} since the last new checkpoint"
        )

    def _has_new_checkpoint(self, saved: int | None) -> bool:
        """Whether the start has completed a checkpoint that there was not before."""
        if saved is None or (self._saved is not None and saved <= self._saved):
            return False
        self._saved = saved
        return True


def _key(failure: Failure) -> tuple[str, int, str]:
    return failure.kind, failure.step, failure.message


def resuming(arguments: Sequence[str]) -> list[str]:
    """A job's arguments, to resume from the newest checkpoint in its folder."""
    return [*without(arguments, "--resume"), "--resume", "auto"]
