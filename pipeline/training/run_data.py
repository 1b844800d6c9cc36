"""The data of one rank's run: local copies of what is elsewhere, then tokens and the order of samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from pipeline.checkpoints.manifest import TrainState
from pipeline.data.corpus import SourceSpec
from pipeline.data.preparation import Rules
from pipeline.data.remote_cache import RemoteCache
from pipeline.data.training_data import DataSettings, TrainingData, load_data
from pipeline.job.data_sources import training_sources, validation_sets
from pipeline.job.job import Job
from pipeline.job.model_source import model_tokenizer


def remote_cache(job: Job, say: Callable[[str], None]) -> RemoteCache:
    """Where copies of remote objects are kept. They stay as long as it is open."""
    folder = job.options.cache_dir or Path(job.output_dir) / "data" / "remote"
    return RemoteCache(Path(folder), int(job.options.cache_size * 1e9), say)


def run_data(
    job: Job, state: TrainState, rank: int, say: Callable[[str], None], remote: RemoteCache
) -> TrainingData:
    """What the job trains on and evaluates, from `state` on.

    Args:
        say: Tells the user, on rank 0.

    Raises:
        JobError: the data cannot be used, or is not what the checkpoint was trained on.
    """
    options = job.options

    def local(specs: Sequence[SourceSpec]) -> list[SourceSpec]:
        return [replace(spec, paths=remote.localize(spec.paths)) for spec in specs]

    return load_data(
        local(training_sources(options)),
        Path(job.output_dir) / "data",
        _settings(job),
        say,
        validation=local(validation_sets(options)),
        tokenizer_name=options.tokenizer,
        default_tokenizer=model_tokenizer(options),
        rules=Rules(options.text_field, options.on_bad_record),
        saved=state.data,
        position=state.consumed_samples,
        # Any rank may be the one that tokenizes; only rank 0's console speaks otherwise.
        report_work=say if rank == 0 else partial(print, flush=True),
    )


def _settings(job: Job) -> DataSettings:
    options = job.options
    return DataSettings(
        sequence_length=job.batch.sequence_length,
        seed=options.seed,
        eval_fraction=options.held_out_fraction,
        vocab_size=job.model.vocab_size,
        document_mask=options.document_mask,
        mask_document_end=options.mask_document_end,
    )
