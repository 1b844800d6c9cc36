"""Whether the hosts of a job can run it: asked, compared, reported as problems and as one table."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.table import Table
from rich.text import Text

from pipeline.base.problems import Problem
from pipeline.base.user_input import exists, home_folder
from pipeline.base.words import counted, ends, few
from pipeline.cluster.agent.connection import route_address
from pipeline.cluster.devices import BF16_CAPABILITY
from pipeline.cluster.forwarded_environment import deepspeed_env, forwarded
from pipeline.cluster.launcher_options import LauncherOptions
from pipeline.data.inputs import is_remote
from pipeline.job.resolve import PROJECT, Draft, config_path
from pipeline.job.world import LOOPBACK, Host, World, is_this_machine
from pipeline.launch.host_check.ask import (
    Answers,
    Question,
    RemoteShell,
    ask_hosts,
    remote_shell,
)
from pipeline.launch.host_check.comparison import Check, Finding, Survey
from pipeline.launch.host_check.inventory import HARDWARE, SOFTWARE, can_count, used_gpus
from pipeline.launch.host_check.session import local_command
from pipeline.launch.host_check.system import SYSTEM, common_interface, file_systems

CHECKS: tuple[Check, ...] = (*SOFTWARE, *HARDWARE, *SYSTEM)
# What each launcher starts on this machine, and what it starts first on the others.
_PROGRAM = {
    "pdsh": "pdsh",
    "slurm": "srun",
    **dict.fromkeys(("openmpi", "mpich", "impi", "mvapich"), "mpirun"),
}
_REMOTE_PROGRAM = {"openmpi": "orted", "mpich": "hydra_pmi_proxy"}
_CACHES = ("TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME")
_SSH_SECONDS = 10
# Lines of the table for one check whose values differ.
_VALUES = 8


@dataclass(frozen=True)
class HostProblem:
    """A problem, the check that found it, and the hosts that have it; no hosts: it is this machine's."""

    check: str
    hosts: tuple[str, ...]
    problem: Problem


@dataclass(frozen=True)
class HostCheck:
    """What was found out about the hosts of a job.

    Attributes:
        world: The job's world with the devices that the hosts have.
        survey: Every answer.
        problems: What is wrong, grouped by host where hosts have the same; before `with_problems`, this
            machine's only.
        exported: Variables that the launch sets on every host; may be secrets.
    """

    world: World
    survey: Survey
    problems: tuple[HostProblem, ...]
    exported: Mapping[str, str] = field(default_factory=dict)

    def with_problems(self, output_bytes: int) -> HostCheck:
        """With the hosts' problems, for a job that writes `output_bytes` at a time into its output folder."""
        survey = replace(self.survey, output_bytes=output_bytes)
        return replace(self, survey=survey, problems=(*self.problems, *host_problems(survey)))

    @property
    def errors(self) -> tuple[HostProblem, ...]:
        return tuple(found for found in self.problems if found.problem.severity == "error")

    @property
    def usable(self) -> tuple[Host, ...]:
        """The hosts without an error; none while this machine has one."""
        bad = {name for found in self.errors for name in found.hosts}
        if any(not found.hosts for found in self.errors):
            return ()
        return tuple(host for host in self.world.hosts if host.name not in bad)

    @property
    def port(self) -> int | None:
        """The port on which the first host listened for a moment; None if it could not, or was not asked."""
        found = self.survey.answers.hosts[0].facts.get("port")
        return found if isinstance(found, int) else None

    @property
    def addresses(self) -> list[str]:
        """Of each host, as it was reached; the first one's is that of the rendezvous."""
        _, *others = self.survey.answers.hosts
        reached = [
            other.facts.get("machine", {}).get("address") or other.host.name.rpartition("@")[2]
            for other in others
        ]
        return [self.survey.answers.address, *reached]

    @property
    def file_systems(self) -> list[list[str]]:
        """Hosts whose output folder is one file system, group by group."""
        return file_systems(self.survey)


def ask_job_hosts(draft: Draft, launcher: LauncherOptions) -> HostCheck:
    """Ask every host of a job what it is like, in parallel; never asks the user anything. `draft`: the job as
    far as it could be understood, its world included."""
    world, exported = draft.world, exported_to(draft.world)
    launch, problems = _launch(world, launcher)
    question = replace(question_of(draft, launcher, exported), launch=launch)
    answers = ask_hosts(world.hosts, question, shell_for(world, launcher))
    if (failure := answers.here.failure) is not None:
        remedy = failure.remedy.format(host="this machine")
        problems.append(Problem("hosts", "this machine", failure.rule, remedy))
    found = host_check_of(draft, question, answers, exported)
    mine = tuple(HostProblem("launcher", (), problem) for problem in problems)
    return replace(found, problems=mine)


