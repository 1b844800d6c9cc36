"""``python -m pipeline.check [options]``: everything that can be known before a rank starts. No torch.

Takes the options of ``./launch.sh``. Exit code 0 if the job can start, 2 with every problem if it cannot.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from pipeline.base.command import reader_may_leave, run_command
from pipeline.base.problems import EXIT_FINISHED, EXIT_WRONG_JOB, JobError, Problem
from pipeline.checkpoints.resume import examine_resume
from pipeline.checkpoints.space import checkpoint_bytes, space_problems
from pipeline.cluster.deepspeed_env import deepspeed_env
from pipeline.cluster.launcher_options import (
    LauncherOptions,
    launcher_parser,
    launcher_problems,
    split_arguments,
)
from pipeline.cluster.rank_environment import free_port
from pipeline.cluster.running import running_problems
from pipeline.cluster.world import World, resolve_world
from pipeline.job.options import CheckOptions, Options, parse_options
from pipeline.job.report import console, describe, print_problems, verdict
from pipeline.job.resolve import Draft, examine
from pipeline.launch.environment import environment_problems, examine_environment, training_devices
from pipeline.launch.environment_table import environment_table
from pipeline.launch.fewer_hosts import separate_folders
from pipeline.launch.host_check.host_check import HostCheck, ask_job_hosts, way_to
from pipeline.launch.host_check.table import hosts_table
from pipeline.launch.launcher_command import SCRIPT
from pipeline.launch.launcher_rules import launcher_world_problems, start_problems, unused_problems
from pipeline.launch.network_test.network_test import run_fabric_test
from pipeline.launch.network_test.report import fabric_problems, fabric_tables

PROGRAM = "python -m pipeline.check"
O = TypeVar("O", bound=Options)  # noqa: E741


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the job and its problems; the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        launcher, options, _ = read_arguments(arguments, CheckOptions, PROGRAM)
    except JobError as error:
        print_problems(console(stderr=True), error.problems)
        return EXIT_WRONG_JOB
    if problems := _conflicts(options, arguments):
        print_problems(console(stderr=True), problems)
        return EXIT_WRONG_JOB
    if options.environment:
        return check_environment()
    draft = check(options, launcher, options.world_size)
    if (options.hosts or options.fabric) and draft.world is not None:
        draft, found = check_with_hosts(draft, launcher)
        console().print(hosts_table(found))
        if options.fabric:
            draft.problems += check_links(found, launcher)
    if draft.job is not None and options.world_size is None and launcher.is_first_host:
        draft.problems += running_problems(draft.job.output_dir)
    if draft.errors:
        draft.job = None
    print_draft(draft)
    return EXIT_FINISHED if draft.job is not None else EXIT_WRONG_JOB


def _conflicts(options: CheckOptions, arguments: Sequence[str]) -> list[Problem]:
    """Things to look at that exclude each other."""
    problems = []
    for name in ("hosts", "fabric"):
        if getattr(options, name) and options.world_size is not None:
            rule = "has nobody to ask: --world_size describes ranks on paper"
            problems.append(Problem(name, True, rule, "Leave one of them out"))
    others = [word for word in arguments if word != "--environment"]
    if options.environment and others:
        rule = f"looks at this machine alone, and at no job; {others[0]} asks for more"
        problems.append(Problem("environment", True, rule, "Leave one of them out"))
    return problems


def read_arguments(
    arguments: Sequence[str], kind: type[O], program: str
) -> tuple[LauncherOptions, O, list[str]]:
    """The launcher's options, the job's, and those of the arguments that are the job's.

    Raises:
        SystemExit: code 2 after a message for an option that does not exist or a value of the wrong type;
            code 0 after --help, which shows both halves.
        JobError: a --config file that cannot be used, or --data without a path.
    """
    if "--help" in arguments or "-h" in arguments:
        with reader_may_leave():
            launcher_parser(program).print_help()
            print("\njob options:\n", flush=True)
            parse_options(["--help"], kind, program)  # ends this process
    launcher, job_arguments = split_arguments(arguments, program)
    return launcher, parse_options(job_arguments, kind, program), job_arguments


def check(
    options: Options,
    launcher: LauncherOptions,
    world_size: int | None = None,
    world: World | None = None,
    batch: Sequence[int] = (),
) -> Draft:
    """Everything that can be known of a job, with all its problems: those of the launcher's options, the
    world, the job, and the checkpoint it would resume from. `world` is used instead of resolving one, and
    `batch` as in `examine`."""
    filters = (launcher.include, launcher.exclude, launcher.num_nodes, launcher.num_gpus)
    try:
        world = world or resolve_world(launcher.hostfile, *filters, world_size)
        draft = examine(options, world, batch=batch)
    except JobError as error:
        draft = examine(options, None, error.problems)
    draft.problems += launcher_problems(launcher)
    draft.problems += deepspeed_env(Path.home(), Path.cwd(), os.environ, launcher.launcher)[1]
    if draft.world is not None:
        draft.problems += launcher_world_problems(launcher, draft.world)
        if not batch:  # what a part of the hosts does not need, the whole job may
            draft.problems += unused_problems(launcher, draft.world)
        paths = {"current folder": str(Path.cwd()), "python": sys.executable, "project": str(SCRIPT)}
        draft.problems += start_problems(launcher, draft.world, paths, os.environ)
    if draft.job is not None:
        resumption = examine_resume(draft.job)
        draft.problems += resumption.problems
        if world_size is None and draft.job.world.is_local:
            draft.problems += [replace(problem, severity="warning") for problem in space_problems(draft.job)]
        draft.resume = resumption.lines
    if draft.errors:
        draft.job = None
    return draft


def can_ask_hosts(draft: Draft, launcher: LauncherOptions) -> bool:
    """Whether a start goes to other hosts, and the user has nothing against looking there first."""
    elsewhere = draft.world is not None and not draft.world.is_local
    return elsewhere and not launcher.no_ssh and not launcher.no_ssh_check


def check_with_hosts(draft: Draft, launcher: LauncherOptions) -> tuple[Draft, HostCheck]:
    """The draft again, for the devices that its hosts turn out to have, with the problems of the hosts."""
    asked = ask_job_hosts(draft.world, launcher, draft.options)
    draft = check(draft.options, launcher, world=asked.world)
    found = asked.judge(checkpoint_bytes(draft.job) if draft.job is not None else 0)
    draft.problems += [each.problem for each in found.problems]
    draft.problems += separate_folders(launcher, found.file_systems)
    if draft.errors:
        draft.job = None
    return draft, found


def check_links(found: HostCheck, launcher: LauncherOptions) -> list[Problem]:
    """Try every link between the ranks' devices, show the bandwidths, and say what is wrong with them."""
    if found.errors:
        console().print("The links between hosts are tried when the hosts have no error.")
        return []
    tested = run_fabric_test(
        found.world, way_to(found.world, launcher), found.addresses,
        launcher.master_port or found.port or free_port(), found.exported,
    )  # fmt: skip
    console().print(*fabric_tables(tested), sep="\n")
    return fabric_problems(tested)


def check_environment() -> int:
    """Print what this machine has and lacks; the exit code: whether it can train at all."""
    found = examine_environment()
    problems = environment_problems(found)
    out = console()
    out.print(environment_table(found))
    print_problems(out, problems)
    devices = training_devices(found, problems)
    if devices is None:
        out.print("This machine cannot train as it is.", style="bold red")
        return EXIT_WRONG_JOB
    out.print(f"This machine can train: {devices}.", style="bold green")
    return EXIT_FINISHED


def print_draft(draft: Draft, stderr: bool = False) -> None:
    """What is known of the job, what is wrong with it, and whether it can start."""
    out = console(stderr)
    out.print(describe(draft))
    if draft.options.print_config and draft.job is not None:
        print(json.dumps(draft.job.deepspeed, indent=2))
    print_problems(out, draft.problems)
    out.print(verdict(draft))


if __name__ == "__main__":
    run_command(main)
