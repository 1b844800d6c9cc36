"""A rank's place in the world that was checked, and where agents without a launch meet. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.base.problems import JobError, Problem
from pipeline.cluster.agent.coordinator_settings import DIRECT_BLOCKS, DIRECT_PORTS, FIRST_DIRECT_PORT
from pipeline.cluster.agent.launch_spec import LaunchSpec
from pipeline.cluster.rank_environment import RankEnvironment, read_rank_environment, try_port

# The deepspeed launcher's number of the host.
_CROSS_RANK = "CROSS_RANK"


def placed(spec: LaunchSpec, environ: Mapping[str, str]) -> RankEnvironment:
    """This rank's place in the world that was checked.

    The deepspeed launcher numbers the ranks of a host wrongly where hosts have unequal slots
    (``rank % local ranks``); the number is the place in the host's list.

    Raises:
        JobError: the launcher has made another world of it.
    """
    if not spec.hosts:
        return read_rank_environment(environ)
    # Launchers that know nothing of torch set no rendezvous; the coordinator names the real one.
    rendezvous = {"MASTER_ADDR": spec.address, "MASTER_PORT": str(spec.port)}
    found = read_rank_environment(rendezvous | dict(environ))
    problems = []
    if found.world_size != spec.world_size:
        rule = f"the world that was checked has {spec.world_size} ranks"
        problems.append(Problem("WORLD_SIZE", found.world_size, rule, "Start the ranks that were checked"))
        raise JobError(problems)
    host, local_rank, slots = spec.place(found.rank)
    name = spec.hosts[host][0]
    if found.local_size != slots:
        rule = f"rank {found.rank} belongs to host {name}, which was checked with {slots} ranks"
        problems.append(Problem("LOCAL_SIZE", found.local_size, rule, "Give every host its slots"))
    by_deepspeed = environ.get(_CROSS_RANK)
    if by_deepspeed not in (None, str(host)) or (by_deepspeed is None and found.local_rank != local_rank):
        rule = f"rank {found.rank} was checked as number {local_rank} on host {name}, and is elsewhere"
        problems.append(
            Problem("LOCAL_RANK", found.local_rank, rule, "Let the launcher fill one host after the other")
        )
    if problems:
        raise JobError(problems)
    return RankEnvironment(
        found.rank, found.world_size, local_rank, slots, found.master_addr, found.master_port
    )


def is_free_port(port: int) -> bool:
    """Whether torch's rendezvous could listen there."""
    try:
        try_port(port, reuse=True)
    except OSError:
        return False
    return True


def direct_ports(master_port: int) -> list[int]:
    """Where rank 0's agent listens, and the others look, without a launch: away from the rendezvous, beside
    which the next job's may be, and the same on every host.

    Jobs whose rendezvous are `DIRECT_BLOCKS` apart have the same ones; there is room for several.
    """
    first = FIRST_DIRECT_PORT + DIRECT_PORTS * (master_port % DIRECT_BLOCKS)
    return [port for port in range(first, first + DIRECT_PORTS) if port != master_port]


def direct_key(place: RankEnvironment) -> str:
    """Tells jobs without a launch apart: two on one host cannot have the same rendezvous port. It is no
    secret: no such thing is shared by processes that were started one by one."""
    return f"rendezvous {place.master_port}"
