"""manifest.json: what a complete checkpoint holds. Written last, and read before anything else. No torch.

Format 2:

    format          2; earlier manifests have none
    state           step, consumed samples and tokens, the data's progress, the lowest evaluation losses
    layout          the sizes and formats that decide how the state is divided into shards
    identity        model, tokenizer, sequence length, seed: what never changes in a run
    settings        what may change from one start to the next, and is then printed
    branches        the run's branches up to here (`pipeline.checkpoints.lineage`)
    versions        of this pipeline, torch, DeepSpeed and Python
    config_digest   of the dict that DeepSpeed received
    files           for each: bytes, digest, and the number of the host that wrote it
    hosts, shared   how many hosts wrote, and whether into one file system
    digest          of all of the above, so that a manifest that was edited or truncated is not taken

Names and shapes of the parameters are in `shards.json`, which `files` lists.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from pipeline.base.files import replaced_atomically
from pipeline.base.json_reader import saved_json
from pipeline.base.problems import job_error
from pipeline.checkpoints.files import ALGORITHMS, digest_of
from pipeline.checkpoints.lineage import Branches, parse_branches, read_lineage
from pipeline.job.job import Job
from pipeline.job.run_file import CHECKPOINTS, MANIFEST, settings_of, versions

SHARDS = "shards.json"
FORMAT = 2
CHOOSE_ANOTHER = "Name another checkpoint with --resume PATH, or use another --output_dir"
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError)


@dataclass(frozen=True)
class TrainState:
    """The position of a run. All else follows from it: the sample order and dropout are pure functions of
    seed and position, the learning rate of the step.

    Attributes:
        step: Optimizer steps taken.
        consumed_samples: Samples of the whole job read so far.
        tokens: Input tokens of those samples.
        data: How far each source of the data has been read (`pipeline.data.blend`); empty before the
            first start.
        best_eval_loss: The lowest evaluation losses; empty before the first.
        evaluation_due: The evaluation after `step` was given up for a stop: the next start begins with it.
    """

    step: int = 0
    consumed_samples: int = 0
    tokens: int = 0
    data: dict[str, Any] = field(default_factory=dict)
    best_eval_loss: dict[str, Any] = field(default_factory=dict)
    evaluation_due: bool = False

    @property
    def best_steps(self) -> list[int]:
        """Those with the lowest evaluation losses, the lowest first, where their checkpoints are kept."""
        return [step for step, _ in self.best_eval_loss.get("lowest", ())]


@dataclass(frozen=True)
class FileEntry:
    """What a manifest knows of one file.

    Attributes:
        digest: As `pipeline.checkpoints.files` writes it; empty in manifests before format 2.
        host: Which host wrote it, counted in rank order.
    """

    bytes: int
    digest: str = ""
    host: int = 0


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk, as its manifest describes it.

    Attributes:
        files: Each file's entry by its name, relative to the folder.
        settings: By dotted name; empty in manifests before format 2.
        branches: Of the run that saved it.
        shared: All files lie in one file system; otherwise each host has what its ranks wrote.
    """

    folder: Path
    tag: str
    state: TrainState
    layout: dict[str, Any]
    identity: dict[str, Any]
    files: dict[str, FileEntry]
    settings: dict[str, Any]
    branches: Branches
    hosts: int
    shared: bool

    @property
    def path(self) -> Path:
        return self.folder / self.tag

    @property
    def has_shard_index(self) -> bool:
        """Whether it records what is where in its files, so that another layout can read it."""
        return SHARDS in self.files

    @property
    def present(self) -> set[str]:
        """Its files that are here, with their size."""
        return {name for name, entry in self.files.items() if size_of(self.path / name) == entry.bytes}

    @property
    def missing(self) -> list[str]:
        """Its files that are not here, as where each host has a part."""
        return [name for name in self.files if size_of(self.path / name) is None]


def layout_of(job: Job) -> dict[str, Any]:
    """What decides how the state is divided into shards, and in which formats."""
    zero = job.deepspeed["zero_optimization"]
    devices = [zero.get(block, {}).get("device") for block in ("offload_optimizer", "offload_param")]
    return {
        **asdict(job.mesh),
        "zero_stage": job.zero_stage,
        "stages": list(job.stages),
        "pipeline_schedule": job.pipeline_schedule,
        "compute": job.precision.compute,
        "accumulation": job.precision.accumulation,
        "optimizer": job.optimizer.type,
        "nvme": "nvme" in devices,
    }


def files_below(path: Path) -> dict[str, FileEntry]:
    """Every file of a checkpoint that one process can see, read and digested."""
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.name != MANIFEST)
    return {
        file.relative_to(path).as_posix(): FileEntry(file.stat().st_size, digest_of(file)) for file in files
    }


def write_manifest(
    job: Job,
    state: TrainState,
    path: Path,
    files: Mapping[str, FileEntry],
    hosts: int = 1,
    shared: bool = True,
) -> None:
    """Describe the complete checkpoint at `path`; for one rank (of each host, where they do not share a file
    system), after every file is on the disk.

    Args:
        path: The folder that the files are in now; its parent is the run's checkpoint folder.
        files: What the ranks wrote, by names relative to `path`.
        hosts: How many hosts wrote.
        shared: Whether they wrote into one file system.
    """
    content = {
        "format": FORMAT,
        "state": asdict(state),
        "layout": layout_of(job),
        "identity": job.identity,
        "settings": settings_of(job),
        "branches": read_lineage(path.parent).branches,
        "versions": versions(),
        "config_digest": "sha256:" + hashlib.sha256(_canonical(job.deepspeed)).hexdigest(),
        "files": {name: asdict(files[name]) for name in sorted(files)},
        "hosts": hosts,
        "shared": shared,
    }
    _write(content, path)


