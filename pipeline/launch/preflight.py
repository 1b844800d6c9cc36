"""What is checked before a start: by `pipeline.check`, by ``./launch.sh``, and at each restart."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import IO, ClassVar, TypeVar

from pipeline.base.command import help_asked, say
from pipeline.base.command_line import given_options
from pipeline.base.json_reader import parse_saved, saved_json
from pipeline.base.option_help import Group, Help, end_with_help
from pipeline.base.problems import EXIT_FINISHED, JobError, Problem
from pipeline.base.user_input import home_folder
from pipeline.base.words import cut
from pipeline.checkpoints.output import checkpoint_bytes, space_line, space_problems
from pipeline.checkpoints.resume import examine_resume
from pipeline.cluster.agent.host_inquiry import Inquiry
from pipeline.cluster.forwarded_environment import deepspeed_env, missing_keys
from pipeline.cluster.history import METRICS_FILE
from pipeline.cluster.launcher_options import (
    LauncherOptions,
    launcher_problems,
    split_arguments,
)
from pipeline.cluster.world import Paper, resolve_world
from pipeline.data.tokenizer import from_facts
from pipeline.data.tokenizer_folder import BYTES
from pipeline.data.training_data import ForeseenSource, foresee_data
from pipeline.job.data_sources import data_settings
from pipeline.job.job import Job
from pipeline.job.options import RUN_FILE, Options, parse_options, spelled_out
from pipeline.job.report import console, describe, model_table, print_problems, recipe_table, verdict
from pipeline.job.resolve import Draft, examine
from pipeline.job.world import World
from pipeline.launch.fewer_hosts import Plan, describe_fewer, on_hosts, plan_fewer, separate_folders
from pipeline.launch.host_check.by_agents import inquiry_of
from pipeline.launch.host_check.host_check import HostCheck, ask_job_hosts, hosts_line, hosts_table
from pipeline.launch.launcher_command import SCRIPT, launcher_world_problems, start_problems, unused_problems
from pipeline.model.counts import total_parameters

# Passes over data up to which they are nearly as good as new data, and from which on nothing is learned from
# them: Muennighoff et al. 2023, Scaling Data-Constrained Language Models.
GOOD_PASSES, USELESS_PASSES = 4, 40
# A model's ids for each of the tokenizer's from which on most are never used.
MANY_TIMES = 8
# Lines of the outlook, and bytes of metrics.jsonl that tell the speed.
_ROWS, _TAIL = 12, 1 << 15
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
        draft.problems += _variables(draft, launcher, paper)
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
        draft.problems += _look_ahead(draft, draft.job)
    if draft.errors:
        draft.job = None
    return draft


def _variables(draft: Draft, launcher: LauncherOptions, paper: Paper) -> list[Problem]:
    """What is wrong with the files of variables for ranks; and keys that ranks on this machine will miss."""
    home, cwd = home_folder(), Path.cwd()
    variables, problems = deepspeed_env(home, cwd, os.environ, launcher.launcher)
    if draft.job is None or not draft.job.world.is_local or paper.has_ranks:
        return problems
    return [*problems, *missing_keys(draft.job.monitors, home, cwd, os.environ | variables)]


def _look_ahead(draft: Draft, job: Job) -> list[Problem]:
    """What data, disk and earlier starts say of a job without another error goes into its outlook; what is
    wrong is returned."""
    if draft.errors:
        return []
    try:
        found = foresee_data(
            job.data.training,
            data_settings(job),
            validation=job.data.validation,
            tokenizer=from_facts(job.data.tokenizer),
            begins=not draft.resume,
        )
    except JobError as error:
        return list(error.problems)
    rows, problems = [], _unused_rows(job)
    for each in found:
        trained = each.spec in job.data.training
        rows.append((cut(each.spec.name, 40), _source_line(job, each, trained)))
        problems += _many_passes(job, each) if trained else []
        problems += [
            Problem("data", each.spec.name, line.removeprefix("WARNING: "), "", "warning")
            for line in each.remarks
        ]
    rows.append(("checkpoints", space_line(job)))
    if line := _time_line(job):
        rows.append(("time", line))
    draft.outlook = rows if len(rows) <= _ROWS else [*rows[: _ROWS - 3], ("...", "more"), *rows[-2:]]
    return problems


def _unused_rows(job: Job) -> list[Problem]:
    """A warning where the tokenizer has no token for most of the model's vocabulary."""
    model, tokenizer = job.model, job.data.tokenizer
    if model.vocab_size < MANY_TIMES * tokenizer.vocab_size:
        return []
    unused = (model.vocab_size - tokenizer.vocab_size) * model.hidden_size * (1 if model.tied else 2)
    rule = (
        f"has {tokenizer.vocab_size:,} ids, and {model.name} has rows for {model.vocab_size:,}: {unused:,} "
        f"of its {total_parameters(model):,} parameters are never used"
    )
    if tokenizer.identity == BYTES:
        rule += f", and a sample of {job.batch.sequence_length:,} tokens is that many bytes, a few lines"
    remedy = (
        "Give the model's own with --tokenizer FOLDER, make one with python -m pipeline.prepare "
        "--train_tokenizer, or give a config.json with a smaller vocab_size"
    )
    return [Problem("tokenizer", tokenizer.name, rule, remedy, "warning")]


