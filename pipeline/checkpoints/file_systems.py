"""Which ranks write into the same file system: one folder's name may mean another disk on each host."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

from pipeline.checkpoints.folder import SEEN
from pipeline.engine.agreement import gather_objects
from pipeline.parallel.context import Parallel
from pipeline.parallel.mesh import Mesh


@dataclass(frozen=True)
class FileSystems:
    """Where the ranks' output lies.

    Attributes:
        leaders: For each rank the lowest rank that writes into the same file system. A leader does there what
            is done once: it clears up, writes the manifest and `latest`.
        hosts: For each rank the number of its host, counted from 0 in rank order.
    """

    leaders: tuple[int, ...]
    hosts: tuple[int, ...]

    @property
    def shared(self) -> bool:
        """Whether all ranks write into one."""
        return set(self.leaders) == {0}

    @property
    def num_hosts(self) -> int:
        return self.hosts[-1] + 1

    def members(self, leader: int) -> list[int]:
        """The ranks that write where `leader` does."""
        return [rank for rank, each in enumerate(self.leaders) if each == leader]

    def is_holder(self, mesh: Mesh, rank: int) -> bool:
        """Whether this rank writes its weights for the others in its file system that have the same."""
        place = mesh.coordinates(rank)
        same = (
            other
            for other in self.members(self.leaders[rank])
            if mesh.coordinates(other)._replace(data=place.data, sequence=place.sequence) == place
        )
        return rank == next(same)


def find_file_systems(parallel: Parallel, folder: Path, local_rank: int) -> FileSystems:
    """Ask by a file: the first rank of each host writes one, and every rank looks whose it sees. Collective.

    Raises:
        OSError: the folder, which is made if it is missing, cannot be written. On the host's first rank.
        RuntimeError: on every rank alike: a rank does not even see what its own host wrote.
    """
    firsts = [local == 0 for local in gather_objects(parallel, local_rank)]
    hosts = tuple(sum(firsts[: rank + 1]) - 1 for rank in range(len(firsts)))
    token = gather_objects(parallel, secrets.token_hex(8))[0]
    names = {rank: f"{SEEN}{token}-{rank}" for rank, first in enumerate(firsts) if first}
    own = folder / names[parallel.rank] if parallel.rank in names else None
    failure = None
    try:
        if own is not None:
            folder.mkdir(parents=True, exist_ok=True)
            own.touch()
    except OSError as error:
        failure = f"rank {parallel.rank} cannot write into {folder}: {type(error).__name__}: {error}"
    failures = [text for text in gather_objects(parallel, failure) if text]
    seen = min((rank for rank, name in names.items() if (folder / name).exists()), default=-1)
    leaders = tuple(gather_objects(parallel, seen))
    if own is not None and failure is None:
        own.unlink(missing_ok=True)
    if failures:
        raise OSError(failures[0])
    if -1 in leaders:
        blind = leaders.index(-1)
        place = gather_objects(parallel, str(folder))[blind]
        raise RuntimeError(
            f"rank {blind} does not see in {place} what the first rank of its host wrote there"
        )
    return FileSystems(leaders, hosts)