def write_converted_manifest(
    checkpoint: Checkpoint, path: Path, files: Mapping[str, FileEntry], layout: Mapping[str, Any]
) -> None:
    """The manifest of what `checkpoint` was converted to, at `path`: the same but for files and layout."""
    content = saved_json(checkpoint.path / MANIFEST)
    content |= {
        "format": FORMAT,
        "branches": [],
        "layout": dict(layout),
        "files": {name: asdict(files[name]) for name in sorted(files)},
        "hosts": 1,
        "shared": True,
    }
    _write(content, path)


def _write(content: dict[str, Any], path: Path) -> None:
    content = {**content, "digest": _digest(content)}
    with replaced_atomically(path / MANIFEST) as file:
        file.write((json.dumps(content, indent=2) + "\n").encode())


def _digest(content: Mapping[str, Any]) -> str:
    """Of a manifest's content without its digest."""
    rest = {key: value for key, value in content.items() if key != "digest"}
    return "sha256:" + hashlib.sha256(_canonical(rest)).hexdigest()


def _canonical(content: Any) -> bytes:
    """The same bytes for the same content, whatever the order of its keys."""
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


@cache
def _remedy(path: Path) -> str:
    """What to do about a path that has no manifest; often it is the folder around checkpoints."""
    with suppress(OSError):  # it may not be listed
        for folder in (path, path / CHECKPOINTS):
            if any(folder.glob(f"*/{MANIFEST}")):
                return f"Name one of the checkpoints in it, {folder}/global_stepN, or another one"
    return CHOOSE_ANOTHER


def read_checkpoint(path: Path) -> Checkpoint:
    """The complete checkpoint at `path`: its manifest is whole, and each file that it names has its size.

    Where hosts do not share a file system, a file that another host wrote may be missing here.

    Raises:
        JobError: no manifest, one that is not whole, or a file that is missing or has another size.
    """
    try:
        checkpoint = _parse(path)
    except _UNREADABLE as error:
        rule = f"is no complete checkpoint: {MANIFEST} cannot be read ({type(error).__name__}: {error})"
        raise job_error("resume", str(path), rule, _remedy(path)) from error
    if wrong := _wrong_files(checkpoint):
        rule = f"is no complete checkpoint: files missing or of another size than when saved: {wrong}"
        raise job_error("resume", str(path), rule, CHOOSE_ANOTHER)
    return checkpoint


def saved_branches(path: Path) -> tuple[Branches, int] | None:
    """The branches that the checkpoint at `path` was saved under, and its step, whether or not all files are
    there; None if the manifest cannot be read."""
    try:
        checkpoint = _parse(path)
    except _UNREADABLE:
        return None
    return checkpoint.branches, checkpoint.state.step


def _parse(path: Path) -> Checkpoint:
    """What the manifest at `path` says. Raises one of `_UNREADABLE` for anything but a manifest."""
    content = saved_json(path / MANIFEST)
    given = content.get("format")
    if given not in (None, FORMAT):
        raise ValueError(f"format {given} is not known here, {FORMAT} is the newest")
    if given == FORMAT and content["digest"] != _digest(content):
        raise ValueError("its own digest does not match: it was changed since it was written")
    return Checkpoint(
        folder=path.parent,
        tag=path.name,
        state=TrainState(**content["state"]),
        layout=_current_layout(content["layout"]),
        identity=dict(content["identity"]),
        files={_inside(name): _entry(entry) for name, entry in content["files"].items()},
        settings=content.get("settings", {}),
        branches=parse_branches(content.get("branches", [])),
        hosts=content.get("hosts", 1),
        shared=content.get("shared", True),
    )


def _inside(name: str) -> str:
    """A file's name, which must not lead out of the folder."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{name} is outside of the checkpoint")
    return name


def _entry(saved: Any) -> FileEntry:
    if isinstance(saved, int):  # before format 2
        return FileEntry(saved)
    entry = FileEntry(**saved)
    if entry.digest.partition(":")[0] not in ALGORITHMS:
        raise ValueError(f"the digest {entry.digest} is of an unknown kind")
    return entry


def _current_layout(saved: dict[str, Any]) -> dict[str, Any]:
    """A manifest's layout with today's keys: earlier ones had the number formats in a block of their own, and
    did not record where offloaded state is."""
    layout = {"nvme": False, **saved}
    formats = layout.pop("precision", {})
    return {**layout, **{key: formats[key] for key in ("compute", "accumulation") if key in formats}}


def _wrong_files(checkpoint: Checkpoint) -> list[str]:
    """Files that are missing or have another size."""
    absent = () if checkpoint.shared else (None,)
    return [
        name
        for name, entry in checkpoint.files.items()
        if (size := size_of(checkpoint.path / name)) != entry.bytes and size not in absent
    ]


def size_of(path: Path) -> int | None:
    """Bytes of a file; None where there is none, or none that can be looked at."""
    try:
        return path.stat().st_size if path.is_file() else None
    except OSError:
        return None
