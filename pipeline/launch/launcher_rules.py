"""What each of DeepSpeed's launchers cannot start, known before it is tried. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.base.problems import Problem
from pipeline.base.words import counted
from pipeline.cluster.forwarded_environment import FIND_MODULES, PLAIN
from pipeline.cluster.launcher_options import LauncherOptions
from pipeline.job.world import World

# DeepSpeed hands these the hostfile itself, and refuses --include, --exclude, --num_nodes and --num_gpus.
# With one host left it forgets the launcher instead, and starts the job here.
_TAKE_NO_PART = ("openmpi", "mpich", "impi", "mvapich")
# It gives these a number of ranks per host.
_EQUAL_SLOTS = ("mpich", "impi", "mvapich", "slurm")
_OF_OTHER_HOSTS = ("launcher_args", "ssh_port", "launch_addr")
_FILTERS = ("include", "exclude", "num_nodes", "num_gpus")


def launcher_world_problems(options: LauncherOptions, world: World) -> list[Problem]:
    """Why these options cannot start this world."""
    return [*_place_problems(options, world), *_launcher_problems(options, world)]


def _place_problems(options: LauncherOptions, world: World) -> list[Problem]:
    """Hosts and places that no launcher could be told of."""
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
    line as they are, and pdsh replaces ``%h``, ``%n`` and ``%u``. After a ``cd`` that fails, the job goes on
    in the home folder of each host.

    Args:
        paths: Of what goes there, by what they are: the current folder, Python, the script.
    """
    if world.is_local or options.no_ssh:
        return []
    problems = []
    if options.launcher in (None, "pdsh"):
        rule = "on its way through pdsh only letters, digits and @+=:,./_- stay what they are"
        for what, path in paths.items():
            if not PLAIN.fullmatch(path):
                problems.append(Problem(what, path, rule, "Use a path without others"))
    for name in FIND_MODULES:
        if not PLAIN.fullmatch(environ.get(name, "")):
            rule = "on its way to other hosts only letters, digits and @+=:,./_- stay what they are"
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
