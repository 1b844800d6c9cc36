"""The variables by which mpirun, mpiexec and srun number the processes that they start.

They start the same program on every host and set no rendezvous. A port is derived from the job's id where the
manager gives one: all ranks come to the same, and two jobs on one host hardly ever.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

FIRST_PORT, FIRST_OUTGOING_PORT = 15_000, 32_768


@dataclass(frozen=True)
class Manager:
    """One kind of process manager.

    Attributes:
        name: As users call it.
        rank, world_size, local_rank: Names of its variables.
        local_size: Likewise; for Slurm the node's number, from which it is worked out (`slurm_local_size`).
        job: Variables that together name this start, and no other on the same host at the time.
        give: How a variable is handed to all ranks, for a remedy.
    """

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_size: str
    job: tuple[str, ...]
    give: str

    @property
    def variables(self) -> tuple[str, ...]:
        """What it sets in every process."""
        return (self.rank, self.world_size, self.local_rank, self.local_size)

    def port(self, environ: Mapping[str, str]) -> int | None:
        """A port for this start; None if nothing names it."""
        if any(name not in environ for name in self.job) or not self.job:
            return None
        name = "/".join(environ[variable] for variable in self.job)
        number = int.from_bytes(hashlib.sha256(f"{self.name} {name}".encode()).digest()[:8], "big")
        return FIRST_PORT + number % (FIRST_OUTGOING_PORT - FIRST_PORT)


OPEN_MPI = Manager(
    "mpirun (Open MPI)",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    ("PMIX_NAMESPACE",),
    "mpirun -x {name}={value}",
)
# MPICH, Intel MPI and MVAPICH start processes with it. It gives a start no name.
HYDRA = Manager(
    "mpiexec (Hydra)",
    "PMI_RANK",
    "PMI_SIZE",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
    (),
    "mpiexec -genv {name} {value}",
)
# The step's variables: those of the allocation are set in a batch script, too, which is no rank.
SLURM = Manager(
    "srun (Slurm)",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    "srun --export=ALL,{name}={value}",
)
SLURM_TASKS, SLURM_NODES = "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST"


def find_managers(environ: Mapping[str, str]) -> tuple[Manager, ...]:
    """Who started this process: none, one, or several that do not tell which is inside the other.

    mpirun and mpiexec may use srun to reach the hosts of an allocation: then what srun says concerns their
    own helpers. Slurm itself sets PMI_RANK for programs that use its PMI-2.
    """
    inner = [OPEN_MPI] if OPEN_MPI.rank in environ else []
    if HYDRA.rank in environ and HYDRA.local_rank in environ:
        inner.append(HYDRA)
    if inner:
        return tuple(inner)
    return (SLURM,) if SLURM.rank in environ and SLURM.world_size in environ else ()


def slurm_local_size(tasks_per_node: str, node: int) -> int:
    """Tasks on node number `node` of a step, from Slurm's short form: ``2(x3),1`` is 2, 2, 2, 1.

    Raises:
        ValueError: the text has another form, or no such node.
    """
    counts: list[int] = []
    for part in tasks_per_node.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(f"{part!r} is no number of tasks")
        counts += [int(match[1])] * int(match[2] or 1)
    if node >= len(counts):
        raise ValueError(f"it has {len(counts)} nodes, not number {node}")
    return counts[node]


def slurm_first_host(nodes: str) -> str:
    """The first name of Slurm's short form: ``rack[07-09,12]n[1,3],login`` begins with rack07n1.

    Raises:
        ValueError: the text has another form.
    """
    first = re.match(r"(?:[^\[\],]|\[[^\[\]]*\])+", nodes)
    if first is None:
        raise ValueError("it names no host")
    name = re.sub(r"\[([^-,\]]+)[^\]]*\]", r"\1", first[0])
    if not re.fullmatch(r"[A-Za-z0-9._-]+", name):
        raise ValueError(f"{name!r} is no host name")
    return name
