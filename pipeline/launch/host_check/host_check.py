"""Whether the hosts of a job can run it: asked, compared, and said as problems with remedies. No torch."""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipeline.base.problems import Problem
from pipeline.base.user_input import exists
from pipeline.cluster.devices import BF16_CAPABILITY
from pipeline.cluster.forwarded_environment import deepspeed_env, forwarded
from pipeline.cluster.launcher_options import LauncherOptions
from pipeline.data.inputs import is_remote
from pipeline.job.data_sources import data_paths
from pipeline.job.options import Options
from pipeline.job.resolve import PROJECT, config_path
from pipeline.job.world import LOOPBACK, Host, World
from pipeline.launch.host_check.ask import (
    ANSWER_SECONDS,
    Answers,
    HostReport,
    Question,
    Way,
    ask_hosts,
    way_to_hosts,
)
from pipeline.launch.host_check.hardware import HARDWARE, can_count, used_gpus
from pipeline.launch.host_check.judge import Check, Survey, Wrong, few
from pipeline.launch.host_check.reach import NoWay, launch_address
from pipeline.launch.host_check.session import local_command
from pipeline.launch.host_check.software import SOFTWARE
from pipeline.launch.host_check.system import SYSTEM, file_systems

CHECKS: tuple[Check, ...] = (*SOFTWARE, *HARDWARE, *SYSTEM)
# What each launcher starts on this machine, and what it starts first on the others.
_PROGRAM = {
    "pdsh": "pdsh",
    "slurm": "srun",
    **dict.fromkeys(("openmpi", "mpich", "impi", "mvapich"), "mpirun"),
}
_CACHES = ("TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME")
_REMOTE_PROGRAM = {"openmpi": "orted", "mpich": "hydra_pmi_proxy"}


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
        problems: What is wrong, grouped by host where hosts have the same.
        exported: Variables that the launch sets on every host; may be secrets.
    """

    world: World
    survey: Survey
    problems: tuple[HostProblem, ...]
    exported: Mapping[str, str] = field(default_factory=dict)

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
        reached = [other.facts.get("machine", {}).get("address") for other in others]
        names = [other.host.name.rpartition("@")[2] for other in others]
        return [
            self.survey.answers.address,
            *(one or other for one, other in zip(reached, names, strict=True)),
        ]

    @property
    def file_systems(self) -> list[list[str]]:
        """Hosts whose output folder is one file system, group by group."""
        return file_systems(self.survey)


@dataclass(frozen=True)
class AskedHosts:
    """The answers of a job's hosts, before they are judged.

    Attributes:
        world: The job's world with the devices that the hosts have.
        survey: Every answer.
        exported: Variables that the launch sets on every host; may be secrets.
        problems: Of this machine, which starts the job.
    """

    world: World
    survey: Survey
    exported: Mapping[str, str]
    problems: tuple[Problem, ...]

    def judge(self, output_bytes: int) -> HostCheck:
        """What is wrong, for a job that writes `output_bytes` at a time into its output folder."""
        survey = replace(self.survey, output_bytes=output_bytes)
        mine = [HostProblem("launcher", (), problem) for problem in self.problems]
        if (failure := survey.answers.here.failure) is not None:
            problem = Problem(
                "hosts", "this machine", failure.rule, failure.remedy.format(host="this machine")
            )
            mine.append(HostProblem("launcher", (), problem))
        return HostCheck(self.world, survey, (*mine, *host_problems(survey)), self.exported)


def ask_job_hosts(
    world: World,
    launcher: LauncherOptions,
    options: Options,
    environ: Mapping[str, str] = os.environ,
    seconds: float = ANSWER_SECONDS,
) -> AskedHosts:
    """Ask every host of `world` what it is like, in parallel; never asks the user anything.

    Args:
        environ: Of the launch; DS_ACCELERATOR decides, as it does in ranks.
        seconds: After which a host that has not answered is given up.
    """
    files, _ = deepspeed_env(Path.home(), Path.cwd(), environ)
    exported = dict(forwarded({} if world.is_local else environ, files))
    launch, problems = _launch(world, launcher)
    question = replace(ask_about(world, launcher, options, exported), launch=launch)
    answers = ask_hosts(world.hosts, question, way_to(world, launcher), seconds)
    found = world_found(world, answers, environ)
    survey = Survey(
        answers,
        found.device,
        cache_bytes=int(options.cache_size * 1e9) if len(question.folders) > 1 else 0,
        world_size=world.size,
        launch=launch,
        interface=exported.get("GLOO_SOCKET_IFNAME"),
    )
    return AskedHosts(found, survey, exported, tuple(problems))


def ask_about(
    world: World, launcher: LauncherOptions, options: Options, exported: Mapping[str, str]
) -> Question:
    """What to ask the hosts for this job."""
    described = [
        str(config_path(options.deepspeed_config)),
        options.model,
        options.data_blend,
        options.config,
    ]
    paths = data_paths(options)
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


def way_to(world: World, launcher: LauncherOptions) -> Way:
    """A job on this machine alone needs no ssh."""
    if world.is_local:
        return lambda host, script: local_command(script)
    return way_to_hosts(launcher.launcher, launcher.ssh_port)


def _launch(world: World, launcher: LauncherOptions) -> tuple[str, list[Problem]]:
    """Where ranks of other hosts find this machine, and what keeps it from starting them."""
    if world.is_local:
        return "", []
    problems = _launcher_problems(launcher)
    try:
        return launch_address(world, launcher), problems
    except NoWay as error:
        remedy = "Give --launch_addr, this machine's address as the hosts reach it"
        return "", [*problems, Problem("launch_addr", launcher.launch_addr, str(error), remedy)]


def _launcher_problems(launcher: LauncherOptions) -> list[Problem]:
    name = launcher.launcher or "pdsh"
    if launcher.no_ssh or shutil.which(_PROGRAM[name]):
        return []
    remedy = f"Install {name} here, or choose another --launcher"
    return [Problem("launcher", name, f"there is no {_PROGRAM[name]} on this machine's PATH", remedy)]


def world_found(world: World, answers: Answers, environ: Mapping[str, str]) -> World:
    """The world with the devices that its hosts have; as it was where they did not tell."""
    counted = [report for report in answers.hosts if report.facts and can_count(report)]
    if environ.get("DS_ACCELERATOR") == "cpu" or (counted and not any(map(_has_gpus, counted))):
        return replace(world, device="cpu", device_name=None, bf16_native=False)
    gpus = [gpu for report in counted for gpu in used_gpus(report)]
    if not gpus:
        return world
    native = all(_capability(gpu) >= BF16_CAPABILITY for gpu in gpus)
    names = " + ".join(sorted({gpu["name"] for gpu in gpus}))
    return replace(world, device="cuda", device_name=names, bf16_native=native)


def _has_gpus(report: HostReport) -> bool:
    return bool(report.facts["gpus"]["gpus"])


def _capability(gpu: Mapping[str, str]) -> tuple[int, ...]:
    return tuple(int(part) for part in gpu["compute_cap"].split(".") if part.isdecimal())


def host_problems(survey: Survey, checks: Sequence[Check] = CHECKS) -> list[HostProblem]:
    """Everything that is wrong with the hosts, those that gave no answer first."""
    found = [(_unreachable(report), None) for report in survey.answers.hosts if report.failure is not None]
    found += [(wrong, check) for check in checks for wrong in check.judge(survey)]
    grouped: dict[tuple, list[str]] = defaultdict(list)
    for wrong, check in found:
        name = check.name if check else "reachable"
        remedy = wrong.remedy or (check.remedy if check else "")
        severity = wrong.severity or (check.severity if check else "error")
        grouped[name, wrong.value, wrong.rule, remedy, severity].append(wrong.host)
    return [_problem(key, list(dict.fromkeys(hosts))) for key, hosts in grouped.items()]


def _unreachable(report: HostReport) -> Wrong:
    failure = report.failure
    return Wrong(report.host.name, failure.kind, failure.rule, failure.remedy)


def _problem(key: tuple, hosts: list[str]) -> HostProblem:
    name, value, rule, remedy, severity = key
    said = remedy.replace("{host}", hosts[0])
    return HostProblem(name, tuple(hosts), Problem(f"{few(hosts)}: {name}", value, rule, said, severity))
