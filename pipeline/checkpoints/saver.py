"""Saving a checkpoint so that it counts on all ranks or on none, and never without all of its files.

    every rank   lists what it will write; is there space?                    agreed, or the save fails
    every rank   writes its files, at once or in a thread, each synced        agreed, or the save fails
    leaders      write the manifest, give the folder its name, set `latest`   agreed, or the save fails

A leader is rank 0, and where hosts have file systems of their own the first rank of each. Each line ends in a
collective on the control group to which every rank comes, whatever went wrong before: nobody waits for a rank
that has raised. A rank that dies breaks the connections of the others, which then fail.
"""

from __future__ import annotations

import json
import logging
import shutil
import socket
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.base.files import sync_folder
from pipeline.checkpoints.files import WrittenFile
from pipeline.checkpoints.folder import (
    LATEST,
    PARTIAL,
    belongs,
    point_latest,
    publish,
    remove_leftovers,
    retain,
    tag_of,
)
from pipeline.checkpoints.hosts import FileSystems, find_file_systems
from pipeline.checkpoints.lineage import saved_lineage
from pipeline.checkpoints.manifest import SHARDS, FileEntry, TrainState, write_manifest
from pipeline.checkpoints.output import free_bytes, lack_of_space
from pipeline.checkpoints.shards import shard_index
from pipeline.checkpoints.snapshot import PlannedFiles, SnapshotMemory, plan_shards
from pipeline.engine.agreement import gather_objects
from pipeline.engine.engine import TrainEngine
from pipeline.job.job import Job
from pipeline.job.run_file import CHECKPOINTS

logger = logging.getLogger(__name__)


class SaveFailed(RuntimeError):
    """A checkpoint could not be saved. Raised on every rank alike, with the first reason."""


@dataclass(frozen=True)
class _Outstanding:
    """A save whose files are being written."""

    state: TrainState
    report: Future[WriteReport]
    begin: float


