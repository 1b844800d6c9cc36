"""What a run's checkpoint folder holds, and which checkpoint counts. No torch.

    checkpoints/global_step100/...            DeepSpeed's shards
    checkpoints/global_step100/shards.json    which part of which parameter lies where in them
    checkpoints/global_step100/manifest.json  written when every rank's shards are complete
    checkpoints/global_step150.partial/       being written, or left by a crash; never read
    checkpoints/latest                        the tag of the newest such checkpoint; replaced atomically, last

A crash at any moment, of the host too, leaves `latest` pointing to a complete checkpoint, or no `latest` at
all: a checkpoint takes its name when all of it is on the disk.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipeline.job.job import Job
from pipeline.job.problems import JobError, Problem
from pipeline.job.run_file import CHECKPOINTS, identity
from pipeline.training.atomic_file import replaced_atomically, sync_folder

LATEST = "latest"
MANIFEST = "manifest.json"
SHARDS = "shards.json"
PARTIAL = ".partial"
CHOOSE_ANOTHER = "Name another checkpoint with --resume PATH, or use another --output_dir"


@dataclass(frozen=True)
class TrainState:
    """Where a run stands. Everything else follows from it: the sample order and dropout are pure functions of
    seed and position, the learning rate of the step.

    Attributes:
        step: Optimizer steps taken.
        consumed_samples: Samples of the whole job read so far.
        tokens: Input tokens of those samples.
        data: How far each source of the data has been read (`pipeline.data.progress`); empty before the first
            start.
    """

    step: int = 0
    consumed_samples: int = 0
    tokens: int = 0
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk.

    Attributes:
        has_shard_index: It says what lies where in it, so that another layout can read it.
    """

    folder: Path
    tag: str
    state: TrainState
    layout: dict[str, Any]
    identity: dict[str, Any]
    has_shard_index: bool

    @property
    def path(self) -> Path:
        return self.folder / self.tag


def tag_of(step: int) -> str:
    """The folder name of the checkpoint after `step` steps, as DeepSpeed names it."""
    return f"global_step{step}"


def layout_of(job: Job) -> dict[str, Any]:
    """What decides how the state is cut into shards, and in which formats."""
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


def layout_changes(checkpoint: Checkpoint, job: Job) -> list[str]:
    """What of the layout is another one here, as ``data 2 -> 4``."""
    here = layout_of(job)
    return [
        f"{key} {checkpoint.layout[key]} -> {value}"
        for key, value in here.items()
        if value != checkpoint.layout[key]
    ]


def write_manifest(job: Job, state: TrainState, path: Path) -> None:
    """Describe the complete checkpoint at `path`; for one rank, after every rank's files are on the disk."""
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.name != MANIFEST)
    content = {
        "state": asdict(state),
        "layout": layout_of(job),
        "identity": identity(job.options, job.model, job.batch.sequence_length),
        "files": {str(file.relative_to(path)): file.stat().st_size for file in files},
    }
    with replaced_atomically(path / MANIFEST) as file:
        file.write((json.dumps(content, indent=2) + "\n").encode())


def remove_partial(folder: Path) -> None:
    """Remove what crashes during a save have left; for one rank, before any rank writes."""
    for path in folder.glob(f"*{PARTIAL}*"):
        shutil.rmtree(path)


def publish(partial: Path) -> Path:
    """Give a complete checkpoint its own name; for one rank.

    A run that went back to an earlier checkpoint comes by its later steps again. What it wrote there the
    first time is moved aside and goes last, so that at no moment shards of both lie in one folder.

    Returns:
        The checkpoint's folder.
    """
    path = partial.with_name(partial.name.removesuffix(PARTIAL))
    replaced = path.with_name(f"{partial.name}.replaced")
    if path.exists():
        path.rename(replaced)
    partial.rename(path)
    sync_folder(path.parent)
    if replaced.exists():
        shutil.rmtree(replaced)
    return path


def point_latest(folder: Path, tag: str) -> None:
    """Make `tag` the checkpoint that a run resumes from."""
    with replaced_atomically(folder / LATEST) as file:
        file.write(f"{tag}\n".encode())


