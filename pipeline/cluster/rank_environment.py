"""What a launcher tells one rank, read from the environment in this one place.

    deepspeed, torchrun, accelerate    RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_SIZE or LOCAL_WORLD_SIZE,
                                       MASTER_ADDR, MASTER_PORT
    mpirun, mpiexec, srun              their own names (`Manager`), and no rendezvous: MASTER_ADDR
                                       and MASTER_PORT count where they are set, else they are derived
    none of them                       a job of one rank

One launcher may start another on each host, torchrun under srun for one. The innermost counts; it is known by
what only it sets. Numbers without such a sign must agree with the manager's.

mpirun, mpiexec and srun start the same program on every host and set no rendezvous. A port is derived from
the job's id where the manager gives one: all ranks come to the same, and two jobs on one host hardly ever.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from pipeline.base.problems import JobError, Problem, job_error
from pipeline.job.world import LOOPBACK

T = TypeVar("T")
_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_REQUIRED = (*_PLACE, "MASTER_ADDR", "MASTER_PORT")
# LOCAL_SIZE: the deepspeed launcher. LOCAL_WORLD_SIZE: torchrun and accelerate.
_LOCAL_SIZES = ("LOCAL_SIZE", "LOCAL_WORLD_SIZE")
# Set by the deepspeed launcher (with LOCAL_SIZE), and by torchrun and accelerate, and by nobody else.
_LAUNCHER_SIGNS = ("CROSS_RANK", "TORCHELASTIC_RUN_ID")
# accelerate's own start of a single process sets the first; for more than one process also the second.
_SEVERAL_BY_ACCELERATE = ("ACCELERATE_MIXED_PRECISION", "MASTER_ADDR")
_ANY_LAUNCHER = "Start with deepspeed, torchrun, mpirun or srun, which set it"
# What MPI's own starts set.
_OF_MANAGERS = ("OMPI_", "PMI_", "PMIX_", "MPI_LOCAL")
MOST_RANKS = 2**20
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
        number = int.from_bytes(hashlib.sha256(os.fsencode(f"{self.name} {name}")).digest()[:8], "big")
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


def without_managers(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for a rank whose place is known: DeepSpeed compares it with what MPI's mpirun and
    mpiexec set, and a shell may have that from another job."""
    return {name: value for name, value in environ.items() if not name.startswith(_OF_MANAGERS)}


def slurm_counts(text: str) -> list[int]:
    """Slurm's short form of one number of tasks per node: ``2(x3),1`` is 2, 2, 2, 1.

    Raises:
        ValueError: it is something else.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,6})\))?", part)
        if match is None:
            raise ValueError(f"{part!r} is no number of tasks")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def slurm_local_size(tasks_per_node: str, node: int) -> int:
    """Tasks on node number `node` of a step.

    Raises:
        ValueError: `tasks_per_node` is no list as `slurm_counts` reads it, or there is no such node.
    """
    counts = slurm_counts(tasks_per_node)
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


@dataclass(frozen=True)
class RankEnvironment:
    """One rank's place in the job.

    Attributes:
        rank: Global rank, 0 .. world_size - 1.
        world_size: Ranks of the job.
        local_rank: Rank among those of this host; the number of its visible device.
        local_size: Ranks on this host.
        master_addr: Host of the rendezvous store (that of rank 0).
        master_port: Its port.
    """

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    master_addr: str
    master_port: int

    def variables(self) -> dict[str, str]:
        """The variables torch's ``env://`` rendezvous and DeepSpeed read, for a start without a launcher."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_SIZE": str(self.local_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