class Saver:
    """Writes the checkpoints of one start of a run. Its methods are collective: every rank calls them alike.

    Args:
        in_background: Files are written by a thread, over a copy of this moment's values in host memory.
        extra_files: Writes into a checkpoint's folder what is kept beside the shards, such as the tokenizer.

    Attributes:
        seconds: How long the slowest save took, from the call to the moment when it counted.
    """

    def __init__(
        self,
        engine: TrainEngine,
        job: Job,
        *,
        in_background: bool = False,
        extra_files: Callable[[Path], object] = lambda folder: None,
    ) -> None:
        self.engine, self.job, self.parallel = engine, job, engine.parallel
        self.folder = Path(job.output_dir) / CHECKPOINTS
        self.systems: FileSystems = find_file_systems(self.parallel, self.folder, engine.deepspeed.local_rank)
        self.seconds = 0.0
        self._extra_files = extra_files
        self._memory = SnapshotMemory() if in_background else None
        self._outstanding: _Outstanding | None = None

    @property
    def is_leader(self) -> bool:
        """Whether this rank does what is done once in its file system."""
        return self.systems.leaders[self.parallel.rank] == self.parallel.rank

    @property
    def outstanding(self) -> bool:
        """Whether a save has begun that does not count yet; the same on every rank."""
        return self._outstanding is not None

    @property
    def busy(self) -> bool:
        """Whether this rank is still writing files."""
        return self._outstanding is not None and not self._outstanding.report.done()

    def begin(self, state: TrainState) -> None:
        """Begin to save this moment, at a step boundary; in the background, return as soon as it is copied.

        Raises:
            SaveFailed: it cannot be written, or (not in the background) it could not.
        """
        if self.outstanding:
            raise RuntimeError("one save at a time: finish the one that is outstanding first")
        begin = time.monotonic()
        partial = self._partial(state)
        planned, failure = self._plan(state, partial)
        self._agree_on_plan(planned.bytes, failure, partial)
        if self._memory is not None:
            # A thread is enough: it waits in system calls and in hashing of large blocks, both of which leave
            # the interpreter to training, whose end waits for it.
            writer = ThreadPoolExecutor(1, "checkpoint-writer")
            self._outstanding = _Outstanding(state, writer.submit(write_planned, planned, partial), begin)
            writer.shutdown(wait=False)
            return
        report: Future[WriteReport] = Future()
        report.set_result(write_planned(planned, partial))
        self._outstanding = _Outstanding(state, report, begin)
        self.finish()

    def finish(self) -> None:
        """Wait for what is being written on any rank, and make it count. Nothing to do where nothing is.

        Raises:
            SaveFailed: some rank could not write.
        """
        if self._outstanding is None:
            return
        current, self._outstanding = self._outstanding, None
        reports: list[WriteReport] = gather_objects(self.parallel, current.report.result())
        partial = self._partial(current.state)
        self._check([report.failure for report in reports], partial)
        failure = None
        if self.is_leader:
            try:
                self._commit(current.state, partial, [report.files for report in reports])
            except (OSError, ValueError) as error:
                failure = describe_failure(error)
        self._check(gather_objects(self.parallel, failure), partial)
        if self.is_leader:  # only now: on every host the new one counts
            retain(self.folder, current.state.step, self.job.saves)
        self.seconds = max(self.seconds, time.monotonic() - current.begin)

    def _partial(self, state: TrainState) -> Path:
        return self.folder / f"{tag_of(state.step)}{PARTIAL}"

    def _plan(self, state: TrainState, partial: Path) -> tuple[PlannedFiles, str | None]:
        """This rank's files; and what went wrong on the way."""
        planned, failure = PlannedFiles(), None
        try:
            planned = plan_shards(self.engine, state, partial, self._writes_weights())
        except (OSError, RuntimeError, ValueError, TypeError, MemoryError) as error:
            failure = describe_failure(error)
        index = shard_index(self.engine)  # a collective of its own, so outside of what may fail
        try:
            if self.is_leader:
                self._add_extra_files(planned, partial, index)
            if self._memory is not None and failure is None:
                self._memory.copy(planned.torch_files)
        except (OSError, RuntimeError, ValueError, MemoryError) as error:
            failure = failure or describe_failure(error)
        return planned, failure

    def _writes_weights(self) -> bool | None:
        """Without a common file system, every host needs the weights of its own ranks."""
        if self.systems.shared:
            return None
        return self.systems.is_holder(self.parallel.mesh, self.parallel.rank)

    def _add_extra_files(self, planned: PlannedFiles, partial: Path, index: Any) -> None:
        """What leaders add to their shards, in a folder that nothing of a failed save is left in."""
        remove_leftovers(self.folder)
        partial.mkdir()  # without its parents: those of a mount that has vanished are not made again
        self._extra_files(partial)
        planned.present = [
            file.relative_to(partial).as_posix() for file in partial.rglob("*") if file.is_file()
        ]
        planned.texts[SHARDS] = (json.dumps(index) + "\n").encode()

    def _agree_on_plan(self, planned: int, failure: str | None, partial: Path) -> None:
        """Whether every rank is ready, and each file system has space for its ranks' files."""
        free = None
        if self.is_leader and failure is None:
            try:
                free = free_bytes(self.folder)
            except OSError as error:
                failure = describe_failure(error)
        answers = gather_objects(self.parallel, (planned, free, failure))
        failures = [answer[2] for answer in answers]
        for leader in sorted(set(self.systems.leaders)):
            needed = sum(answers[rank][0] for rank in self.systems.members(leader))
            if answers[leader][1] is not None:
                failures[leader] = failures[leader] or lack_of_space(self.folder, needed, answers[leader][1])
        self._check(failures, partial)

    def _check(self, failures: list[str | None], partial: Path) -> None:
        """Go on if no rank failed; else clear up, and fail on every rank with the reasons of all."""
        if not any(failures):
            return
        hosts = gather_objects(self.parallel, socket.gethostname())
        reasons = [
            f"rank {rank} on {hosts[rank]}: {failure}" for rank, failure in enumerate(failures) if failure
        ]
        more = f" (and {len(reasons) - 1} more ranks)" if len(reasons) > 1 else ""
        message = f"{partial.name.removesuffix(PARTIAL)} could not be saved: {reasons[0]}{more}"
        if self.is_leader:
            shutil.rmtree(partial, ignore_errors=True)  # else the next save removes it, or fails in turn
        raise SaveFailed(message)

    def _commit(self, state: TrainState, partial: Path, files: list[tuple[WrittenFile, ...]]) -> None:
        """Make the checkpoint count; for leaders, when every file is on the disk."""
        _refuse_double([files[rank] for rank in self.systems.members(self.parallel.rank)])
        for folder in {partial, *(path for path in partial.rglob("*") if path.is_dir())}:
            sync_folder(folder)
        entries = self._entries(files)
        write_manifest(self.job, state, partial, entries, self.systems.num_hosts, self.systems.shared)
        publish(partial, keeps=not self._is_own(state.step))
        remove_leftovers(self.folder)
        try:
            point_latest(self.folder, tag_of(state.step))
        except OSError as error:  # the checkpoint counts all the same
            logger.warning(f"{self.folder / LATEST} still names an older checkpoint: {error}")

    def _is_own(self, step: int) -> bool:
        """Whether what has the name of a checkpoint of this run is one, which a newer state replaces."""
        lineage = saved_lineage(self.folder)
        return lineage is not None and belongs(self.folder / tag_of(step), step, lineage)

    def _entries(self, files: list[tuple[WrittenFile, ...]]) -> dict[str, FileEntry]:
        """The manifest's: what leaders all write is the first one's."""
        entries: dict[str, FileEntry] = {}
        for rank, written in enumerate(files):
            host = self.systems.hosts[rank]
            for file in written:
                entries.setdefault(file.name, FileEntry(file.bytes, file.digest, host))
        return entries


def _refuse_double(files: list[tuple[WrittenFile, ...]]) -> None:
    """Two ranks that write one file would each have half of it."""
    count = Counter(file.name for written in files for file in written)
    if double := sorted(name for name, times in count.items() if times > 1):
        raise ValueError(f"several ranks wrote {double}")


@dataclass(frozen=True)
class WriteReport:
    """What became of one rank's files.

    Attributes:
        files: All of them, complete and on the disk; none where it failed.
        failure: What went wrong, None if nothing did.
    """

    files: tuple[WrittenFile, ...] = ()
    failure: str | None = None


def write_planned(planned: PlannedFiles, folder: Path) -> WriteReport:
    """Write one rank's files. What goes wrong is reported, never raised: it concerns every rank."""
    try:
        return WriteReport(tuple(planned.write(folder)))
    except BaseException as error:  # noqa: BLE001  (the save fails with it, on every rank)
        return WriteReport(failure=describe_failure(error))


def describe_failure(error: BaseException) -> str:
    """An error in one line; an OSError names its file itself."""
    return f"{type(error).__name__}: {error}"
