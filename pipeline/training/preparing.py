"""From a job to ranks that have met and know what they resume from: data, process groups, the checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import psutil

from pipeline.base.problems import JobError, Problem
from pipeline.checkpoints.manifest import TrainState
from pipeline.checkpoints.output import checkpoint_bytes
from pipeline.checkpoints.resume import Selection, select_checkpoint
from pipeline.checkpoints.verification import Agreed, Verifier, agree_on_checkpoint
from pipeline.cluster.agent.rank_link import RankLink
from pipeline.cluster.history import METRICS_FILE
from pipeline.cluster.rank_environment import RankEnvironment
from pipeline.data.corpus import SourceSpec
from pipeline.data.remote_cache import RemoteCache
from pipeline.data.tokenizer import from_facts
from pipeline.data.training_data import TrainingData, load_data
from pipeline.engine.agreement import agree_on_job, agree_on_start
from pipeline.engine.distributed import share_cores, start_distributed
from pipeline.job.data_sources import data_settings
from pipeline.job.job import Job
from pipeline.job.run_file import common_facts
from pipeline.job.stop_file import read_stamp, stamp_of, stop_path
from pipeline.parallel.context import Parallel
from pipeline.training.console import Console, make_console, show_job
from pipeline.training.run_files import SAMPLES_FILE, unusable_metrics, unusable_samples
from pipeline.training.signals import StopRequest
from pipeline.training.stopping import StopFile, Stopping, TimeLimit

# What a host is taken to write in a second, until the first save has been measured.
WRITE_RATE = 500e6
# How long a collective waits for other ranks: longer than the slowest save.
GROUP_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class Prepared:
    """What a rank has in hand when it builds its engine.

    Attributes:
        selection: What all ranks resume from.
        data: From the position of that checkpoint on.
        remote: Keeps the local copies of remote data as long as it is open.
        stopping: This rank's reasons to stop.
        link: Hears how far the rank is.
    """

    job: Job
    parallel: Parallel
    selection: Agreed
    data: TrainingData
    remote: RemoteCache
    stopping: Stopping
    console: Console
    link: RankLink

    @property
    def state(self) -> TrainState:
        """The state that the run starts from."""
        return _state(self.job, self.selection)


def prepare(job: Job, environment: RankEnvironment, stop: StopRequest, link: RankLink) -> Prepared:
    """Read the data, meet the other ranks, and agree with them on the checkpoint. Collective.

    Raises:
        JobError: the data cannot be used (found before ranks meet, on every rank alike), or no checkpoint.
        StoppedEarly: a signal arrived before ranks met.
    """
    rank = environment.rank
    found = select_checkpoint(job)
    if rank == 0:
        _require_usable_numbers(job, _state(job, found))
    console = _console(job, rank, found)
    stopping = _stopping(job, rank, stop)
    step = _state(job, found).step
    link.progress("preparing data", step)
    remote = remote_cache(job)
    data = _read_data(job, _state(job, found), remote)
    link.progress("joining", step)
    with stop.meeting():
        parallel = meet(job, environment)
    link.progress("preparing data", step)  # all of a checkpoint is read, as long as that takes
    selection = agreed(job, environment, parallel, found, stopping)
    if selection.checkpoint != found.checkpoint:  # another one than the manifests alone had promised
        console = _console(job, rank, selection)
        data = _read_data(job, _state(job, selection), remote)
    agree_on_start(parallel, data.fingerprint, _state(job, selection).step)
    return Prepared(job, parallel, selection, data, remote, stopping, console, link)


def _state(job: Job, selection: Selection) -> TrainState:
    """Where the run starts. A folder's weights are evaluated before they change, to compare with."""
    if selection.checkpoint is not None:
        return selection.checkpoint.state
    return TrainState(evaluation_due=job.initial_weights.folder is not None)


def remote_cache(job: Job) -> RemoteCache:
    """Where copies of remote objects are kept. They stay as long as it is open."""
    return RemoteCache(Path(job.data.cache_folder), job.data.cache_bytes)


def _read_data(job: Job, state: TrainState, remote: RemoteCache) -> TrainingData:
    """What the job trains on and evaluates, from `state` on.

    Raises:
        JobError: the data cannot be used, or is not what the checkpoint was trained on.
    """
    spec = job.data
    return load_data(
        local_sources(spec.training, remote),
        data_settings(job),
        validation=local_sources(spec.validation, remote),
        tokenizer=from_facts(spec.tokenizer),
        saved=state.data,
        position=state.consumed_samples,
    )


def local_sources(specs: Sequence[SourceSpec], remote: RemoteCache) -> list[SourceSpec]:
    """The sources with the local copies of remote objects in their place."""
    return [replace(each, paths=remote.localize(each.paths)) for each in specs]


def _require_usable_numbers(job: Job, state: TrainState) -> None:
    """Raises JobError if what the run has written about its steps so far is no longer that."""
    folder = Path(job.output_dir)
    metrics, samples = folder / METRICS_FILE, folder / SAMPLES_FILE
    found = {metrics: unusable_metrics(metrics, state.step, evaluation_due=state.evaluation_due)}
    if job.reporting.log_samples:
        found[samples] = unusable_samples(samples)
    remedy = "Repair the line, or move the file away: the run resumes without it"
    problems = [
        Problem("output_dir", str(path), f"cannot be continued: {reason}", remedy)
        for path, reason in found.items()
        if reason
    ]
    if problems:
        raise JobError(problems)


def _console(job: Job, rank: int, selection: Selection) -> Console:
    console = make_console(
        rank,
        total_steps=job.train_steps,
        log_interval=job.reporting.log_interval,
        resume_step=_state(job, selection).step,
    )
    show_job(console, rank)
    return console


def _stopping(job: Job, rank: int, signals: StopRequest) -> Stopping:
    """What may stop the run: signals on every rank, the clock and the file on rank 0."""
    rules = job.stops
    if rank != 0:
        return Stopping(signals)
    limit = None
    if rules.time_limit is not None:
        launch = psutil.Process().create_time() if rules.started_at is None else rules.started_at
        first_save = checkpoint_bytes(job) / len(job.world.hosts) / WRITE_RATE
        limit = TimeLimit(rules.time_limit, launch, first_save)
    path = stop_path(rules.file, job.output_dir)
    assert path is not None
    before = stamp_of(path) if rules.stamp is None else read_stamp(rules.stamp)
    return Stopping(signals, limit, StopFile(path, rules.file is None, before))


def meet(job: Job, environment: RankEnvironment) -> Parallel:
    """Join the process groups."""
    if job.world.device == "cpu":
        share_cores(environment.local_size)
    start_distributed(job.world.device, environment.local_rank, GROUP_TIMEOUT)
    agree_on_job(common_facts(job))
    return Parallel.create(job.mesh, GROUP_TIMEOUT)


def agreed(
    job: Job,
    environment: RankEnvironment,
    parallel: Parallel,
    found: Selection,
    stopping: Stopping,
) -> Agreed:
    """What all ranks resume from, verified by its digests."""
    stopped = lambda: stopping.code() != 0  # noqa: E731
    verifier = Verifier(parallel, environment.local_rank, job.allow_pickle, stopped)
    return agree_on_checkpoint(job, found, verifier)
