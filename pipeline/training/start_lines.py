"""What a start says before its first step, one line per fact."""

from __future__ import annotations

from pipeline.base.words import counted
from pipeline.checkpoints.resume import Selection, origin_lines
from pipeline.data.training_data import TrainingData
from pipeline.job.job import Job
from pipeline.training.first_weights import weights_lines

# Up to four passes, repeated tokens are nearly worth new ones (Muennighoff et al. 2023).
MANY_PASSES = 4


def start_lines(job: Job, data: TrainingData, selection: Selection) -> list[str]:
    """The data, the layout, and where the weights come from."""
    return [*data.summary(), *_repetition(job, data), *_parallelism(job), *_origin(job, selection)]


def _repetition(job: Job, data: TrainingData) -> list[str]:
    """A line where a run repeats its data so often that repeating stops to help."""
    passes = job.train_steps * job.batch.tokens_per_step / data.train.num_tokens
    if passes <= MANY_PASSES:
        return []
    return [
        f"this run goes {passes:,.0f} times over the training data and will learn it by heart: give it more"
    ]


def _parallelism(job: Job) -> list[str]:
    """One line for each kind of parallelism that the job applies."""
    mesh, lines = job.mesh, []
    if mesh.pipeline > 1:
        lines.append(
            f"pipeline: {mesh.pipeline} stages, schedule {job.pipeline_schedule}, "
            f"layer boundaries {list(job.stages)}"
        )
    if mesh.tensor > 1:
        lines.append(f"tensor: every weight matrix cut over {mesh.tensor} ranks")
    if mesh.sequence > 1:
        length = job.batch.sequence_length // mesh.sequence
        lines.append(f"sequence: {length} tokens of each sample on each of {mesh.sequence} ranks (Ulysses)")
    lines.append(
        f"data: {counted(mesh.data, 'replica')}, ZeRO {job.zero_stage} over "
        f"{counted(mesh.replicas, 'rank')}, {job.precision.compute}, "
        f"gradients summed in {job.precision.accumulation}"
    )
    return lines


def _origin(job: Job, selection: Selection) -> list[str]:
    """Where the weights come from, and what has been changed since they were saved."""
    if selection.checkpoint is not None:
        return [*selection.notes, *origin_lines(job, selection.checkpoint)]
    return weights_lines(job)
