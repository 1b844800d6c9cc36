"""One rank's process: reads the job, trains, and reports how it ended, to its agent and in outcome.json.

A wrong job is refused before torch is imported. What an evaluation's ranks do alike is here, too.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from pipeline.base.command_line import without
from pipeline.base.problems import EXIT_FAILED, EXIT_STOPPED, EXIT_WRONG_JOB, JobError
from pipeline.base.words import after_step
from pipeline.checkpoints.output import space_problems
from pipeline.checkpoints.resume import resume_problems
from pipeline.cluster.agent.rank_link import Inherited, RankLink, connect, split_inherited
from pipeline.cluster.folder_lock import only_job
from pipeline.cluster.launcher_options import start_command
from pipeline.cluster.memory import shortage_of
from pipeline.cluster.outcome import Outcome, record_outcome
from pipeline.cluster.rank_environment import RankEnvironment, read_rank_environment
from pipeline.cluster.world import world_from_environment
from pipeline.job.job import Job
from pipeline.job.options import Options, parse_options
from pipeline.job.report import console, print_problems, problems_text
from pipeline.job.resolve import resolve
from pipeline.job.stop_file import with_stamp
from pipeline.job.world import Host
from pipeline.training.signals import StoppedEarly, StopRequest, end_process

# Takes part in a job: a rank's arguments, its place, what hears signals, its link, what it was given.
Part = Callable[[Sequence[str], RankEnvironment, StopRequest, RankLink, "Inherited | None"], int]


def live(
    part: Part, arguments: Sequence[str], link: RankLink | None = None, inherited: Inherited | None = None
) -> int:
    """One rank's whole life; its exit code.

    Args:
        part: What it does in the job.
        link: Leads to this rank's agent, if it has one.
        inherited: What the launch decided; None without one.
    """
    link = link or RankLink()
    try:
        environment = read_rank_environment()
    except JobError as error:
        print_problems(console(stderr=True), error.problems)
        return EXIT_WRONG_JOB
    with StopRequest(announce=environment.rank == 0, early=True) as stop:
        try:
            return part(arguments, environment, stop, link, inherited)
        except StoppedEarly as request:
            stop.leave(str(request))
            return EXIT_STOPPED


def live_owned(part: Part) -> NoReturn:
    """`live` in the process that an agent has started."""
    inherited, arguments = split_inherited(sys.argv[1:])
    code = live(part, arguments, connect(inherited) if inherited else None, inherited)
    if code == EXIT_FAILED:
        sys.stdout.flush()
        sys.stderr.flush()
        # What waits for a thread or a library may wait for ranks that are gone.
        os._exit(code)
    end_process(code)


PROGRAM = "deepspeed {} pipeline/pretrain.py"
# What launchers put on the command line.
_ADDED = ("--local_rank", "--started_at", "--stop_stamp")


def run_rank(
    arguments: Sequence[str],
    environment: RankEnvironment,
    stop: StopRequest,
    link: RankLink,
    inherited: Inherited | None,
) -> int:
    """Read the job, and take part in it; the exit code.

    Args:
        stop: Hears requests to stop; ends this process at once until ranks have met.
        link: Leads to this rank's agent.
        inherited: What the launch decided; None without one.
    """
    output_dir = None
    try:
        with one_report_per_host(environment):
            options = parse_options(arguments, prog=PROGRAM)
            output_dir = options.output_dir
            options = with_stamp(options, output_dir)
            job = read_job(options, environment, inherited)
            stamp = with_stamp(options, job.output_dir).stop_stamp
            typed = tuple(without(arguments, *_ADDED))
            job = replace(job, stops=replace(job.stops, stamp=stamp), arguments=typed)
        with only_job(job.output_dir) if environment.rank == 0 else contextlib.nullcontext():
            link.folder(job.output_dir)
            link.memory_advice(job.less_memory(None, True))
            stop.leave = partial(_leave_early, job, environment, link)
            return _train(job, environment, stop, link)
    except JobError as error:
        return refuse(error, environment, link, output_dir)
    except Exception as error:  # noqa: BLE001  (as in `_train`: an unreadable folder, a full disk)
        return fail(error, 0, environment, link)


def read_job(options: Options, environment: RankEnvironment, inherited: Inherited | None) -> Job:
    """The job as this rank finds it; every rank comes to the same.

    Raises:
        JobError: with every problem.
    """
    world = world_from_environment(environment)
    if inherited is not None and inherited.hosts:
        # The agent has compared its place with these; hosts may differ in their slots.
        world = replace(world, hosts=tuple(Host(name, slots) for name, slots in inherited.hosts))
        batch, command = inherited.batch, inherited.command
    else:
        batch, command = (), start_command(environment.world_size)
    job = replace(resolve(options, world, batch), command=command)
    problems = [*resume_problems(job), *(space_problems(job) if options.saves else ())]
    if any(problem.severity == "error" for problem in problems):
        raise JobError(problems)
    return job


def _leave_early(job: Job, environment: RankEnvironment, link: RankLink, request: str) -> None:
    """The report of a rank that a signal ends before the ranks have met. Nothing had been trained."""
    message = f"{request} on rank {environment.rank} before the first step"
    record_outcome(job.output_dir, Outcome("stopped", 0, environment.master_port, environment.rank, message))
    link.left_early(message)


def _train(job: Job, environment: RankEnvironment, stop: StopRequest, link: RankLink) -> int:
    os.environ.update(environment.variables())
    from pipeline.training.quiet import quiet_deepspeed

    quiet_deepspeed(environment.rank, job.deepspeed_reports)
    from pipeline.training.run import RunFailed, run

    def record(outcome: Outcome) -> None:
        record_outcome(job.output_dir, replace(outcome, master_port=environment.master_port))

    try:
        return run(job, environment, stop, record, link).exit_code
    except JobError as error:
        return refuse(error, environment, link, job.output_dir)
    except RunFailed as failure:
        return fail(failure.error, failure.step, environment, link, job.output_dir, job.less_memory)
    except Exception as error:  # noqa: BLE001  (reported, recorded, and the exit code is 1)
        return fail(error, 0, environment, link, job.output_dir, job.less_memory)


def fail(
    error: Exception,
    step: int,
    environment: RankEnvironment,
    link: RankLink,
    output_dir: str | None = None,
    less_memory: Callable[[int | None, bool], str] | None = None,
) -> int:
    """Say it here and now: a launcher ends the other ranks when one is gone. `less_memory`: of the job."""
    trace = "".join(traceback.format_exception(error))
    message = f"{type(error).__name__}: {error}"
    if (shortage := shortage_of(error)) is not None:
        advice = less_memory(shortage.missing, shortage.on_host) if less_memory is not None else ""
        message = f"{shortage}. {advice}".rstrip()
    if link.has_agent:  # which reports the first failure to the console, and writes the outcome
        link.failed(error, step, trace, message)
        return EXIT_FAILED
    said = f"rank {environment.rank} failed {after_step(step)}: {message}"
    print(f"{said}\n{trace}", file=sys.stderr, flush=True)
    if output_dir is not None:
        outcome = Outcome("failed", step, environment.master_port, environment.rank, message)
        record_outcome(output_dir, outcome)
    return EXIT_FAILED


def refuse(
    error: JobError, environment: RankEnvironment, link: RankLink, output_dir: str | None = None
) -> int:
    """Say what is wrong with the job."""
    if link.has_agent:
        link.refused(problems_text(error.problems))
    elif environment.local_rank == 0:
        print_problems(console(stderr=True), error.problems)
    # A folder that the job may not have is not written to, nor is one made for a job that is none.
    may_write = output_dir is not None and Path(output_dir).is_dir() and not _concerns_folder(error)
    if environment.local_rank == 0 and may_write:
        record_outcome(output_dir, Outcome("wrong_job", 0, environment.master_port, environment.rank))
    return EXIT_WRONG_JOB


def _concerns_folder(error: JobError) -> bool:
    return any(problem.key == "output_dir" for problem in error.problems)


@contextlib.contextmanager
def one_report_per_host(environment: RankEnvironment) -> Iterator[None]:
    """The ranks of a host find the same problems; another host may lack a file that this one has."""
    if environment.local_rank == 0:
        yield
        return
    with (
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stderr(nowhere),
        contextlib.redirect_stdout(nowhere),
    ):
        yield