def exported_to(world: World) -> dict[str, str]:
    """Variables that the launch sets on every host."""
    files, _ = deepspeed_env(home_folder(), Path.cwd(), os.environ)
    return dict(forwarded({} if world.is_local else os.environ, files))


def host_check_of(
    draft: Draft, question: Question, answers: Answers, exported: Mapping[str, str]
) -> HostCheck:
    """What the answers to `question` tell of the hosts of a job, without problems yet."""
    found = world_found(draft.world, answers, os.environ)
    survey = Survey(
        answers,
        found.device,
        cache_bytes=int(draft.options.cache_size * 1e9) if len(question.folders) > 1 else 0,
        world_size=draft.world.size,
        launch=question.launch,
        interface=exported.get("GLOO_SOCKET_IFNAME"),
    )
    return HostCheck(replace(found, interface=common_interface(survey)), survey, (), exported)


def question_of(draft: Draft, launcher: LauncherOptions, exported: Mapping[str, str]) -> Question:
    """What to ask the hosts for this job."""
    world, options = draft.world, draft.options
    described = [
        str(config_path(options.deepspeed_config)),
        options.model,
        options.data_blend,
        options.config,
    ]
    paths = [path for sources in draft.sources.values() for source in sources for path in source.paths]
    local = [path for path in paths if not is_remote(path) and not path.startswith("hub:")]
    output = options.output_dir or "runs"
    folders = [output]
    if options.cache_dir or len(local) < len(paths):
        folders.append(options.cache_dir or f"{output}/data/remote")
    return Question(
        project=str(PROJECT),
        cwd=str(Path.cwd()),
        files=_absolute(path for path in described if path and exists(path)),
        data=_absolute(local),
        folders=_absolute(folders),
        # Not all of them: what is asked goes through command lines, and values may be secrets.
        environment={name: exported[name] for name in _CACHES if name in exported},
        address=launcher.master_addr or (LOOPBACK if world.is_local else ""),
        listen=None if world.is_local else launcher.master_port or 0,
        commands=tuple(filter(None, [_REMOTE_PROGRAM.get(launcher.launcher or "pdsh")])),
    )


def _absolute(paths: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(os.path.normpath(Path.cwd() / path) for path in paths))


def shell_for(world: World, launcher: LauncherOptions) -> RemoteShell:
    """A job on this machine alone needs no ssh."""
    if world.is_local:
        return lambda host, script: local_command(script)
    return remote_shell(launcher.launcher, launcher.ssh_port)


def _launch(world: World, launcher: LauncherOptions) -> tuple[str, list[Problem]]:
    """Where ranks of other hosts find this machine, and what keeps it from starting them."""
    if world.is_local:
        return "", []
    problems = []
    name = launcher.launcher or "pdsh"
    if not launcher.no_ssh and not shutil.which(_PROGRAM[name]):
        rule = f"there is no {_PROGRAM[name]} on this machine's PATH"
        problems.append(Problem("launcher", name, rule, f"Install {name} here, or choose another --launcher"))
    try:
        return launch_address(world, launcher), problems
    except NoAddress as error:
        remedy = "Give --launch_addr, this machine's address as the hosts reach it"
        return "", [*problems, Problem("launch_addr", launcher.launch_addr, str(error), remedy)]


class NoAddress(Exception):
    """This machine and the hosts do not find each other; the message has the remedy."""


def launch_address(world: World, options: LauncherOptions) -> str:
    """Where the coordinator is, as the hosts of `world` reach it: on the route to the first other host.

    Raises:
        NoAddress: its name is unknown here, and ssh has no address for it.
    """
    if options.launch_addr is not None:
        return options.launch_addr
    if world.is_local:
        return LOOPBACK
    name = next(host.name for host in world.hosts if not is_this_machine(host.name)).rpartition("@")[2]
    try:
        return route_address(name)
    except OSError:
        pass  # a name that only ssh knows
    try:
        return route_address(_ssh_address(name))
    except OSError as error:
        raise NoAddress(
            f"{name} has no address here ({error.strerror or error}): give --launch_addr, this machine's "
            "address as that host reaches it"
        ) from error


def _ssh_address(name: str) -> str:
    """The address that ssh's configuration has for a host.

    Raises:
        OSError: there is no ssh, or it does not say (its configuration may run commands).
    """
    command = ["ssh", "-G", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SSH_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{shlex.join(command)} takes more than {_SSH_SECONDS} s") from error
    found = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("hostname ")]
    return found[0] if found else name


