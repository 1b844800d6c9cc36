"""What a start says of itself: before its first step, one line per fact; at its end, how to continue."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from pipeline.base.words import counted, cut
from pipeline.checkpoints.folder import tag_of
from pipeline.checkpoints.manifest import MANIFEST
from pipeline.checkpoints.resume import Selection, origin_lines
from pipeline.data.training_data import TrainingData
from pipeline.job.job import Job
from pipeline.job.run_file import CHECKPOINTS

# Up to four passes, repeated tokens are nearly worth new ones (Muennighoff et al. 2023).
MANY_PASSES = 4


def start_lines(job: Job, data: TrainingData, selection: Selection) -> list[str]:
    """The data, the layout, and where the weights come from."""
    described = [*data.summary(), *repetition_lines(job, data), *_parallelism(job)]
    return [*described, *_origin(job, selection), *_view(job)]


def repetition_lines(job: Job, data: TrainingData) -> list[str]:
    """How often the whole run goes over each source, and whether repeating stops to help."""
    samples = job.train_steps * job.batch.tokens_per_step / job.batch.sequence_length
    lines = []
    for source in data.train.sources:
        passes = samples * float(source.weight) / source.dataset.samples_per_epoch
        if source.weight:
            advice = " and will overfit: give it more" if passes > MANY_PASSES else ""
            times = f"{passes:,.1f}" if passes >= 0.1 else f"{passes:.1g}"
            lines.append(f"this run goes {times} times over {cut(source.name)}{advice}")
    return lines


def _parallelism(job: Job) -> list[str]:
    """One line for each kind of parallelism that the job applies."""
    mesh, lines = job.mesh, []
    if mesh.pipeline > 1:
        lines.append(
            f"pipeline parallel: {mesh.pipeline} stages, schedule {job.pipeline_schedule}, "
            f"layer boundaries {list(job.stages)}"
        )
    if mesh.tensor > 1:
        lines.append(f"tensor parallel: every weight matrix sliced over {mesh.tensor} ranks")
    if mesh.sequence > 1:
        length = job.batch.sequence_length // mesh.sequence
        lines.append(
            f"sequence parallel: {length} tokens of each sample on each of {mesh.sequence} ranks (Ulysses)"
        )
    lines.append(
        f"data parallel: {counted(mesh.data, 'replica')}, ZeRO {job.zero_stage} over "
        f"{counted(mesh.replicas, 'rank')}, {job.precision.compute}, "
        f"gradients summed in {job.precision.accumulation}"
    )
    return lines


def _view(job: Job) -> list[str]:
    """The command that shows the run's numbers while it trains."""
    if "tensorboard" not in job.monitors:
        return []
    folder = _written(str(job.monitors["tensorboard"]["output_path"]))
    return [f"to watch it: {shlex.join([_program('tensorboard'), '--logdir', folder])}"]


def _origin(job: Job, selection: Selection) -> list[str]:
    """Where the weights come from, and what has been changed since they were saved."""
    if selection.checkpoint is not None:
        return [*selection.notes, *origin_lines(job, selection.checkpoint)]
    weights = job.initial_weights
    if weights.folder is None:
        return [f"starting at step 0{f' from random weights: {weights.reason}' if weights.reason else ''}"]
    lines = [f"starting at step 0 with the weights in {weights.folder}"]
    if job.data.model_has_tokenizer:
        lines.append("tokens are those of the tokenizer there")
    return lines


def resume_hint(job: Job, by_name: bool = False) -> str:
    """How a run that was stopped is resumed; `by_name`: the checkpoint that this start has named, if it has,
    must be named again."""
    named = ["--resume", job.resume] if by_name and job.resume != "auto" else []
    return f"to resume: {_again(job, *named)}"


def continue_hint(job: Job, done: int) -> str:
    """How a run that has finished `done` steps is trained on."""
    return f"to continue training: {_again(job, '--train_steps', str(2 * done))}"


def export_hint(job: Job, step: int) -> str | None:
    """How the checkpoint of the lowest validation loss is exported; None if it is not there."""
    path = Path(job.output_dir) / CHECKPOINTS / tag_of(step)
    if not (path / MANIFEST).exists():
        return None
    folder = _written(job.output_dir)
    folders = (f"{folder}/{CHECKPOINTS}/{path.name}", f"{folder}/exported/{path.name}")
    command = [_program("python"), "-m", "pipeline.export", *folders]
    return f"its checkpoint as a Hugging Face folder: {shlex.join(command)}"


def _written(folder: str) -> str:
    """A folder in a command: one that begins with a hyphen is not to be read as an option."""
    return f"./{folder}" if folder.startswith("-") else folder


def _program(name: str) -> str:
    """How a shell calls a program of this environment: by its name, if the shell that started this does."""
    if os.environ.get("VIRTUAL_ENV") == sys.prefix or sys.prefix == sys.base_prefix:
        return name
    path = Path(sys.prefix) / "bin" / name
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _again(job: Job, *more: str) -> str:
    """The command that starts this run again the way it was started, as a shell reads it there."""
    folder = _written(job.output_dir)
    options = shlex.join(["--config", f"{folder}/run.json", "--output_dir", folder, *more])
    return f"{shlex.join(job.command)} {options}" if job.command else f"start it as before, with {options}"
