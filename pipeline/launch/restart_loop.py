"""A job from its first start to its last: each start is checked, and a failure may be followed by another."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from pipeline.base.problems import EXIT_FAILED, EXIT_STOPPED, EXIT_WRONG_JOB, JobError
from pipeline.checkpoints.manifest import Checkpoint
from pipeline.checkpoints.resume import select_checkpoint
from pipeline.cluster.agent.coordinator_settings import Limits
from pipeline.cluster.folder_lock import running_problems
from pipeline.cluster.launcher_options import LauncherOptions
from pipeline.job.job import Job
from pipeline.job.options import Options
from pipeline.job.report import console, print_problems
from pipeline.job.resolve import Draft
from pipeline.job.stop_file import with_stamp
from pipeline.launch.fewer_hosts import Plan, describe, describe_return, on_hosts, plan_fewer
from pipeline.launch.host_check.host_check import HostCheck
from pipeline.launch.host_check.reach import NoWay
from pipeline.launch.host_check.table import hosts_line, hosts_table
from pipeline.launch.launcher_process import say
from pipeline.launch.preflight import can_ask_hosts, check, check_with_hosts, print_draft
from pipeline.launch.restarts import RestartPolicy, resuming
from pipeline.launch.run import Result
from pipeline.launch.start import start_once

# A file system forgets the lock of a client that has vanished after about 90 s (NFS).
_LOCK_SECONDS = 120.0


@dataclass(frozen=True)
class Ready:
    """A start that nothing stands in the way of.

    Attributes:
        launcher: Describes exactly these hosts.
        batch: Sizes in place of the JSON's; empty for the JSON's own.
        hostfile: Kept open for as long as the launcher may read it.
    """

    job: Job
    launcher: LauncherOptions
    batch: tuple[int, ...] = ()
    hostfile: IO[bytes] | None = None


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
        result = _start(ready, arguments)
        try:
            following = _next_start(ready, result, policy, options, launcher)
        except KeyboardInterrupt as request:
            say(f"\nStopped by {request} between two starts: no rank is running.")
            tell_how_to_go_on(ready.job, policy.saved, command)
            return EXIT_STOPPED
        if following is None:
            saved = result.verdict is not None and result.verdict.saved is not None
            if result.code == EXIT_FAILED or (result.code == EXIT_STOPPED and not saved):
                tell_how_to_go_on(ready.job, policy.saved, command)
            return result.code
        if policy.saved is not None:
            options, arguments = replace(options, resume="auto"), resuming(arguments)
        if text := describe_return(ready.job, following.job):
            say(text)
        ready = following


def _next_start(
    ready: Ready, result: Result, policy: RestartPolicy, options: Options, launcher: LauncherOptions
) -> Ready | None:
    """Wait for the next start and check it, more than once where hosts are still away; None, after the
    reason, if there is none.

    Raises:
        KeyboardInterrupt: somebody has asked for the end meanwhile.
    """
    decision = policy.after(result.code, result.verdict, result.stopped)
    while decision.restart:
        delay = _delay(decision.delay, result, launcher)
        say(f"Starting again in {delay:.0f} s ({decision.reason}). Ctrl-C: no further start.")
        _wait(delay, ready.job.output_dir)
        resumed = options if policy.saved is None else replace(options, resume="auto")
        following = prepare(resumed, launcher, again=True)
        if following is not None:
            return following
        decision = policy.after(EXIT_FAILED, None, stopped=False)
    if decision.reason:
        say(f"{decision.reason.capitalize()}.")
    return None


def tell_how_to_go_on(job: Job, saved: int | None, command: Sequence[str]) -> None:
    """After a failure, or a stop that has saved nothing: the command that goes on from the newest checkpoint,
    or from the one that it names, where there is one.

    Args:
        saved: Step of the newest one that a start has completed, where this machine may not see it.
    """
    found = _selected(job, "auto")
    named = None if saved is not None or job.options.resume in ("auto", "never") else job.options.resume
    if named is not None and (found is None or found.path.resolve() != Path(named).resolve()):
        found = _selected(job, named)  # no start has come so far as to note it for the next one
    else:
        named = None
    step = found.state.step if found is not None else saved
    if step is None:
        return
    given = any(word == "--resume" or word.startswith("--resume=") for word in command)
    again = shlex.join(resuming(command) if given and named is None else command)
    say(f"To go on from the checkpoint of step {step}: {again}")


def _selected(job: Job, resume: str) -> Checkpoint | None:
    """What the job goes on from with that ``--resume``; None where there is nothing, or nothing usable."""
    try:
        return select_checkpoint(replace(job, options=replace(job.options, resume=resume))).checkpoint
    except JobError:
        return None


def prepare(options: Options, launcher: LauncherOptions, again: bool = False) -> Ready | None:
    """Check the job and its hosts, and say what was found; None where it cannot start.

    `again`: what has been printed before the first start is not repeated.
    """
    draft = check(options, launcher)
    ready = None
    if can_ask_hosts(draft, launcher):
        draft, found = check_with_hosts(draft, launcher)
        console(stderr=True).print(hosts_table(found) if found.problems else hosts_line(found))
        if draft.job is None and launcher.allow_fewer_hosts is not None:
            ready = _on_fewer_hosts(draft, found, launcher)
    if ready is not None:
        # The hosts they concern are left out, so that they refuse nothing.
        print_problems(console(stderr=True), [replace(each, severity="warning") for each in draft.problems])
        return ready
    if again and draft.job is None:
        print_problems(console(stderr=True), draft.problems)
    elif not again and (draft.job is None or launcher.is_first_host):
        print_draft(draft, stderr=draft.job is None)
    return None if draft.job is None else _ready(draft.job, launcher)


def _ready(job: Job, launcher: LauncherOptions) -> Ready:
    """The launcher is handed what the filters leave, and not the filters: it does not find ``user@host`` by
    them. srun takes its hosts from the filter, and knows no users. Nor does another process find the file
    that is standard input here."""
    of_this_process = (launcher.hostfile or "").startswith(("/dev/", "/proc/"))
    filters = (launcher.include or launcher.exclude) and launcher.launcher != "slurm"
    if job.world.hostfile is None or not (filters or of_this_process):
        return Ready(job, launcher)
    exact, world, hostfile = on_hosts(launcher, job.world)
    return Ready(replace(job, world=world), exact, hostfile=hostfile)


def _on_fewer_hosts(draft: Draft, found: HostCheck, launcher: LauncherOptions) -> Ready | None:
    """The job without the hosts that fail their check; None, with the reasons in the draft, where it cannot
    be."""
    options = draft.options
    whole = check(options, launcher, world=found.world)
    bad = sorted({name for each in found.errors for name in each.hosts})
    if whole.job is None or not bad:
        return None
    least = launcher.allow_fewer_hosts or 1

    def on(world: object, batch: tuple[int, ...]) -> Draft:
        return check(options, launcher, world=world, batch=batch)  # type: ignore[arg-type]

    plan = plan_fewer(whole.job, found.usable, least, on)
    if not isinstance(plan, Plan):
        draft.problems += plan
        return None
    reasons = "; ".join(dict.fromkeys(each.problem.rule for each in found.errors if each.hosts))
    say(describe(whole.job, plan, reasons))
    exact, world, hostfile = on_hosts(launcher, plan.job.world)
    return Ready(replace(plan.job, world=world), exact, plan.batch, hostfile)


def _start(ready: Ready, arguments: Sequence[str]) -> Result:
    try:
        return start_once(ready.job.world, ready.job.output_dir, ready.launcher, arguments, ready.batch)
    except NoWay as error:
        say(f"error: {error}")
        return Result(EXIT_FAILED)


def _delay(seconds: float, result: Result, launcher: LauncherOptions) -> float:
    """Ranks on a host that is cut off end at the same time as this launch gives the host up, or a little
    later."""
    if result.verdict is None or not result.verdict.lost_hosts:
        return seconds
    limits = Limits.of(launcher.failure_timeout)
    return max(seconds, limits.grace + 2 * limits.beat)


def _wait(seconds: float, output_dir: str) -> None:
    """Wait, and then until nothing holds the folder any more."""
    time.sleep(seconds)
    deadline = time.monotonic() + _LOCK_SECONDS
    while running_problems(output_dir) and time.monotonic() < deadline:
        time.sleep(1.0)