def _passes(job: Job, source: ForeseenSource) -> float | None:
    """How often the run trains on each token of a source."""
    if source.tokens is None:
        return None
    held = min(round(source.tokens * job.data.held_out_fraction), job.data.held_out_limit or source.tokens)
    wanted = job.train_steps * job.batch.tokens_per_step * float(source.spec.weight)
    return wanted / max(source.tokens - held, 1)


def _source_line(job: Job, source: ForeseenSource, trained: bool) -> str:
    if source.tokens is None:
        return source.how
    line = f"{source.tokens:,} tokens, {source.how}"
    if not trained:
        return line
    passes = _passes(job, source)
    times = f"{passes:.2g}" if passes < 10 else f"{passes:,.0f}"
    return f"{line}; {times} passes" + (
        f", of which {GOOD_PASSES} are nearly as good as new data" if passes > GOOD_PASSES else ""
    )


def _many_passes(job: Job, source: ForeseenSource) -> list[Problem]:
    """A warning where a source is read so often that nothing is learned from it any more."""
    passes = _passes(job, source)
    if passes is None or passes <= USELESS_PASSES:
        return []
    rule = (
        f"{passes:,.0f} passes over {source.spec.name} ({source.tokens:,} tokens, {source.how}): up to "
        f"{GOOD_PASSES} are nearly as good as new data, and from {USELESS_PASSES} on they add nothing but "
        "overfitting (Muennighoff et al. 2023)"
    )
    needed, steps = source.tokens * passes / GOOD_PASSES, int(job.train_steps * GOOD_PASSES / passes)
    fewer = f", or --train_steps {steps}" if steps else ", or train a smaller model on smaller batches"
    remedy = f"Give more data (with {needed:,.0f} tokens, {GOOD_PASSES} passes){fewer}"
    return [Problem("train_steps", job.train_steps, rule, remedy, "warning")]


def _time_line(job: Job) -> str:
    """The time that is left at the speed of the last steps in the run's folder; empty where there are none
    of this layout."""
    folder = Path(job.output_dir)
    try:
        saved = saved_json(folder / RUN_FILE)
        with (folder / METRICS_FILE).open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - _TAIL, 0))
            lines = [parse_saved(line) for line in file.read().splitlines()[1:]]
    except (OSError, ValueError):  # a first start; or what whoever reads them in full reports
        return ""
    layout = {**asdict(job.mesh), "zero_stage": job.zero_stage, "stages": list(job.stages)}
    now = {"layout": layout, "batch": asdict(job.batch), "precision": asdict(job.precision)}
    device = saved.get("device", {}).get("name", job.world.device_name)
    if device != job.world.device_name or any(saved.get(key) != value for key, value in now.items()):
        return ""
    steps = [line for line in lines if isinstance(line, dict) and line.get("tokens_per_second")]
    if not steps:
        return ""
    rate = statistics.median(line["tokens_per_second"] for line in steps)
    left = max(job.train_steps - steps[-1]["step"], 0)
    seconds = timedelta(seconds=round(left * job.batch.tokens_per_step / rate))
    return f"{seconds} for the {left:,} steps left, at {rate:,.0f} tokens/s as in the last {len(steps)} here"


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
