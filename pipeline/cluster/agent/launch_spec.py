"""What a launch hands to every rank, as one argument that passes through any number of shells. No torch.

    pretrain.py --local_rank=1 --launch_spec=eJyrVkosSs...

Launchers send the command line through one or two shells, which drop empty arguments, expand ``$``, split at
blanks and lose quotes; pdsh replaces ``%n`` besides. Letters, digits, ``-``, ``_`` and ``=`` survive all of
them. No credential is in a spec: the command line can be read by everybody on a host. Nor are the job's
arguments, of any length, which the coordinator hands out: pdsh makes one argument of the whole line, and one
argument may have 128 KiB.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

OPTION = "--launch_spec="


@dataclass(frozen=True)
class LaunchSpec:
    """The launch's word to a rank.

    Attributes:
        hosts: (name, slots) of the checked world, in rank order; empty without a launch.
        address, port: Where the launch listens; empty where rank 0's agent does (`rank_place.direct_ports`).
        key_file: Path of the key on every host (`pipeline.cluster.agent.credential`); empty without a launch.
        failure_timeout: Seconds within which the ranks end when something they need is gone.
        step_timeout: Seconds that a step may take; None: from the measured ones.
        batch: (train batch, micro-batch, accumulation steps) in place of those that the JSON gives; empty for
            the JSON's own.
    """

    hosts: tuple[tuple[str, int], ...] = ()
    address: str = ""
    port: int = 0
    key_file: str = ""
    failure_timeout: float = 60.0
    step_timeout: float | None = None
    batch: tuple[int, ...] = field(default=())

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
    rest = [argument for argument in arguments if not argument.startswith(OPTION)]
    given = [argument for argument in arguments if argument.startswith(OPTION)]
    if not given:
        return LaunchSpec(), rest
    values = unpack(given[-1].removeprefix(OPTION))
    values["hosts"] = tuple((name, slots) for name, slots in values["hosts"])
    spec = LaunchSpec(**{key: tuple(v) if isinstance(v, list) else v for key, v in values.items()})
    return spec, rest


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
