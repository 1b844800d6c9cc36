"""``python -m pipeline.check [options]``: everything that can be known before a rank starts. No torch.

Takes the options of ``./launch.sh``. Exit code 0 if the job can start, 2 with every problem if it cannot.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pipeline.base.command import run_command
from pipeline.base.problems import EXIT_FINISHED, EXIT_WRONG_JOB, JobError, Problem
from pipeline.cluster.folder_lock import running_problems
from pipeline.cluster.launcher_options import (
    LauncherOptions,
)
from pipeline.cluster.rank_environment import free_port
from pipeline.cluster.world import Paper
from pipeline.job.options import CheckOptions
from pipeline.job.report import console, print_problems
from pipeline.launch.environment import (
    environment_problems,
    environment_table,
    examine_environment,
    training_devices,
)
from pipeline.launch.host_check.host_check import HostCheck, hosts_table, shell_for
from pipeline.launch.network_test.network_test import run_network_test
from pipeline.launch.network_test.report import network_problems, network_tables
from pipeline.launch.preflight import check, check_with_hosts, print_draft, read_arguments

PROGRAM = "python -m pipeline.check"


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
    paper = Paper(options.world_size, options.hosts_like, options.device)
    draft = check(options, launcher, paper)
    if (options.hosts or options.fabric) and draft.world is not None:
        draft, found = check_with_hosts(draft, launcher)
        console().print(hosts_table(found))
        if options.fabric:
            draft.problems += check_links(found, launcher)
    if draft.job is not None and not paper.has_ranks and launcher.is_first_host:
        draft.problems += running_problems(draft.job.output_dir)
    if draft.errors:
        draft.job = None
    print_draft(draft)
    return EXIT_FINISHED if draft.job is not None else EXIT_WRONG_JOB


def _conflicts(options: CheckOptions, arguments: Sequence[str]) -> list[Problem]:
    """Things to look at that exclude each other."""
    problems = []
    told = [name for name in ("world_size", "hosts_like", "device") if getattr(options, name) is not None]
    for name in ("hosts", "fabric"):
        if getattr(options, name) and told:
            rule = f"asks hosts, and --{told[0]} describes ranks without any"
            problems.append(Problem(name, True, rule, "Leave one of them out"))
    others = [word for word in arguments if word != "--environment"]
    if options.environment and others:
        rule = f"looks at this machine alone, and at no job; {others[0]} asks for more"
        problems.append(Problem("environment", True, rule, "Leave one of them out"))
    return problems


def check_links(found: HostCheck, launcher: LauncherOptions) -> list[Problem]:
    """Try every link between the ranks' devices, show the bandwidths, and say what is wrong with them."""
    if found.errors:
        console().print("The links between hosts are tried when the hosts have no error.")
        return []
    tested = run_network_test(
        found.world, shell_for(found.world, launcher), found.addresses,
        launcher.master_port or found.port or free_port(), found.exported,
    )  # fmt: skip
    console().print(*network_tables(tested), sep="\n")
    return network_problems(tested)


def check_environment() -> int:
    """Print what this machine has and lacks; the exit code: whether it can train at all."""
    try:
        found = examine_environment()
    except JobError as error:
        print_problems(console(stderr=True), error.problems)
        return EXIT_WRONG_JOB
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


if __name__ == "__main__":
    run_command(main)
