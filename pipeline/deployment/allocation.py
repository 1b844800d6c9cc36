"""The hosts of a Slurm allocation, with the GPUs that it has on each.

Only Slurm knows how its host lists expand (``a[01-03,7],b2``) and what was allocated where, so it is asked:
``scontrol show hostnames`` gives the names, ``scontrol show job --details`` lines such as

    Nodes=gpu[1-2] CPU_IDs=0-15 Mem=0 GRES=gpu:a100:8(IDX:0-7)
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence

from pipeline.base.problems import JobError, Problem, job_error
from pipeline.cluster.hostfile import MAX_SLOTS, host_name_rule
from pipeline.cluster.launcher_options import LauncherOptions
from pipeline.cluster.rank_environment import slurm_counts
from pipeline.job.world import Host

_NODES_LINE = re.compile(r"^\s+Nodes=(\S+) .*\bGRES=(\S*)", re.MULTILINE)
_SECONDS = 30.0  # for the controller's answer
_CHOICE = (
    "the hosts are those of the allocation, and each of them starts a launch",
    "Give sbatch --nodes, --nodelist or --exclude, before the script's name",
)
# Options of the launcher, with a rule and a remedy.
_SLURMS_OWN = {
    **dict.fromkeys(("hostfile", "include", "exclude", "num_nodes"), _CHOICE),
    "node_rank": ("is another one on each host", "Leave it out"),
}
Ask = Callable[[Sequence[str]], str]


def allocated_hosts(
    slots: int | None = None, environ: Mapping[str, str] = os.environ, ask: Ask | None = None
) -> tuple[Host, ...]:
    """The allocation this runs in: its hosts in Slurm's order, with as many slots as GPUs.

    An allocation without GPUs has one slot per task.

    Args:
        slots: For every host, instead.
        environ: Where Slurm describes the job.
        ask: Runs scontrol with these arguments, for tests.

    Raises:
        JobError: not inside an allocation, Slurm does not answer, or a host has no slot.
    """
    ask = ask or scontrol
    missing = [name for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST") if not environ.get(name)]
    if missing:
        rule = "Slurm sets it inside an allocation"
        raise JobError([Problem(name, None, rule, "Run this from a batch script") for name in missing])
    names = ask(["show", "hostnames", environ["SLURM_JOB_NODELIST"]]).split()
    counts = _slots(slots, names, environ, ask)
    problems = [problem for name in names for problem in _host_problems(name, counts.get(name, 0))]
    if not names:
        rule = "scontrol finds no host in it"
        problems = [Problem("SLURM_JOB_NODELIST", environ["SLURM_JOB_NODELIST"], rule, "See squeue")]
    if problems:
        raise JobError(problems)
    return tuple(Host(name, counts[name]) for name in names)


def allocation_problems(options: LauncherOptions) -> list[Problem]:
    """Options that would make the launches on an allocation's hosts disagree with it: one starts on each."""
    default = LauncherOptions()
    return [
        Problem(key, getattr(options, key), *reason)
        for key, reason in _SLURMS_OWN.items()
        if getattr(options, key) != getattr(default, key)
    ]


def hostfile_text(hosts: Sequence[Host], comment: str) -> str:
    """A hostfile of these hosts."""
    return "".join((f"# {comment}\n", *(f"{host.name} slots={host.slots}\n" for host in hosts)))


def scontrol(arguments: Sequence[str]) -> str:
    """What Slurm's own command prints.

    Raises:
        JobError: it is not installed, fails, or does not answer in time.
    """
    command = ["scontrol", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
    except FileNotFoundError as error:
        rule = "is not on the PATH, and only Slurm can say which hosts it gave"
        raise job_error("scontrol", None, rule, "Add Slurm's commands to the PATH") from error
    except subprocess.TimeoutExpired as error:
        rule = f"did not answer in {_SECONDS:g} s"
        raise job_error("scontrol", " ".join(command), rule, "Try again") from error
    except subprocess.CalledProcessError as error:
        rule = f"failed: {error.stderr.strip() or f'exit code {error.returncode}'}"
        raise job_error("scontrol", " ".join(command), rule, "See to Slurm's controller") from error
    return done.stdout


def _slots(slots: int | None, names: Sequence[str], environ: Mapping[str, str], ask: Ask) -> dict[str, int]:
    """Slots by host name."""
    if slots is not None:
        return dict.fromkeys(names, slots)
    gpus: dict[str, int] = {}
    for nodes, resources in _NODES_LINE.findall(ask(["show", "job", "--details", environ["SLURM_JOB_ID"]])):
        for name in ask(["show", "hostnames", nodes]).split():
            gpus[name] = gpus.get(name, 0) + count_gpus(resources)
    if any(gpus.values()):
        return gpus
    return dict(zip(names, task_counts(environ.get("SLURM_TASKS_PER_NODE", "")), strict=False))


def count_gpus(resources: str) -> int:
    """GPUs in a list of generic resources, such as ``gpu:a100:2(IDX:0,3),nic:1(CNT:1)``."""
    entries = [entry.split(":") for entry in re.sub(r"\([^)]*\)", "", resources).split(",")]
    return sum(int(entry[-1]) if entry[-1].isdecimal() else 1 for entry in entries if entry[0] == "gpu")


def task_counts(text: str) -> list[int]:
    """Tasks per host, as Slurm counts them (`slurm_counts`); none where it says nothing.

    Raises:
        JobError: it says something else.
    """
    try:
        return slurm_counts(text) if text else []
    except ValueError as error:
        rule = "is not a list of counts such as 2(x3),1"
        raise job_error("SLURM_TASKS_PER_NODE", text, rule, "Give --slots N instead") from error


def _host_problems(name: str, slots: int) -> list[Problem]:
    problems = []
    if rule := host_name_rule(name):
        problems.append(Problem("SLURM_JOB_NODELIST", name, rule, "Ask for other hosts"))
    if not 1 <= slots <= MAX_SLOTS:
        rule = f"{name} needs from 1 to {MAX_SLOTS} slots"
        problems.append(Problem("slots", slots, rule, "Ask for --gpus-per-node=N, or give --slots N"))
    return problems