def world_found(world: World, answers: Answers, environ: Mapping[str, str]) -> World:
    """The world with the devices that its hosts have; as it was where they did not tell."""
    known = [report for report in answers.hosts if report.facts and can_count(report)]
    has_gpus = any(report.facts["gpus"]["gpus"] for report in known)
    if environ.get("DS_ACCELERATOR") == "cpu" or (known and not has_gpus):
        return replace(world, device="cpu", device_name=None, bf16_native=False, assumed="")
    gpus = [gpu for report in known for gpu in used_gpus(report)]
    if not gpus:
        return world
    native = all(_capability(gpu) >= BF16_CAPABILITY for gpu in gpus)
    names = " + ".join(sorted({gpu["name"] for gpu in gpus}))
    memory = min(_memory(gpu) for gpu in gpus) or None
    return replace(
        world, device="cuda", device_name=names, bf16_native=native, device_memory=memory, assumed=""
    )


def _memory(gpu: Mapping[str, str]) -> int:
    """Bytes, from MiB; 0 where nvidia-smi does not say."""
    size = gpu["memory.total"]
    return int(size) << 20 if size.isdecimal() else 0


def _capability(gpu: Mapping[str, str]) -> tuple[int, ...]:
    return tuple(int(part) for part in gpu["compute_cap"].split(".") if part.isdecimal())


def host_problems(survey: Survey, checks: Sequence[Check] = CHECKS) -> list[HostProblem]:
    """Everything that is wrong with the hosts, those that gave no answer first."""
    grouped: dict[tuple, list[str]] = defaultdict(list)
    for report in survey.answers.hosts:
        if (failure := report.failure) is not None:
            key = ("reachable", failure.kind, failure.rule, failure.remedy, "error")
            grouped[key].append(report.host.name)
    for check in checks:
        for wrong in check.findings(survey):
            grouped[_group(check, wrong)].append(wrong.host)
    return [_problem(key, list(dict.fromkeys(hosts))) for key, hosts in grouped.items()]


def _group(check: Check, wrong: Finding) -> tuple:
    """What hosts have in common that share a line."""
    remedy, severity = wrong.remedy or check.remedy, wrong.severity or check.severity
    return check.name, wrong.value, wrong.rule, remedy, severity


def _problem(key: tuple, hosts: list[str]) -> HostProblem:
    name, value, rule, remedy, severity = key
    said = remedy.replace("{host}", hosts[0])
    return HostProblem(name, tuple(hosts), Problem(f"{few(hosts)}: {name}", value, rule, said, severity))


def hosts_table(found: HostCheck) -> Table:
    """One line for each check: its value on all hosts, or which hosts have which; the wrong ones coloured."""
    table = Table(box=None, title="Hosts", title_justify="left", title_style="bold", pad_edge=False)
    for heading in ("  check", "found", ""):
        table.add_column(heading, no_wrap=heading != "found", overflow="fold")
    marks = _marks(found)
    reports, answered = found.survey.answers.hosts, found.survey.hosts
    table.add_row("  reachable", f"{len(answered)} of {len(reports)}", marks.get("reachable", "ok"))
    for name, values in check_values(found.survey):
        hosts = [f"{value}: {few(names)}" for value, names in values.items()]
        if len(values) == 1 and len(next(iter(values.values()))) == len(answered):
            hosts = list(values)
        table.add_row(f"  {name}", "\n".join(ends(hosts, _VALUES)), marks.get(name, "ok"))
    return table


def hosts_line(found: HostCheck) -> str:
    """That there is nothing to say, in one line."""
    return f"Checked {counted(len(found.survey.hosts), 'host')}: no problem found."


def _marks(found: HostCheck) -> dict[str, Text]:
    """The verdict on each check that found something."""
    marks: dict[str, Text] = {}
    for each in sorted(found.problems, key=lambda each: each.problem.severity, reverse=True):
        style = "bold red" if each.problem.severity == "error" else "bold yellow"
        marks[each.check] = Text(each.problem.severity, style)
    return marks


def check_values(
    survey: Survey, checks: Sequence[Check] = CHECKS
) -> Iterator[tuple[str, dict[str, list[str]]]]:
    """(name, hosts by value) of each check; checks without any value are left out."""
    for check in checks:
        values: dict[str, list[str]] = defaultdict(list)
        for report in survey.hosts:
            if value := check.value(report):
                values[value].append(report.host.name)
        if values:
            yield check.name, dict(values)
