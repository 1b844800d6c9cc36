"""Hosts without a common file system: each gets the model's files that another one wrote, before a load.

A save writes what replicas have in common once, by one of them. Optimizer shards are read by the rank alone
that wrote them; everything else is read by its replicas too, wherever they run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.checkpoints.digests import digest_of
from pipeline.checkpoints.manifest import Checkpoint, FileEntry, size_of
from pipeline.engine.agreement import gather_objects
from pipeline.parallel.context import Parallel

# In the names of the files that a rank keeps to itself.
_OWN = ("optim_states", "offloaded_tensors")
_PIECE = 1 << 25  # bytes that are sent at once


def complete_hosts(parallel: Parallel, local_rank: int, checkpoint: Checkpoint) -> None:
    """Send every file but optimizer shards to the hosts that lack it. Collective.

    Raises:
        RuntimeError: on every rank: a host could not write one, or got something else.
    """
    if checkpoint.shared:
        return
    names = sorted(name for name in checkpoint.files if not any(own in name for own in _OWN))
    seen = {name for name in names if size_of(checkpoint.path / name) == checkpoint.files[name].bytes}
    answers = gather_objects(parallel, (local_rank, seen))
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
    pieces = _pieces(parallel, source, path, entry.bytes)
    if not receives:
        for _ in pieces:
            pass
        return None
    partial = path.with_name(f"{path.name}.received")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            for piece in pieces:
                file.write(piece.numpy())
        if digest_of(partial, entry.digest.partition(":")[0]) != entry.digest:
            raise OSError(f"{path.name} arrived with another digest")
        partial.replace(path)
    except OSError as error:
        for _ in pieces:  # the others wait for this rank at each of them
            pass
        partial.unlink(missing_ok=True)
        return f"rank {parallel.rank}: {type(error).__name__}: {error}"
    return None


def _pieces(parallel: Parallel, source: int, path: Path, length: int) -> Iterator[Tensor]:
    """The content of a file that rank `source` has, piece by piece, uint8, on every rank. Collective."""
    file = path.open("rb") if parallel.rank == source else None
    for start in range(0, length, _PIECE):
        piece = torch.empty(min(_PIECE, length - start), dtype=torch.uint8)
        if file is not None:
            file.readinto(memoryview(piece.numpy()))
        dist.broadcast(piece, source, group=parallel.control_group)
        yield piece
    if file is not None:
        file.close()
