"""The data of one rank's run: local copies of what is elsewhere, then tokens and the order of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pipeline.checkpoints.manifest import TrainState
from pipeline.data.corpus import SourceSpec
from pipeline.data.preparation import Rules
from pipeline.data.remote_cache import RemoteCache
from pipeline.data.tokenizer import from_facts
from pipeline.data.training_data import DataSettings, TrainingData, load_data
from pipeline.job.job import Job


def remote_cache(job: Job) -> RemoteCache:
    """Where copies of remote objects are kept. They stay as long as it is open."""
    return RemoteCache(Path(job.data.cache_folder), job.data.cache_bytes)


def run_data(job: Job, state: TrainState, remote: RemoteCache) -> TrainingData:
    """What the job trains on and evaluates, from `state` on.

    Raises:
        JobError: the data cannot be used, or is not what the checkpoint was trained on.
    """
    spec = job.data

    def local(specs: Sequence[SourceSpec]) -> list[SourceSpec]:
        return [replace(each, paths=remote.localize(each.paths)) for each in specs]

    return load_data(
        local(spec.training),
        _settings(job),
        validation=local(spec.validation),
        tokenizer=from_facts(spec.tokenizer),
        saved=state.data,
        position=state.consumed_samples,
    )


def _settings(job: Job) -> DataSettings:
    spec = job.data
    return DataSettings(
        sequence_length=job.batch.sequence_length,
        seed=job.seed,
        eval_fraction=spec.held_out_fraction,
        vocab_size=job.model.vocab_size,
        cache_folder=Path(job.output_dir) / "data",
        document_mask=spec.document_mask,
        mask_document_end=spec.mask_document_end,
        rules=Rules(spec.text_field, spec.on_bad_record),
    )
