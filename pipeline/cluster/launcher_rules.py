"""What each of DeepSpeed's launchers cannot start, known before it is tried. No torch."""

from __future__ import annotations

from pipeline.cluster.launcher_options import LauncherOptions
from pipeline.cluster.world import World
from pipeline.job.problems import Problem

# DeepSpeed hands these the hostfile itself, and refuses --include, --exclude, --num_nodes and --num_gpus.
# With one host left it forgets the launcher instead, and starts the job here.
_TAKE_NO_PART = ("openmpi", "mpich", "impi", "mvapich")
# It gives these a number of ranks per host.
_EQUAL_SLOTS = ("mpich", "impi", "mvapich")
_FILTERS = ("include", "exclude", "num_nodes", "num_gpus")


def launcher_world_problems(options: LauncherOptions, world: World) -> list[Problem]:
    """Why this launcher cannot start this world."""
    name, problems = options.launcher, []
    if name is None or world.is_local:
        return problems
    given = [key for key in _FILTERS if getattr(options, key) not in (None, "")]
    if name in _TAKE_NO_PART and given:
        rule = f"{name} starts all of a hostfile"
        remedy = "Write a hostfile with these hosts and slots, or use --launcher pdsh"
        problems += [Problem(key, getattr(options, key), rule, remedy) for key in given]
    if name in _EQUAL_SLOTS and len({host.slots for host in world.hosts}) > 1:
        slots = ", ".join(f"{host.name} has {host.slots}" for host in world.hosts[:4])
        rule = f"needs the same number of slots on every host ({slots})"
        problems.append(Problem("launcher", name, rule, "Make them equal, or use --launcher pdsh"))
    return problems
