"""Hosts without a common file system: which ranks share one, and the files that a host lacks before a load.

One folder's name may mean another disk on each host. A save writes what replicas have in common once, by one
of them. Optimizer shards are read by the rank alone that wrote them; everything else is read by its replicas
too, wherever they run.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.base.files import replaced_atomically
from pipeline.checkpoints.files import has_digest
from pipeline.checkpoints.folder import SEEN
from pipeline.checkpoints.manifest import Checkpoint, FileEntry
from pipeline.engine.agreement import gather_objects
from pipeline.parallel.context import Parallel
from pipeline.parallel.mesh import Mesh


@dataclass(frozen=True)
class FileSystems:
    """Which ranks write into the same file system.

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
        own = mesh.coordinates(rank)
        same = (
            other
            for other in self.members(self.leaders[rank])
            if mesh.coordinates(other)._replace(data=own.data, sequence=own.sequence) == own
        )
        return rank == next(same)


def find_file_systems(parallel: Parallel, folder: Path, local_rank: int) -> FileSystems:
    """Ask by a file: the first rank of each host writes one, and every rank looks whose it sees. Collective.

    Raises:
        OSError: the folder, which is made if it is missing, cannot be written. On the host's first rank.
        RuntimeError: on every rank alike: a rank does not even see what its own host wrote.
    """
    local_ranks = gather_objects(parallel, local_rank)
    token = gather_objects(parallel, secrets.token_hex(8))[0]
    names = {rank: f"{SEEN}{token}-{rank}" for rank, local in enumerate(local_ranks) if local == 0}
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
        seen_as = gather_objects(parallel, str(folder))[blind]
        raise RuntimeError(
            f"rank {blind} does not see in {seen_as} what the first rank of its host wrote there"
        )
    return FileSystems(leaders, host_numbers(local_ranks))


def host_numbers(local_ranks: Sequence[int]) -> tuple[int, ...]:
    """For each rank the number of its host, by the ranks' numbers on their hosts."""
    return tuple(accumulate((int(local == 0) for local in local_ranks[1:]), initial=0))


# In the names of the files that a rank keeps to itself.
_OWN = ("optim_states", "offloaded_tensors")
_BLOCK = 1 << 25  # bytes that are sent at once


def complete_hosts(parallel: Parallel, local_rank: int, checkpoint: Checkpoint) -> None:
    """Send every file but optimizer shards to the hosts that lack it. Collective.

    Raises:
        RuntimeError: on every rank: a host could not write one, or got something else.
    """
    if checkpoint.shared:
        return
    names = sorted(name for name in checkpoint.files if not any(own in name for own in _OWN))
    answers = gather_objects(parallel, (local_rank, checkpoint.present))
    failure = None
    for name in names:
        lacking = [rank for rank, (local, has) in enumerate(answers) if local == 0 and name not in has]
        if lacking:
            source = next(rank for rank, (_, has) in enumerate(answers) if name in has)
            receives = parallel.rank in lacking
            failed = _send(parallel, source, receives, checkpoint.path / name, checkpoint.files[name])
            failure = failure or failed
    if failures := [each for each in gather_objects(parallel, failure) if each]:
        raise RuntimeError(f"{checkpoint.path} could not be completed on every host: {failures[0]}")


def _send(parallel: Parallel, source: int, receives: bool, path: Path, entry: FileEntry) -> str | None:
    """Pass a file on; what went wrong on this rank, which takes part to the end nevertheless."""
    blocks = _blocks(parallel, source, path, entry.bytes)
    if not receives:
        for _ in blocks:
            pass
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced_atomically(path) as file:
            for block in blocks:
                file.write(block.numpy())
            file.flush()
            if not has_digest(Path(file.name), entry.digest):
                raise OSError(f"{path.name} arrived with another digest")
    except OSError as error:
        for _ in blocks:  # the others wait for this rank at each of them
            pass
        return f"rank {parallel.rank}: {type(error).__name__}: {error}"
    return None


def _blocks(parallel: Parallel, source: int, path: Path, length: int) -> Iterator[Tensor]:
    """The content of a file that rank `source` has, block by block, uint8, on every rank. Collective."""
    file = path.open("rb") if parallel.rank == source else None
    for start in range(0, length, _BLOCK):
        block = torch.empty(min(_BLOCK, length - start), dtype=torch.uint8)
        if file is not None:
            file.readinto(memoryview(block.numpy()))
        dist.broadcast(block, source, group=parallel.control_group)
        yield block
    if file is not None:
        file.close()