def find_checkpoint(output_dir: str, resume: str) -> Checkpoint | None:
    """The checkpoint that ``--resume`` asks for; None where a run starts at step 0.

    Raises:
        JobError: a checkpoint was named or is pointed to, and is missing or incomplete.
    """
    folder = Path(output_dir) / CHECKPOINTS
    if resume == "never" or (resume == "auto" and not (folder / LATEST).exists()):
        return None
    return read_checkpoint(folder / _read_latest(folder) if resume == "auto" else Path(resume))


def _read_latest(folder: Path) -> str:
    """The tag in `latest`.

    Raises:
        JobError: the file cannot be read, or names nothing.
    """
    path = folder / LATEST
    try:
        tag = path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        rule = f"cannot be read ({type(error).__name__}: {error})"
        raise JobError([Problem("resume", str(path), rule, CHOOSE_ANOTHER)]) from error
    if not tag:
        raise JobError([Problem("resume", str(path), "names no checkpoint", CHOOSE_ANOTHER)])
    return tag


def read_checkpoint(path: Path) -> Checkpoint:
    """The complete checkpoint at `path`.

    Raises:
        JobError: no manifest, or a file that it names is missing or has another size.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        state, same = TrainState(**manifest["state"]), manifest["identity"]
        layout, indexed = _current_layout(manifest["layout"]), SHARDS in manifest["files"]
        wrong = [name for name, size in manifest["files"].items() if _size(path / name) != size]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        rule = f"is no complete checkpoint: {MANIFEST} cannot be read ({type(error).__name__}: {error})"
        raise JobError([Problem("resume", str(path), rule, CHOOSE_ANOTHER)]) from error
    if wrong:
        rule = f"is no complete checkpoint: files missing or of another size than when saved: {wrong}"
        raise JobError([Problem("resume", str(path), rule, CHOOSE_ANOTHER)])
    return Checkpoint(path.parent, path.name, state, layout, same, indexed)


def _current_layout(saved: dict[str, Any]) -> dict[str, Any]:
    """A manifest's layout in today's words: earlier ones had the number formats in a block of their own, and
    did not say where offloaded state lies."""
    layout = {"nvme": False, **saved}
    formats = layout.pop("precision", {})
    return {**layout, **{key: formats[key] for key in ("compute", "accumulation") if key in formats}}


def resume_problems(job: Job) -> list[Problem]:
    """Why the checkpoint that this job would resume from cannot be loaded by it."""
    try:
        checkpoint = find_checkpoint(job.output_dir, job.options.resume)
    except JobError as error:
        return list(error.problems)
    if checkpoint is None:
        return []
    problems = []
    path = str(checkpoint.path)
    if rule := _unreadable(checkpoint, job):
        remedy = "Resume in the layout it was saved in, or start anew in another --output_dir"
        problems.append(Problem("resume", path, rule, remedy))
    # Whether the data is the same, the fingerprints of its sources tell when it has been read.
    same = identity(job.options, job.model, job.batch.sequence_length)
    if differing := _differing(checkpoint.identity, same):
        rule = f"belongs to another run: {differing}"
        problems.append(Problem("resume", path, rule, "Give that run's settings, or start anew"))
    return problems


def _unreadable(checkpoint: Checkpoint, job: Job) -> str | None:
    """Why a checkpoint of another layout cannot be converted to that of `job`; None where it can, or need
    not be."""
    there, here = checkpoint.layout, layout_of(job)
    if there == here:
        return None
    reason = None
    if not checkpoint.has_shard_index:
        reason = f"it has no {SHARDS}, without which only its own layout can read it"
    elif there["optimizer"] != here["optimizer"]:
        reason = "one optimizer's state is nothing to another"
    elif there["nvme"] or here["nvme"]:
        reason = "state on NVMe drives is not converted"
    changes = ", ".join(layout_changes(checkpoint, job))
    return reason and f"was saved in another layout ({changes}), and {reason}"


def _differing(saved: dict[str, Any], here: dict[str, Any]) -> str:
    return "; ".join(
        f"{key} {saved.get(key)} there, {here[key]} here" for key in here if here[key] != saved.get(key)
    )


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None
