"""The exact start of the deepspeed launcher for a world: everything it would guess is said.

Its runner (``deepspeed``) finds the hosts and reaches them; its launch starts the ranks of one. Where all
ranks of this start are here, launch is started at once: the runner would first import torch, for seconds.

What each of its ways to other hosts (`--launcher`) cannot start is a problem before it is tried.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.base.problems import Problem
from pipeline.base.words import counted
from pipeline.cluster.agent.launch_spec import LaunchSpec, encode
from pipeline.cluster.forwarded_environment import FIND_MODULES, PLAIN, launcher_environment
from pipeline.cluster.launcher_options import LauncherOptions
from pipeline.cluster.rank_environment import free_port
from pipeline.cluster.world import available_cores
from pipeline.job.world import LOOPBACK, World

SCRIPT = Path(__file__).resolve().parents[1] / "pretrain.py"
_LAUNCH = Path(__file__).resolve().parents[2] / "launch.sh"


def launch_program() -> str:
    """launch.sh as it is called from the current folder."""
    return "./launch.sh" if Path.cwd() == _LAUNCH.parent else str(_LAUNCH)


def _other_name(python: Path) -> str:
    """The same program by the name that has its version, if there is one beside it. Ctrl-C of a plain
    ``deepspeed`` ends what runs on its hosts as `PYTHON -u -m deepspeed.launcher.launch`, of any job."""
    other = python.with_name(f"python{sys.version_info.major}.{sys.version_info.minor}")
    return str(other if other.exists() and other.samefile(python) else python)


_PYTHON = _other_name(Path(sys.executable))
RUNNER = (_PYTHON, "-m", "deepspeed.launcher.runner")
LAUNCH = (_PYTHON, "-u", "-m", "deepspeed.launcher.launch")
# DeepSpeed's own default. Where hosts are started one by one, all must know it beforehand; otherwise the
# coordinator replaces it by a port that is free on the first host.
REMOTE_MASTER_PORT = 29500
# DeepSpeed hands these the hostfile itself, and refuses --include, --exclude, --num_nodes and --num_gpus.
# With one host left it forgets the launcher instead, and starts the job here.
_TAKE_NO_PART = ("openmpi", "mpich", "impi", "mvapich")
# It gives these a number of ranks per host.
_EQUAL_SLOTS = ("mpich", "impi", "mvapich", "slurm")
_OF_OTHER_HOSTS = ("launcher_args", "ssh_port", "launch_addr")
_FILTERS = ("include", "exclude", "num_nodes", "num_gpus")


@dataclass(frozen=True)
class Launch:
    """One start of the deepspeed launcher.

    Attributes:
        command: Its argument list; no shell reads it.
        environment: Its environment, which local ranks inherit.
        master_port: Port of the rendezvous, as the launcher is given it.
    """

    command: tuple[str, ...]
    environment: dict[str, str]
    master_port: int


def plan_launch(
    options: LauncherOptions,
    world: World,
    spec: LaunchSpec,
    environment: Mapping[str, str],
    job_arguments: Sequence[str] = (),
    script: str | Path = SCRIPT,
) -> Launch:
    """The exact start of `script` on every rank of `world`.

    The job's arguments stand on the command line only where there is no coordinator that hands them out: with
    --no_ssh, when no shell reads it.
    """
    is_here = world.is_local or options.no_ssh
    port = options.master_port or (free_port() if world.is_local else REMOTE_MASTER_PORT)
    # The ranks meet where the coordinator sees rank 0; this is for those that have none.
    address = options.master_addr or (LOOPBACK if world.is_local else world.hosts[0].name.rpartition("@")[2])
    start = _start_here(options, world) if is_here else _start_on_hosts(options, world)
    command = (
        *start,
        f"--master_addr={address}",
        f"--master_port={port}",
        # Its log of its own doings would hide the job's; what it refuses it raises, and that shows.
        "--log_level=critical",
        str(script),
        encode(spec),
        *(job_arguments if options.no_ssh else ()),
    )
    return Launch(command, _environment(world, environment, is_here), port)


def _start_here(options: LauncherOptions, world: World) -> tuple[str, ...]:
    """All ranks of this machine, with their devices."""
    slots = encode_world_info({host.name: list(host.devices) for host in world.hosts})
    return *LAUNCH, f"--world_info={slots}", f"--node_rank={options.node_rank or 0}"


def encode_world_info(devices: Mapping[str, Sequence[int]]) -> str:
    """Device numbers by host, as the runner gives them to launch."""
    return base64.urlsafe_b64encode(json.dumps(devices).encode()).decode()


def _start_on_hosts(options: LauncherOptions, world: World) -> tuple[str, ...]:
    """The hosts and slots, said so that it cannot understand anything else, and how to reach them."""
    arguments = ["--hostfile", str(world.hostfile)]
    for name in (*_FILTERS, "launcher", "ssh_port"):
        value = getattr(options, name)
        if value not in (None, ""):
            arguments += [f"--{name}", str(value)]
    if len(world.hosts) == 1:
        # With one host left the launcher would start the job here instead of there.
        arguments.append("--force_multi")
    if options.launcher_args is not None:
        arguments.append(f"--launcher_args={options.launcher_args}")  # it begins with a dash
    if options.launcher in (None, "pdsh"):
        # The level does not reach the other hosts, whose launchers would print every rank's command. What
        # this option is given goes through a shell there, which makes it two.
        arguments += ["--enable_each_rank_log", "None --log_level=critical"]
    # The hosts have been checked, all of them and with a time limit; the launcher's check has neither.
    return *RUNNER, *arguments, "--no_ssh_check"


def _environment(world: World, environment: Mapping[str, str], inherited: bool) -> dict[str, str]:
    result = launcher_environment(environment, inherited)
    if world.device == "cpu" and world.is_local:
        # The launcher sets CUDA_VISIBLE_DEVICES for every rank. Without this, an empty one, which hid the
        # GPUs from the check, would not hide them from the ranks.
        result["DS_ACCELERATOR"] = "cpu"
        # torch takes all cores in each rank otherwise, and the ranks wait for each other.
        result.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // world.size)))
    return result


def launcher_world_problems(options: LauncherOptions, world: World) -> list[Problem]:
    """Why these options cannot start this world."""
    return [*_place_problems(options, world), *_launcher_problems(options, world)]


def _place_problems(options: LauncherOptions, world: World) -> list[Problem]:
    """Hosts and paths that no launcher can take."""
    problems = []
    if options.node_rank is not None and options.node_rank >= len(world.hosts):
        rule = f"this job has {counted(len(world.hosts), 'host')}, counted from 0"
        remedy = "Give the host's place in the hostfile, and the same filters everywhere"
        problems.append(Problem("node_rank", options.node_rank, rule, remedy))
    for host in world.hosts:
        if "@" in host.name and host.devices != tuple(range(host.slots)):
            slots = ",".join(map(str, host.devices))
            rule = f"slots of a host can be chosen by its name alone; '@' separates hosts there ({slots})"
            remedy = "Set User for it in ~/.ssh/config, and leave user@ out of the hostfile"
            problems.append(Problem("hostfile", host.name, rule, remedy))
    return problems


def unused_problems(options: LauncherOptions, world: World) -> list[Problem]:
    """Options that this start of the whole job would not look at."""
    if options.no_ssh:
        rule = "has no use with --no_ssh, where each host starts its own ranks"
    elif world.is_local:
        rule = "has no use: no other host takes part"
    elif options.launcher == "slurm" and options.ssh_port is not None:
        rule = "has no use with slurm, which reaches hosts without ssh"
        return [Problem("ssh_port", options.ssh_port, rule, "Leave it out")]
    else:
        return []
    given = [key for key in _OF_OTHER_HOSTS if getattr(options, key) is not None]
    return [Problem(key, getattr(options, key), rule, "Leave it out") for key in given]


def start_problems(
    options: LauncherOptions, world: World, paths: Mapping[str, str], environ: Mapping[str, str]
) -> list[Problem]:
    """What of this machine the other hosts' shells would read as something else.

    The launcher writes these paths, and by which variables Python finds its modules, into a shell's command
    line as they are, and pdsh replaces ``%h``, ``%n`` and ``%u``. After a ``cd`` that fails, the job
    continues in the home folder of each host.

    Args:
        paths: Of what goes there, by what they are: the current folder, Python, the script.
    """
    if world.is_local or options.no_ssh:
        return []
    problems = []
    if options.launcher in (None, "pdsh"):
        rule = "through pdsh only letters, digits and @+=:,./_- arrive unchanged"
        for what, path in paths.items():
            if not PLAIN.fullmatch(path):
                problems.append(Problem(what, path, rule, "Use a path without others"))
    for name in FIND_MODULES:
        if not PLAIN.fullmatch(environ.get(name, "")):
            rule = "on other hosts only letters, digits and @+=:,./_- arrive unchanged"
            problems.append(Problem(name, environ[name], rule, "Unset it, or name other folders"))
    return problems


def _launcher_problems(options: LauncherOptions, world: World) -> list[Problem]:
    name, problems = options.launcher, []
    if name is None:
        return problems
    if options.no_ssh or (world.is_local and name != "pdsh"):
        why = "with --no_ssh each host starts its own" if options.no_ssh else "this machine is the only host"
        return [Problem("launcher", name, f"would start no ranks: {why}", "Leave it out")]
    given = [key for key in _FILTERS if getattr(options, key) not in (None, "")]
    if name in _TAKE_NO_PART and given:
        rule = f"{name} starts all of a hostfile"
        remedy = "Write a hostfile with these hosts and slots, or use --launcher pdsh"
        problems += [Problem(key, getattr(options, key), rule, remedy) for key in given]
    if name in _EQUAL_SLOTS and len({host.slots for host in world.hosts}) > 1:
        slots = ", ".join(f"{host.name} has {host.slots}" for host in world.hosts[:4])
        rule = f"needs the same number of slots on every host ({slots})"
        problems.append(Problem("launcher", name, rule, "Make them equal, or use --launcher pdsh"))
    chosen = [host.name for host in world.hosts if host.devices != tuple(range(host.slots))]
    users = [host.name for host in world.hosts if "@" in host.name]
    if name == "slurm" and users:
        rule = f"knows hosts by their names alone, not {', '.join(users[:4])}"
        problems.append(Problem("launcher", name, rule, "Leave user@ out of the hostfile"))
    if name == "slurm" and chosen:
        rule = f"gives devices out itself, so that no slots can be chosen, as on {', '.join(chosen[:4])}"
        problems.append(Problem("launcher", name, rule, "Choose whole hosts, or use --launcher pdsh"))
    return problems
