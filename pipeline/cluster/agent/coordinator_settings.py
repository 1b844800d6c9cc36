"""What a coordinator and its agents agree on: times, ports, and what a start is like. No torch."""

from __future__ import annotations

from dataclasses import dataclass

# Ports of a start that rank 0's agent may listen on where no launch gives an address: 8 of 11,000 to 14,999,
# below every port that is derived or drawn for a rendezvous (`process_managers`).
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
            is free there. Ignored for a start without a launch, whose launcher has said it.
        environment: Variables for every rank that may not stand on a command line.
        arguments: The job's, for every rank; of any length, and changed by no shell.
        start_seconds: How long the first rank may take to report; None: no limit for any of them, since the
            user starts the hosts one by one.
        key_is_public: Everybody can know the key: there was no launch that could have drawn one.
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
