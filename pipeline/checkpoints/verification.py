"""The verification of a checkpoint by digests, spread over the ranks, before any of its files is unpickled.

Each file is read by one rank that sees it; where hosts do not share a file system, by a rank of the host that
wrote it. Ranks read for a few seconds, then exchange how far they are and what they have found: no
rank waits in a collective for longer than that, however large the checkpoint is.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.base.problems import JobError, job_error
from pipeline.base.words import few
from pipeline.checkpoints.files import BLOCK, digest_steps
from pipeline.checkpoints.hosts import host_numbers
from pipeline.checkpoints.manifest import Checkpoint
from pipeline.checkpoints.resume import NOTHING, Candidates, Selection, candidates_of, continuation_problems
from pipeline.checkpoints.torch_file import foreign_names, foreign_problem
from pipeline.engine.agreement import gather_objects
from pipeline.job.job import Job
from pipeline.parallel.context import Parallel

logger = logging.getLogger(__name__)

ROUND_SECONDS = 5.0
PICKLED = ".pt"


@dataclass(frozen=True)
class Agreed(Selection):
    """What all ranks resume from.

    Attributes:
        verified: False: a stop came before its digests had been compared.
    """

    verified: bool = True


class VerificationStopped(Exception):
    """Some rank was asked to stop before a checkpoint was verified. Raised on every rank alike."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(str(checkpoint.path))
        self.checkpoint = checkpoint


@dataclass(frozen=True)
class Reading:
    """How far a rank is.

    Attributes:
        bytes: Read so far.
        done: Nothing is left.
        failure: What is wrong with a file of it, None so far.
        foreign: Things that its files would call, with one file that does.
    """

    bytes: int = 0
    done: bool = False
    failure: str | None = None
    foreign: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Verifier:
    """Verifies checkpoints on all ranks. Its methods are collective.

    Attributes:
        local_rank: This rank's number on its host.
        allowed: Names that files may ask for beyond the pipeline's own.
        stopped: Whether this rank was asked to stop: then nothing will be loaded, and it gives up.
    """

    parallel: Parallel
    local_rank: int
    allowed: Collection[str] = ()
    stopped: Callable[[], bool] = lambda: False

    def failure(self, checkpoint: Checkpoint) -> str | None:
        """What is wrong with the checkpoint, the same on every rank; None if every digest matches.

        Raises:
            JobError: on every rank: its files are whole, but would call what is not allowed.
            VerificationStopped: a stop came before that was seen.
        """
        readers = self._readers(checkpoint)
        if missing := [name for name, ranks in readers.items() if not ranks]:
            return f"misses {few(missing)} on the host that wrote it"
        mine = _shares(checkpoint, readers)[self.parallel.rank]
        return self._agree(checkpoint, _read(checkpoint, mine, self.allowed))

    def _readers(self, checkpoint: Checkpoint) -> dict[str, Sequence[int]]:
        """For each file the ranks that may verify it."""
        world = range(self.parallel.mesh.world_size)
        if checkpoint.shared:
            return dict.fromkeys(checkpoint.files, world)
        present = gather_objects(self.parallel, checkpoint.present)
        hosts = host_numbers(gather_objects(self.parallel, self.local_rank))
        return {
            name: [rank for rank in world if hosts[rank] == entry.host and name in present[rank]]
            for name, entry in checkpoint.files.items()
        }

    def _agree(self, checkpoint: Checkpoint, reading: Iterator[Reading]) -> str | None:
        """Read to the end, or until some rank has found something."""
        total = sum(entry.bytes for entry in checkpoint.files.values())
        while True:
            mine = _advance(reading, time.monotonic() + ROUND_SECONDS)
            stops, all_of_us = zip(*gather_objects(self.parallel, (self.stopped(), mine)), strict=True)
            failures = [each.failure for each in all_of_us if each.failure]
            if not failures and all(each.done for each in all_of_us):
                break
            if any(stops):
                raise VerificationStopped(checkpoint)
            if failures:
                return failures[0]
            read = sum(each.bytes for each in all_of_us)
            logger.info(f"verifying {checkpoint.path}: {read / 1e9:.1f} of {total / 1e9:.1f} GB")
        _refuse_foreign([pair for each in all_of_us for pair in each.foreign])
        return None


