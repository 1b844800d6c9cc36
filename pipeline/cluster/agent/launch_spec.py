"""What a launch decides before its ranks start, for agents and coordinator.

    pretrain.py --local_rank=1 --launch_spec=eJyrVkosSs...

Agents get it as one argument that passes through any number of shells: launchers send the command line
through one or two, which drop empty arguments, expand ``$``, split at blanks and lose quotes; pdsh replaces
``%n`` besides. Letters, digits, ``-``, ``_`` and ``=`` survive all of them. No credential is in it: the
command line can be read by everybody on a host. Nor are the job's arguments, of any length, which the
coordinator hands out: pdsh makes one argument of the whole line, and one argument may have 128 KiB.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pipeline.base.problems import JobError, Problem, job_error
from pipeline.cluster.agent.host_inquiry import Inquiry
from pipeline.cluster.rank_environment import RankEnvironment, read_rank_environment, try_port

OPTION = "--launch_spec="


@dataclass(frozen=True)
class LaunchSpec:
    """What a launch passes to the agent of every rank.

    Attributes:
        hosts: (name, slots) of the checked world, in rank order; empty without a launch.
        address, port: Where the launch listens; empty where rank 0's agent does (`direct_ports`).
        key_file: Path of the key on every host (`pipeline.cluster.agent.handshake`); empty without a launch.
        failure_timeout: Seconds within which the ranks end when something they need is gone.
        step_timeout: Seconds that a step may take; None: from the measured ones.
        batch: (train batch, micro-batch, accumulation steps) in place of those that the JSON gives; empty for
            the JSON's own.
        command: What the user typed before the job's options; empty without a launch.
    """

    hosts: tuple[tuple[str, int], ...] = ()
    address: str = ""
    port: int = 0
    key_file: str = ""
    failure_timeout: float = 60.0
    step_timeout: float | None = None
    batch: tuple[int, ...] = ()
    command: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        return sum(slots for _, slots in self.hosts)

    def place(self, rank: int) -> tuple[int, int, int]:
        """(host's number, rank on it, ranks on it) of a global rank."""
        first = 0
        for number, (_, slots) in enumerate(self.hosts):
            if rank < first + slots:
                return number, rank - first, slots
            first += slots
        raise ValueError(f"rank {rank} is not one of {self.world_size}")


def encode(spec: LaunchSpec) -> str:
    """The argument that carries it."""
    return OPTION + pack(asdict(spec))


def split_launch_spec(arguments: Sequence[str]) -> tuple[LaunchSpec, list[str]]:
    """The spec of a command line, and the other arguments: what launchers add, and the job's, if it was
    started without a coordinator.

    Raises:
        ValueError: it was cut on its way.
    """
    values, rest = unpacked_option(arguments, OPTION)
    return LaunchSpec(**values or {}), rest


def unpacked_option(arguments: Sequence[str], option: str) -> tuple[dict[str, Any] | None, list[str]]:
    """The fields that follow `option`, lists as tuples, None where it is not given; and the other arguments.

    Raises:
        ValueError: the option was cut on its way.
    """
    rest = [argument for argument in arguments if not argument.startswith(option)]
    given = [argument for argument in arguments if argument.startswith(option)]
    if not given:
        return None, rest
    values = unpack(given[-1].removeprefix(option))
    values["hosts"] = [tuple(host) for host in values["hosts"]]
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}, rest


def pack(values: dict[str, Any]) -> str:
    """A JSON object as one word that means nothing to a shell."""
    return base64.urlsafe_b64encode(zlib.compress(json.dumps(values).encode())).decode()


def unpack(word: str) -> dict[str, Any]:
    """What `pack` got.

    Raises:
        ValueError: the word is not whole.
    """
    try:
        values = json.loads(zlib.decompress(base64.urlsafe_b64decode(word)))
    except (ValueError, zlib.error) as error:
        raise ValueError(f"the launch's argument did not arrive whole ({error})") from error
    if not isinstance(values, dict):
        raise ValueError("the launch's argument is no object")
    return values


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
    if found.world_size != spec.world_size:
        rule = f"the world that was checked has {spec.world_size} ranks"
        raise job_error("WORLD_SIZE", found.world_size, rule, "Start the ranks that were checked")
    host, local_rank, slots = spec.place(found.rank)
    name, problems = spec.hosts[host][0], []
    if found.local_size != slots:
        rule = f"rank {found.rank} belongs to host {name}, which was checked with {slots} ranks"
        problems.append(Problem("LOCAL_SIZE", found.local_size, rule, "Give every host its slots"))
    by_deepspeed = environ.get(_CROSS_RANK)
    if by_deepspeed not in (None, str(host)) or (by_deepspeed is None and found.local_rank != local_rank):
        rule = f"rank {found.rank} was checked as number {local_rank} on host {name}, and is in another place"
        remedy = "Let the launcher fill one host after the other"
        problems.append(Problem("LOCAL_RANK", found.local_rank, rule, remedy))
    if problems:
        raise JobError(problems)
    return replace(found, local_rank=local_rank, local_size=slots)


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


# Ports of a start that rank 0's agent may listen on where no launch gives an address: 8 of 11,000 to 14,999,
# below every port that is derived or drawn for a rendezvous (`rank_environment`).
FIRST_DIRECT_PORT, DIRECT_PORTS, DIRECT_BLOCKS = 11_000, 8, 500
# For the first rank to report: launchers import torch, which a cold file system takes its time to give out.
# The others follow within the failure time-out.
START_SECONDS = 300.0


@dataclass(frozen=True)
class Limits:
    """Times that follow from the failure time-out, in seconds.

    Attributes:
        beat: Between two signs of life.
        silence: Without a sign of life, the other side is gone.
        grace: For ranks to end by themselves after a peer has failed, before they are killed.
    """

    beat: float
    silence: float
    grace: float

    @classmethod
    def of(cls, failure_timeout: float) -> Limits:
        """They add up to less than the time-out, with room for the kill and the way."""
        return cls(min(5.0, failure_timeout / 12), failure_timeout / 2, min(10.0, failure_timeout / 6))


@dataclass(frozen=True)
class CoordinatorSettings:
    """What a coordinator must know of its start.

    Attributes:
        world_size: Ranks to expect.
        key: What an agent must hold to be heard.
        master_addr, master_port: Rendezvous as the user gave it; None: rank 0's own address and a port that
            is free there. Ignored for a start without a launch, whose launcher has set it.
        environment: Variables for every rank that may not be on a command line.
        arguments: The job's, for every rank; of any length, and changed by no shell.
        start_seconds: How long the first rank may take to report; None: no limit for any of them, since the
            user starts the hosts one by one.
        key_is_public: Everybody can know the key: there was no launch that could have drawn one.
        inquiry: What hosts are asked before a rank starts; None: nothing.
    """

    world_size: int
    key: str
    failure_timeout: float
    step_timeout: float | None
    master_addr: str | None = None
    master_port: int | None = None
    environment: tuple[tuple[str, str], ...] = ()
    arguments: tuple[str, ...] = ()
    start_seconds: float | None = START_SECONDS
    key_is_public: bool = False
    inquiry: Inquiry | None = None
