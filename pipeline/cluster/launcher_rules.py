"""What each of DeepSpeed's launchers cannot start, known before it is tried. No torch."""

from __future__ import annotations

from pipeline.cluster.launcher_options import LauncherOptions
from pipeline.cluster.world import World
from pipeline.job.problems import Problem

# DeepSpeed hands these the hostfile itself, and refuses --include, --exclude, --num_nodes and --num_gpus.
# With one host left it forgets the launcher instead, and starts the job here.
_TAKE_NO_PART = ("openmpi", "mpich", "impi", "mvapich")
# It gives these a number of ranks per host.
_EQUAL_SLOTS = ("mpich", "impi", "mvapich", "slurm")
_FILTERS = ("include", "exclude", "num_nodes", "num_gpus")


def launcher_world_problems(options: LauncherOptions, world: World) -> list[Problem]:
    """Why this launcher cannot start this world."""
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
    if name == "slurm" and chosen:
        rule = f"gives devices out itself, so that no slots can be chosen, as on {', '.join(chosen[:4])}"
        problems.append(Problem("launcher", name, rule, "Choose whole hosts, or use --launcher pdsh"))
    return problems