def _shares(checkpoint: Checkpoint, readers: dict[str, Sequence[int]]) -> dict[int, list[str]]:
    """The files of each rank: the largest first, each to the rank with the least to read."""
    shares: dict[int, list[str]] = {rank: [] for ranks in readers.values() for rank in ranks}
    heaps: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for name in sorted(checkpoint.files, key=lambda name: (-checkpoint.files[name].bytes, name)):
        ranks = tuple(readers[name])
        heap = heaps.setdefault(ranks, [(0, rank) for rank in ranks])
        load, rank = heap[0]
        shares[rank].append(name)
        heapq.heapreplace(heap, (load + checkpoint.files[name].bytes, rank))
    return shares


def _read(checkpoint: Checkpoint, names: Sequence[str], allowed: Collection[str]) -> Iterator[Reading]:
    """Verify files one after the other; how far it is after each block."""
    read = 0
    foreign: dict[str, str] = {}
    for name in names:
        entry, path = checkpoint.files[name], checkpoint.path / name
        try:
            if entry.digest:
                found, blocks = None, digest_steps(path, entry.digest.partition(":")[0])
                for block, found in enumerate(blocks):  # noqa: B007  (the last one counts)
                    yield Reading(read + min(block * BLOCK, entry.bytes))
                if found != entry.digest:
                    yield Reading(failure=f"is damaged: {name} has another digest than when it was saved")
                    return
            if path.suffix == PICKLED:
                foreign |= {asked: str(path) for asked in foreign_names(path, allowed)}
        except (OSError, ValueError) as error:
            yield Reading(failure=f"is damaged: {name} cannot be read ({type(error).__name__}: {error})")
            return
        read += entry.bytes
    yield Reading(read, done=True, foreign=tuple(foreign.items()))


def _advance(reading: Iterator[Reading], until: float) -> Reading:
    """The last result before `until`. A reading that has ended gives the same result again."""
    last = None
    for last in reading:
        if time.monotonic() > until or last.done or last.failure:
            return last
    return last or Reading(done=True)


def _refuse_foreign(pairs: Sequence[tuple[str, str]]) -> None:
    if not pairs:
        return
    by_file: dict[str, set[str]] = {}
    for name, path in dict(pairs).items():
        by_file.setdefault(path, set()).add(name)
    raise JobError([foreign_problem(Path(path), sorted(names)) for path, names in sorted(by_file.items())])


def agree_on_checkpoint(job: Job, found: Selection, verifier: Verifier) -> Agreed:
    """What all ranks resume from: a checkpoint that is complete on every host and whose digests match, unless
    a stop comes before that is seen. Collective.

    Args:
        found: What this rank has selected for itself.

    Raises:
        JobError: on every rank alike: there are some and none is usable, or the one that was named is not.
    """
    if job.resume == "never":
        return Agreed(found.checkpoint, found.notes)
    try:
        if job.resume == "auto":
            agreed = _newest_verified(candidates_of(job), verifier)
        else:
            agreed = _named(found.checkpoint, verifier)
    except VerificationStopped as stopped:
        agreed = Agreed(stopped.checkpoint, verified=False)
    if agreed.checkpoint is not None and (problems := continuation_problems(agreed.checkpoint, job)):
        raise JobError(problems)
    return agreed


def _named(checkpoint: Checkpoint | None, verifier: Verifier) -> Agreed:
    assert checkpoint is not None, "a checkpoint that is named is found or refused"
    if failure := verifier.failure(checkpoint):
        remedy = "Name another checkpoint, or leave out --resume to take the newest complete one"
        raise job_error("resume", str(checkpoint.path), failure, remedy)
    return Agreed(checkpoint)


def _newest_verified(candidates: Candidates, verifier: Verifier) -> Agreed:
    """Go down from the newest until all ranks have the same one and its digests match."""
    below = None
    while True:
        position, checkpoint = candidates.newest(below)
        positions = gather_objects(verifier.parallel, position)
        if any(each != position for each in positions):
            # Hosts without a common file system: what one of them lacks, none can use.
            if checkpoint is not None and position != min(positions):
                lacking = positions.index(min(positions))
                candidates.skipped[str(checkpoint.path)] = f"is not complete on the host of rank {lacking}"
            below = min(positions) + 1
        elif checkpoint is None:
            break
        elif failure := verifier.failure(checkpoint):
            candidates.skipped[str(checkpoint.path)] = failure
            below = position
        else:
            return Agreed(checkpoint, candidates.notes(checkpoint))
    if position == NOTHING and any(gather_objects(verifier.parallel, candidates.exist)):
        raise candidates.refusal()
    return Agreed()
