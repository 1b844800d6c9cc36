"""Offline conversion: one process rewrites a checkpoint with whole parameters, one after the other."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.base.files import make_folder, remove_empty, replaced_atomically, sync_files, sync_folder
from pipeline.base.json_reader import saved_json
from pipeline.base.problems import JobError, job_error
from pipeline.base.words import few
from pipeline.checkpoints.files import WrittenFile, has_digest
from pipeline.checkpoints.folder import PARTIAL
from pipeline.checkpoints.manifest import (
    MANIFEST,
    Checkpoint,
    FileEntry,
    files_below,
    layout_of,
    read_checkpoint,
    size_of,
    write_converted_manifest,
)
from pipeline.checkpoints.output import free_bytes, lack_of_space, only_one
from pipeline.checkpoints.stored import StoredState
from pipeline.checkpoints.universal import (
    WholeParameters,
    origin_of,
    write_common,
    write_parameter,
)
from pipeline.job.job import Job
from pipeline.job.run_file import TOKENIZER_FOLDER
from pipeline.model.gpt import parameter_slicings


@dataclass(frozen=True)
class ConversionProgress:
    """How far a conversion is.

    Attributes:
        parameters: Written so far, those of earlier calls included.
        bytes: Of these parameters' files.
    """

    parameters: int
    all_parameters: int
    bytes: int
    all_bytes: int


def task_of(checkpoint: Checkpoint, job: Job) -> dict[str, Any]:
    """Names a conversion: which checkpoint, for which layout."""
    digest = hashlib.sha256((checkpoint.path / MANIFEST).read_bytes()).hexdigest()
    return {"checkpoint": str(checkpoint.path.resolve()), "manifest": digest, "layout": layout_of(job)}


def convert(
    checkpoint: Checkpoint,
    job: Job,
    folder: Path,
    workers: int,
    report: Callable[[ConversionProgress], None] = lambda _: None,
) -> bool:
    """Convert `checkpoint` to the layout of `job`, as the new checkpoint `folder`.

    Each of `workers` threads holds one tensor of one parameter at a time: reading, writing and digesting are
    done by code that leaves Python's lock.

    Returns:
        False if an earlier call had done it.

    Raises:
        JobError: `folder` holds something else, parameters are not the model's, the disk has no space, or
            another process is at it.
        OSError: a file could not be read or written; what is on the disk is used by the next call.
    """
    partial, task = PartialFolder(folder), task_of(checkpoint, job)
    _finished(folder, task)  # else a refused call would leave a folder of its own
    if foreign := partial.foreign():
        rule = f"is where it would be made, and holds {foreign[0]}, which no conversion has made"
        raise job_error("FOLDER", str(partial.path), rule, "Move it away, or name another folder")
    made = make_folder(partial.path)
    with only_one(partial.path / "lock", "FOLDER", folder, "converting"):
        finished = _finished(folder, task)
        if not finished:
            partial.prepare(task)
            try:
                _write(checkpoint, job, partial, workers, report)
            except JobError:
                if made:  # nothing to continue
                    shutil.rmtree(partial.path)
                    remove_empty(made[1:])
                raise
        shutil.rmtree(partial.path)
    return not finished


def _finished(folder: Path, task: dict[str, Any]) -> bool:
    """Whether `folder` is what is to be made; False where nothing is there.

    Raises:
        JobError: something else is.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    try:
        if origin_of(read_checkpoint(folder).path) == task:
            return True
    except (JobError, OSError):
        pass  # no checkpoint
    rule = "there is something else already"
    raise job_error("FOLDER", str(folder), rule, "Name a folder that does not exist")


def _write(
    checkpoint: Checkpoint,
    job: Job,
    partial: PartialFolder,
    workers: int,
    report: Callable[[ConversionProgress], None],
) -> None:
    if not partial.verified.exists():
        verify_files(checkpoint, workers)
        partial.verified.touch()
    source = open_source(checkpoint, job)
    done = {name: files for name in source.slicings if (files := partial.written(name)) is not None}
    # The largest first, so that none of them is left for the end.
    left = [name for name in source.slicings if name not in done]
    left.sort(key=lambda name: source.slicings[name].numel, reverse=True)
    sizes = {name: source.bytes_of(name) for name in source.slicings}
    _check_space(sum(sizes[name] for name in left), partial)
    for name, written in _write_parameters(source, left, partial, workers):
        done[name] = written
        so_far = sum(sizes[name] for name in done)
        report(ConversionProgress(len(done), len(sizes), so_far, sum(sizes.values())))
    files = [file for name in source.slicings for file in done[name]]
    files += write_common(source, job, checkpoint.state, task_of(checkpoint, job), partial.content)
    entries = {file.name: FileEntry(file.bytes, file.digest) for file in files}
    if (tokenizer := checkpoint.path / TOKENIZER_FOLDER).exists():
        shutil.copytree(tokenizer, partial.content / TOKENIZER_FOLDER, dirs_exist_ok=True)
        copied = files_below(partial.content / TOKENIZER_FOLDER)
        entries |= {f"{TOKENIZER_FOLDER}/{name}": entry for name, entry in copied.items()}
    sync_files(partial.content)
    write_converted_manifest(checkpoint, partial.content, entries, layout_of(job))
    partial.content.rename(partial.folder)
    sync_folder(partial.folder.parent)


