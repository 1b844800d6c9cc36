"""The world of a job as data: its hosts, the ranks on each, and what they compute with.

`pipeline.cluster.world` finds it: in a hostfile, on this machine, or in a rank's environment.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Literal

LOCALHOST = "localhost"
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Host:
    """One machine of a job.

    Attributes:
        name: As in the hostfile (``host``, ``user@host`` or an address); ``localhost`` for this machine.
        slots: Ranks on it.
        devices: Their device numbers on that host, one per slot.
    """

    name: str
    slots: int
    devices: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.devices:
            object.__setattr__(self, "devices", tuple(range(self.slots)))
        if len(self.devices) != self.slots:
            raise ValueError(f"host {self.name}: {self.slots} slots, but devices {self.devices}")


@dataclass(frozen=True)
class World:
    """The ranks of a job.

    Attributes:
        hosts: In rank order: the first host carries the first ranks.
        device: What the ranks compute on.
        device_name: As the driver names it; None on CPU, and for hosts that were not asked.
        bf16_native: Whether that device has bf16 arithmetic. Assumed for hosts that were not asked.
        hostfile: The file the hosts come from, None for this machine.
    """

    hosts: tuple[Host, ...]
    device: Literal["cpu", "cuda"]
    device_name: str | None = None
    bf16_native: bool = False
    hostfile: str | None = None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return sum(host.slots for host in self.hosts)

    @property
    def is_local(self) -> bool:
        """Whether this machine is the only host."""
        return all(is_this_machine(host.name) for host in self.hosts)


def is_this_machine(name: str) -> bool:
    """Whether a hostfile's name means the machine this runs on, by its name alone."""
    return name in {LOCALHOST, LOOPBACK, socket.gethostname(), socket.gethostname().partition(".")[0]}