def read_rank_environment(environ: Mapping[str, str] = os.environ) -> RankEnvironment:
    """This rank's place; without a launcher, the only rank of a job of one with a free port.

    Raises:
        JobError: some of the variables are set and others are not, a value is impossible, or two launchers
            contradict each other.
    """
    managers = () if any(sign in environ for sign in _LAUNCHER_SIGNS) else find_managers(environ)
    if len(managers) > 1:
        names = " and ".join(manager.name for manager in managers)
        rule = f"{names} both claim to have started this process, and contradict each other"
        remedy = "Start with one of them, in a shell that has no variables of the other"
        raise job_error(managers[-1].rank, environ[managers[-1].rank], rule, remedy)
    if managers:
        return _checked(_from_manager(managers[0], environ))
    if not any(name in environ for name in _PLACE):
        if all(name in environ for name in _SEVERAL_BY_ACCELERATE):
            rule = "accelerate was asked for several processes and has started one, as it does without GPUs"
            remedy = "Use --multi_gpu, which starts them on a CPU, too; or --mpirun_hostfile, or torchrun"
            raise job_error("accelerate launch", "--num_processes", rule, remedy)
        return RankEnvironment(0, 1, 0, 1, LOOPBACK, free_port())
    return _checked(_from_launcher(environ))


def _from_launcher(environ: Mapping[str, str]) -> RankEnvironment:
    rule = f"a launcher sets all of {', '.join(_REQUIRED)}"
    remedy = "Start with deepspeed or torchrun, or unset the others"
    missing = [Problem(name, None, rule, remedy) for name in _REQUIRED if name not in environ]
    numbers = _numbers(environ, (*_PLACE, "MASTER_PORT", *_LOCAL_SIZES), missing)
    given = [numbers[name] for name in _LOCAL_SIZES if name in numbers]
    return RankEnvironment(
        numbers["RANK"],
        numbers["WORLD_SIZE"],
        numbers["LOCAL_RANK"],
        # Without a count of local ranks (a hand-made environment) only one host can be meant.
        given[0] if given else numbers["WORLD_SIZE"],
        environ["MASTER_ADDR"],
        numbers["MASTER_PORT"],
    )


def _from_manager(manager: Manager, environ: Mapping[str, str]) -> RankEnvironment:
    rule = f"{manager.name} sets {', '.join(manager.variables)}"
    missing = [
        Problem(name, None, rule, "Do not unset it") for name in manager.variables if name not in environ
    ]
    numbers = _numbers(environ, (*manager.variables, *_PLACE, "MASTER_PORT"), missing)
    place = [numbers[name] for name in (manager.rank, manager.world_size, manager.local_rank)]
    contradictions = [
        _contradiction(manager, name, numbers[name], number)
        for name, number in zip(_PLACE, place, strict=True)
        if numbers.get(name, number) != number
    ]
    if contradictions:
        raise JobError(contradictions)
    if manager is SLURM:
        node = numbers["SLURM_NODEID"]
        local_size = _slurm_list(environ, SLURM_TASKS, lambda text: slurm_local_size(text, node))
    else:
        local_size = numbers[manager.local_size]
    address, port = _rendezvous(manager, environ, one_host=local_size == numbers[manager.world_size])
    return RankEnvironment(*place, local_size, address, port)


def _contradiction(manager: Manager, name: str, given: int, number: int) -> Problem:
    rule = f"{manager.name} started this process and says {number}"
    return Problem(name, given, rule, f"Unset {name} before the start, or start with another launcher")


def _rendezvous(manager: Manager, environ: Mapping[str, str], one_host: bool) -> tuple[str, int]:
    """Where rank 0 listens: as the environment says, else derived.

    Raises:
        JobError: it does not say, and it cannot be derived.
    """
    problems = []
    address = environ.get("MASTER_ADDR")
    if address is None and manager is SLURM:
        address = _slurm_list(environ, SLURM_NODES, slurm_first_host)
    elif address is None and one_host:
        address = LOOPBACK
    elif address is None:
        rule = f"{manager.name} does not say on which host rank 0 is"
        remedy = f"Name the first host: {manager.give.format(name='MASTER_ADDR', value='HOST')}"
        problems.append(Problem("MASTER_ADDR", None, rule, remedy))
    port = int(environ["MASTER_PORT"]) if "MASTER_PORT" in environ else manager.port(environ)
    if port is None:
        rule = f"{manager.name} gives its ranks nothing to derive a port from"
        remedy = f"Choose a free one: {manager.give.format(name='MASTER_PORT', value=29500)}"
        problems.append(Problem("MASTER_PORT", None, rule, remedy))
    if problems:
        raise JobError(problems)
    assert address is not None and port is not None
    return address, port