def verify_files(checkpoint: Checkpoint, workers: int) -> None:
    """Read every file of a checkpoint, before anything in it is interpreted.

    Raises:
        JobError: files are not what was saved.
    """

    # Manifests before format 2 have no digests.
    digests = {name: entry.digest for name, entry in checkpoint.files.items() if entry.digest}
    with ThreadPoolExecutor(workers) as pool:
        whole = pool.map(has_digest, (checkpoint.path / name for name in digests), digests.values())
        changed = [name for name, is_whole in zip(digests, whole, strict=True) if not is_whole]
    if changed:
        rule = f"is damaged: not as they were saved are {few(changed)}"
        raise job_error("CHECKPOINT", str(checkpoint.path), rule, "Name another checkpoint")


def open_source(checkpoint: Checkpoint, job: Job) -> WholeParameters:
    """What a checkpoint holds, which must be each parameter of the job's model, once and in its shape.

    Raises:
        JobError: it holds others.
    """
    stored = StoredState(checkpoint.path, job.allow_pickle)
    slicings = parameter_slicings(job.model)
    if names := stored.differing({name: slicing.full_shape for name, slicing in slicings.items()}):
        rule = f"its parameters are not those of the model {job.model.name}: {few(names)}"
        raise job_error("CHECKPOINT", str(checkpoint.path), rule, "Give the --model of its run")
    scaler = stored.loss_scaler() if checkpoint.layout["compute"] == "fp16" else None
    return WholeParameters(stored, slicings, scaler)


def _check_space(needed: int, partial: PartialFolder) -> None:
    if rule := lack_of_space(partial.path, needed, free_bytes(partial.path), "what is left to write"):
        remedy = "Make room, or name a folder elsewhere"
        raise job_error("FOLDER", str(partial.folder), rule, remedy)


def _write_parameters(
    source: WholeParameters, names: list[str], partial: PartialFolder, workers: int
) -> Iterator[tuple[str, list[WrittenFile]]]:
    def write(name: str) -> tuple[str, list[WrittenFile]]:
        files = write_parameter(source, name, partial.content)
        partial.record_written(name, files)
        return name, files

    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(write, name) for name in names]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:  # after an error nothing new is begun
            pool.shutdown(cancel_futures=True)


_OWN = ("task.json", "proven", "written", "checkpoint", "lock")


@dataclass(frozen=True)
class PartialFolder:
    """Where `folder` is made, so that there is none or a complete one, and the next call continues.

    out.partial/task.json        what is made from what; another task's work is thrown away
                proven           every file of the source was read and is what was saved
                written/<name>   which files of a parameter are on the disk; it is not written a second time
                checkpoint/      takes the name `out` when its manifest is on the disk
                lock             one process at a time
    """

    folder: Path

    @property
    def path(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}{PARTIAL}")

    @property
    def content(self) -> Path:
        """The checkpoint."""
        return self.path / "checkpoint"

    @property
    def verified(self) -> Path:
        """A file that is there if the source is what was saved."""
        return self.path / "proven"

    def foreign(self) -> list[str]:
        """What is there and no conversion has made: the folder must not be removed then."""
        there = self.path.iterdir() if self.path.is_dir() else ()
        return sorted(each.name for each in there if each.name.partition(".tmp")[0] not in _OWN)

    def prepare(self, task: dict[str, Any]) -> None:
        """Keep what an earlier call left of the same task; throw away anything else."""
        task_file = self.path / "task.json"
        if task_file.exists() and saved_json(task_file) == task:
            return
        task_file.unlink(missing_ok=True)  # first: from here on a crash leaves no task
        self.verified.unlink(missing_ok=True)
        for folder in (self.content, self.path / "written"):
            if folder.exists():
                shutil.rmtree(folder)
            folder.mkdir()
        with replaced_atomically(task_file) as file:
            file.write(json.dumps(task).encode())

    def written(self, name: str) -> list[WrittenFile] | None:
        """The files of a parameter, if all of them are on the disk."""
        note = self.path / "written" / name
        if not note.exists():
            return None
        files = [WrittenFile(**entry) for entry in saved_json(note)]
        return files if all(size_of(self.content / f.name) == f.bytes for f in files) else None

    def record_written(self, name: str, files: list[WrittenFile]) -> None:
        """Record that all files of a parameter are on the disk."""
        with replaced_atomically(self.path / "written" / name) as file:
            file.write(json.dumps([asdict(each) for each in files]).encode())
