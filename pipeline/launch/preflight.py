"""What is checked before a start: by `pipeline.check`, by ``./launch.sh``, and at each restart."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import IO, ClassVar, TypeVar

from pipeline.base.command import help_asked, say
from pipeline.base.command_line import given_options
from pipeline.base.option_help import Group, Help, end_with_help
from pipeline.base.problems import EXIT_FINISHED, JobError
from pipeline.base.user_input import home_folder
from pipeline.checkpoints.output import checkpoint_bytes, space_problems
from pipeline.checkpoints.resume import examine_resume
from pipeline.cluster.agent.host_inquiry import Inquiry
from pipeline.cluster.forwarded_environment import deepspeed_env
from pipeline.cluster.launcher_options import (
    LauncherOptions,
    launcher_problems,
    split_arguments,
)
from pipeline.cluster.world import Paper, resolve_world
from pipeline.job.job import Job
from pipeline.job.options import Options, parse_options, spelled_out
from pipeline.job.report import console, describe, model_table, print_problems, recipe_table, verdict
from pipeline.job.resolve import Draft, examine
from pipeline.job.world import World
from pipeline.launch.fewer_hosts import Plan, describe_fewer, on_hosts, plan_fewer, separate_folders
from pipeline.launch.host_check.by_agents import inquiry_of
from pipeline.launch.host_check.host_check import HostCheck, ask_job_hosts, hosts_line, hosts_table
from pipeline.launch.launcher_command import SCRIPT, launcher_world_problems, start_problems, unused_problems

O = TypeVar("O", bound=Options)  # noqa: E741
LISTS = {"list_models": model_table, "list_recipes": recipe_table}


@dataclass(frozen=True)
class Lists:
    """Options that print what there is, and end the command."""

    HELP: ClassVar[Help] = Help((Group("help", "list_models list_recipes"),))

    list_models: bool = False
    """Print the presets with their sizes."""
    list_recipes: bool = False
    """Print the recipes, and what each is for."""


def read_arguments(
    arguments: Sequence[str], kind: type[O], program: str
) -> tuple[LauncherOptions, O, list[str]]:
    """The launcher's options, the job's, and those of the arguments that are the job's.

    Raises:
        SystemExit: code 2 after a message for a value of the wrong type; code 0 after help, or a list that is
            asked for.
        JobError: an option that does not exist, a --config file that cannot be used, --data without a path.
    """
    if asked := help_asked(arguments):
        end_with_help(program, (kind, LauncherOptions, Lists), asked)
    lists = [name for name, _ in given_options(arguments) if name in LISTS]
    rest = [word for word in arguments if word not in {f"--{name}" for name in lists}]
    launcher, job_arguments = split_arguments(rest, program)
    job_arguments = spelled_out(job_arguments, kind)
    others = [*(option.name for option in fields(LauncherOptions)), *LISTS]
    options = parse_options(job_arguments, kind, program, others)
    if lists:  # beside a wrong option there is none
        console().print(*(LISTS[name]() for name in lists))
        sys.exit(EXIT_FINISHED)
    return launcher, options, job_arguments


def check(
    options: Options,
    launcher: LauncherOptions,
    paper: Paper | None = None,
    world: World | None = None,
    batch: Sequence[int] = (),
) -> Draft:
    """Everything that can be known of a job, with all its problems: those of the launcher's options, the
    world, the job, and the checkpoint it would resume from. `paper` is used instead of this machine, `world`
    instead of resolving one, and `batch` as in `examine`."""
    paper = paper or Paper()
    filters = (launcher.include, launcher.exclude, launcher.num_nodes, launcher.num_gpus)
    try:
        world = world or resolve_world(launcher.hostfile, *filters, paper)
        draft = examine(options, world, batch=batch)
    except JobError as error:
        draft = examine(options, None, error.problems)
    draft.problems += launcher_problems(launcher)
    try:
        draft.problems += deepspeed_env(home_folder(), Path.cwd(), os.environ, launcher.launcher)[1]
    except JobError as error:
        draft.problems += error.problems
    if draft.world is not None and paper.hosts_like is None:  # which nobody starts
        draft.problems += launcher_world_problems(launcher, draft.world)
        if not batch:  # what a part of the hosts does not need, the whole job may
            draft.problems += unused_problems(launcher, draft.world)
        paths = {"current folder": str(Path.cwd()), "python": sys.executable, "project": str(SCRIPT)}
        draft.problems += start_problems(launcher, draft.world, paths, os.environ)
    if draft.job is not None:
        resumption = examine_resume(draft.job)
        draft.problems += resumption.problems
        if options.saves and not paper.has_ranks and (draft.job.world.is_local or launcher.no_ssh):
            draft.problems += space_problems(draft.job)
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
    asked = ask_job_hosts(draft, launcher)
    draft = check(draft.options, launcher, world=asked.world)
    saves = draft.job is not None and draft.options.saves
    found = asked.with_problems(checkpoint_bytes(draft.job) if saves else 0)
    draft.problems += [each.problem for each in found.problems]
    draft.problems += separate_folders(launcher, found.file_systems)
    if draft.errors:
        draft.job = None
    return draft, found


def print_draft(draft: Draft, stderr: bool = False) -> None:
    """What is known of the job, what is wrong with it, and whether it can start."""
    out = console(stderr)
    out.print(describe(draft))
    if draft.options.print_config and draft.job is not None:
        print(json.dumps(draft.job.deepspeed, indent=2))
    print_problems(out, draft.problems)
    out.print(verdict(draft))


@dataclass(frozen=True)
class Ready:
    """A start without an obstacle.

    Attributes:
        launcher: Describes exactly these hosts.
        batch: Sizes in place of the JSON's; empty for the JSON's own.
        hostfile: Kept open for as long as the launcher may read it.
        inquiry: What the hosts are asked by the owners of their ranks, where nobody has gone there before.
    """

    job: Job
    launcher: LauncherOptions
    batch: tuple[int, ...] = ()
    hostfile: IO[bytes] | None = None
    inquiry: Inquiry | None = None


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
    if draft.job is None:
        return None
    ready = exact_hosts(draft.job, launcher)
    if draft.job.world.is_local or launcher.no_ssh or not launcher.no_ssh_check:
        return ready
    return replace(ready, inquiry=inquiry_of(draft, launcher, checkpoint_bytes(draft.job)))


def exact_hosts(job: Job, launcher: LauncherOptions) -> Ready:
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
    say(describe_fewer(whole.job, plan, reasons))
    exact, world, hostfile = on_hosts(launcher, plan.job.world)
    return Ready(replace(plan.job, world=world), exact, plan.batch, hostfile)
