"""What a launcher tells one rank, read from the environment in this one place.

The deepspeed launcher, torchrun and accelerate all set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
MASTER_PORT. They differ in the name of the number of ranks on a host.
"""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.job.problems import JobError, Problem

LOOPBACK = "127.0.0.1"
_FIRST_PORT, _FIRST_OUTGOING_PORT = 15_000, 32_768
_REQUIRED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# LOCAL_SIZE: the deepspeed launcher. LOCAL_WORLD_SIZE: torchrun and accelerate.
_LOCAL_SIZES = ("LOCAL_SIZE", "LOCAL_WORLD_SIZE")


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
        JobError: some of the variables are set and others are not, or a value is impossible.
    """
    if not any(name in environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return RankEnvironment(0, 1, 0, 1, LOOPBACK, free_port())
    problems = [_missing(name) for name in _REQUIRED if name not in environ]
    numbers: dict[str, int] = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", *_LOCAL_SIZES):
        if name not in environ:
            continue
        if environ[name].isdecimal():
            numbers[name] = int(environ[name])
        else:
            problems.append(_wrong(name, environ[name], "must be a whole number, at least 0"))
    if problems:
        raise JobError(problems)
    return _assemble(numbers, environ["MASTER_ADDR"])


def _assemble(numbers: Mapping[str, int], master_addr: str) -> RankEnvironment:
    world_size, local_rank = numbers["WORLD_SIZE"], numbers["LOCAL_RANK"]
    given = [numbers[name] for name in _LOCAL_SIZES if name in numbers]
    # Without a count of local ranks (a hand-made environment) only one host can be meant.
    local_size = given[0] if given else world_size
    problems = []
    if numbers["RANK"] >= world_size:
        problems.append(_wrong("RANK", numbers["RANK"], f"must be below WORLD_SIZE = {world_size}"))
    if local_rank >= local_size:
        problems.append(_wrong("LOCAL_RANK", local_rank, f"must be below this host's {local_size} ranks"))
    if local_size > world_size:
        problems.append(_wrong("LOCAL_SIZE", local_size, f"must be at most WORLD_SIZE = {world_size}"))
    if problems:
        raise JobError(problems)
    return RankEnvironment(
        numbers["RANK"], world_size, local_rank, local_size, master_addr, numbers["MASTER_PORT"]
    )


def _missing(name: str) -> Problem:
    given = "a launcher sets all of " + ", ".join(_REQUIRED)
    return Problem(name, None, given, "Start with deepspeed or torchrun, or unset the others")


def _wrong(name: str, value: object, rule: str) -> Problem:
    return Problem(name, value, rule, "Start with deepspeed or torchrun, which set it")


def free_port() -> int:
    """A TCP port that nobody on this machine uses at the moment.

    It lies below the ports that systems give to outgoing connections (from 32768 on Linux), one of which
    could take it between this call and the moment when rank 0 listens.

    Raises:
        OSError: a hundred tries found none.
    """
    chance = random.SystemRandom()  # two jobs that start at once, with equal seeds, must not try the same
    for _ in range(100):
        port = chance.randrange(_FIRST_PORT, _FIRST_OUTGOING_PORT)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port found between {_FIRST_PORT} and {_FIRST_OUTGOING_PORT}")