def _slurm_list(environ: Mapping[str, str], name: str, read: Callable[[str], T]) -> T:
    """What `read` finds in one of the lists in which Slurm describes a step.

    Raises:
        JobError: the list is missing or cannot be understood.
    """
    text = environ.get(name)
    try:
        if text is None:
            raise ValueError("it is missing")
        return read(text)
    except ValueError as error:
        rule = f"the place of a rank in a Slurm step is read from it, and {error}"
        remedy = "Start with srun; or set MASTER_ADDR and MASTER_PORT and use torchrun on each host"
        raise job_error(name, text, rule, remedy) from error


def _numbers(environ: Mapping[str, str], names: tuple[str, ...], problems: list[Problem]) -> dict[str, int]:
    """The given variables as numbers.

    Raises:
        JobError: with `problems` and one for each that is no number.
    """
    numbers: dict[str, int] = {}
    for name in names:
        if name not in environ:
            continue
        if environ[name].isdecimal() and len(environ[name]) < 10:
            numbers[name] = int(environ[name])
        else:
            problems.append(
                Problem(
                    name, environ[name], "must be a whole number, at least 0 and below 1e9", _ANY_LAUNCHER
                )
            )
    if problems:
        raise JobError(problems)
    return numbers


def _checked(found: RankEnvironment) -> RankEnvironment:
    """The place, if there can be such a one.

    Raises:
        JobError: there cannot.
    """
    world_size, local_size = found.world_size, found.local_size
    checks = (
        ("WORLD_SIZE", world_size, world_size <= MOST_RANKS, f"must be at most {MOST_RANKS:,}"),
        ("RANK", found.rank, found.rank < world_size, f"must be below WORLD_SIZE = {world_size}"),
        ("LOCAL_RANK", found.local_rank, found.local_rank < local_size,
         f"must be below this host's {local_size} ranks"),
        ("LOCAL_SIZE", local_size, local_size <= world_size, f"must be at most WORLD_SIZE = {world_size}"),
    )  # fmt: skip
    problems = [Problem(name, value, rule, _ANY_LAUNCHER) for name, value, holds, rule in checks if not holds]
    if not 1 <= found.master_port <= 65535:
        rule, remedy = "a port is from 1 to 65535", "Give another port"
        problems.append(Problem("MASTER_PORT", found.master_port, rule, remedy))
    if not found.master_addr.strip():
        rule = "is empty: the ranks meet at the host of rank 0"
        problems.append(Problem("MASTER_ADDR", found.master_addr, rule, "Give that host's name or address"))
    elif local_size < world_size and is_loopback(found.master_addr):
        rule = f"means another machine on every host, and {world_size - local_size} ranks are on others"
        remedy = "Give the name or address by which they reach the host of rank 0"
        problems.append(Problem("MASTER_ADDR", found.master_addr, rule, remedy))
    if problems:
        raise JobError(problems)
    return found


def is_loopback(address: str) -> bool:
    """Whether an address or name never leaves its own machine."""
    return address in ("localhost", "::1") or address.startswith("127.")


def free_port() -> int:
    """A TCP port that nobody on this machine uses at the moment.

    It lies below the ports that systems give to outgoing connections (from 32768 on Linux), one of which
    could take it between this call and the moment when rank 0 listens.

    Raises:
        OSError: a hundred tries found none.
    """
    chance = random.SystemRandom()  # two jobs that start at once, with equal seeds, must not try the same
    for _ in range(100):
        port = chance.randrange(FIRST_PORT, FIRST_OUTGOING_PORT)
        with contextlib.suppress(OSError):
            try_port(port)
            return port
    raise OSError(f"no free port found between {FIRST_PORT} and {FIRST_OUTGOING_PORT}")


def try_port(port: int, reuse: bool = False) -> None:
    """See whether somebody could listen on all of this machine's addresses, those of IPv6 included.

    Args:
        reuse: As servers do, on a port whose last connections have just ended.

    Raises:
        OSError: the port is taken.
    """
    dual = socket.has_dualstack_ipv6()
    with socket.socket(socket.AF_INET6 if dual else socket.AF_INET, socket.SOCK_STREAM) as probe:
        if dual:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        if reuse:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("", port))
