"""One rank's run, from a resolved job to its end: the parts, in the order a reader would expect them."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil

from pipeline.checkpoints.manifest import Checkpoint, TrainState
from pipeline.checkpoints.planned import set_random_state
from pipeline.checkpoints.proof import Prover, agree_on_checkpoint
from pipeline.checkpoints.resume import origin_lines
from pipeline.checkpoints.saver import Saver
from pipeline.checkpoints.select import Selection, select_checkpoint
from pipeline.checkpoints.space import checkpoint_bytes
from pipeline.checkpoints.transfer import go_on_from, load_checkpoint
from pipeline.cluster.rank_environment import RankEnvironment
from pipeline.cluster.rank_link import RankLink
from pipeline.data.evaluation import eval_batches
from pipeline.data.loader import BatchLoader
from pipeline.data.preparation import Rules
from pipeline.data.remote_cache import RemoteCache
from pipeline.data.sources import SourceSpec, training_sources, validation_sets
from pipeline.data.training_data import DataSettings, TrainingData, load_data
from pipeline.job.durations import parse_duration
from pipeline.job.job import Job
from pipeline.job.model_source import TOKENIZER_FOLDER, model_tokenizer
from pipeline.job.run_file import write_run_file
from pipeline.job.words import counted
from pipeline.parallel.context import Parallel
from pipeline.training.agreement import agree_on_start, first_reason, gather_rows
from pipeline.training.best_losses import best_line
from pipeline.training.build import build_engine
from pipeline.training.console import Console, evaluation_line, make_console
from pipeline.training.devices import peak_tflops
from pipeline.training.distributed import share_cores, start_distributed, stop_distributed
from pipeline.training.engine import TrainEngine
from pipeline.training.first_weights import first_weights, weights_lines
from pipeline.training.flops import training_flops_per_token
from pipeline.training.loop import Abandoned, EvalSet, Loop, TrainingDiverged, evaluate
from pipeline.training.metrics import EvalMetrics, MetricsFile, MetricsSink, Speedometer
from pipeline.training.monitors import Monitors
from pipeline.training.quiet import captured_stdout
from pipeline.training.sample import sample_text
from pipeline.training.sample_log import SampleLog
from pipeline.training.saves import RunSaves
from pipeline.training.signals import StopRequest
from pipeline.training.stopping import StopFile, Stopping, TimeLimit, reason_text

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
STOP_FILE = "STOP"
# What a host is taken to write in a second, until the first save has been measured.
WRITE_RATE = 500e6
# Up to four passes, repeated tokens are nearly worth new ones (Muennighoff et al. 2023).
MANY_PASSES = 4
# How long a collective waits for other ranks: longer than the slowest save.
GROUP_TIMEOUT = timedelta(minutes=30)


class Ending(NamedTuple):
    """How a run ended, with the steps done."""

    status: Literal["finished", "stopped"]
    step: int
    message: str


class RunFailed(Exception):
    """Training ended with an error; says after which step.

    Attributes:
        error: What went wrong.
        step: Optimizer steps done by then.
    """

    def __init__(self, error: Exception, step: int) -> None:
        super().__init__(f"after step {step}: {error}")
        self.error, self.step = error, step


def run(
    job: Job,
    environment: RankEnvironment,
    stop: StopRequest,
    record: Callable[[Ending], None],
    link: RankLink,
) -> Ending:
    """Train `job` as the rank that `environment` describes.

    `record` is called by rank 0 with the ending, before any rank leaves: a launcher ends all ranks as soon as
    one has left with an exit code other than 0, which a stopped run's is. `link` hears how far the rank is.

    Raises:
        JobError: the data cannot be used (found before ranks meet, on every rank alike).
        StoppedEarly: a signal arrived before ranks met.
        RunFailed: anything that goes wrong once training has begun.
    """
    rank = environment.rank
    selection = select_checkpoint(job)
    checkpoint = selection.checkpoint
    state = checkpoint.state if checkpoint else TrainState()
    new_console = partial(
        make_console, rank, total_steps=job.train_steps, log_interval=job.options.log_interval
    )
    console = new_console(resume_step=state.step)
    stopping = _stopping(job, rank, stop)
    link.progress("preparing data", state.step)
    remote = _remote_cache(job, console)  # local copies are kept as long as it is open
    data = _data(job, state, rank, console, remote)
    link.progress("joining", state.step)
    if job.world.device == "cpu":
        share_cores(environment.local_size)
    start_distributed(job.world.device, environment.local_rank, GROUP_TIMEOUT)
    parallel = Parallel.create(job.mesh, GROUP_TIMEOUT)
    stop.ranks_met()
    link.progress("preparing data", state.step)  # all of a checkpoint is read, as long as that takes
    stopped = lambda: stopping.code() != 0  # noqa: E731
    allowed = job.options.allow_pickle
    prover = Prover(parallel, environment.local_rank, allowed, console.message, stopped)
    selection = agree_on_checkpoint(job, selection, prover)
    if selection.checkpoint != checkpoint:  # another one than the manifests alone had promised
        checkpoint = selection.checkpoint
        state = checkpoint.state if checkpoint else TrainState()
        console = new_console(resume_step=state.step)
        data = _data(job, state, rank, console, remote)
    agree_on_start(parallel, data.fingerprint, state.step)
    link.progress("building", state.step)
    weights = None if checkpoint else first_weights(job, parallel)
    with captured_stdout():
        engine = build_engine(job, parallel, weights)
    ending = None
    if checkpoint:
        ending = _stopped_before_loading(parallel, stopping, state)
        if ending is None:
            load_checkpoint(engine, checkpoint)
        else:
            go_on_from(engine, checkpoint)  # for the next start, which may not name it again
    if rank == 0:
        write_run_file(job)  # only now: the folder belongs to a job that could be built
        data.tokenizer.save(Path(job.output_dir) / TOKENIZER_FOLDER)
    if ending is None:
        console.start([*data.summary(), *repetition(job, data), *parallelism(job), *origin(job, selection)])
        try:
            ending = _train(job, parallel, engine, data, checkpoint, stopping, console, link)
        except Exception as error:
            raise RunFailed(error, engine.step) from error
        finally:
            console.finish()
    else:
        what = f"stopped at step {ending.step} before its checkpoint was read ({ending.message})"
        console.message(f"{what}; {_resume_hint(job)}")
    if ending.status == "stopped":
        stopping.obeyed()
    if rank == 0:
        record(ending)
    gather_rows(parallel, 0)  # a barrier: nobody leaves before that
    link.ending(*ending)
    stop_distributed()
    remote.close()
    return ending


def _stopping(job: Job, rank: int, signals: StopRequest) -> Stopping:
    """What may stop the run: signals on every rank, the clock and the file on rank 0."""
    options = job.options
    if rank != 0:
        return Stopping(signals)
    limit = None
    if options.time_limit is not None:
        launch = options.started_at
        launch = psutil.Process().create_time() if launch is None else launch
        first_save = checkpoint_bytes(job) / len(job.world.hosts) / WRITE_RATE
        limit = TimeLimit(parse_duration(options.time_limit), launch, first_save)
    own = options.stop_file is None
    path = Path(job.output_dir) / STOP_FILE if own else Path(options.stop_file)
    return Stopping(signals, limit, StopFile(path, removed_when_obeyed=own))


def _stopped_before_loading(parallel: Parallel, stopping: Stopping, state: TrainState) -> Ending | None:
    """The ending, if some rank was asked to stop by now: the checkpoint is there and need not be read."""
    reason = first_reason(gather_rows(parallel, stopping.code())[:, 0])
    return None if reason is None else Ending("stopped", state.step, reason_text(reason))


def _remote_cache(job: Job, console: Console) -> RemoteCache:
    folder = job.options.cache_dir or Path(job.output_dir) / "data" / "remote"
    return RemoteCache(Path(folder), int(job.options.cache_size * 1e9), console.message)


def _data(job: Job, state: TrainState, rank: int, console: Console, remote: RemoteCache) -> TrainingData:
    options = job.options

    def local(specs: Sequence[SourceSpec]) -> list[SourceSpec]:
        return [replace(spec, paths=remote.localize(spec.paths)) for spec in specs]

    settings = DataSettings(
        sequence_length=job.batch.sequence_length,
        seed=options.seed,
        eval_fraction=options.held_out_fraction,
        vocab_size=job.model.vocab_size,
        document_mask=options.document_mask,
        mask_document_end=options.mask_document_end,
    )
    return load_data(
        local(training_sources(options)),
        Path(job.output_dir) / "data",
        settings,
        console.message,
        validation=local(validation_sets(options)),
        tokenizer_name=options.tokenizer,
        default_tokenizer=model_tokenizer(options),
        rules=Rules(options.text_field, options.on_bad_record),
        saved=state.data,
        position=state.consumed_samples,
        # Any rank may be the one that tokenizes; only rank 0's console speaks otherwise.
        report_work=console.message if rank == 0 else partial(print, flush=True),
    )


def _train(
    job: Job,
    parallel: Parallel,
    engine: TrainEngine,
    data: TrainingData,
    checkpoint: Checkpoint | None,
    stopping: Stopping,
    console: Console,
    link: RankLink,
) -> Ending:
    """Loop, then the last words: held-out loss, a sample of text, how to go on."""
    here, mesh = parallel.coordinates, job.mesh
    state = checkpoint.state if checkpoint else TrainState()
    share = (job.options.eval_samples, job.batch.micro_batch_size, here.data, mesh.data)
    eval_sets = [EvalSet(each.name, eval_batches(each.dataset, *share)) for each in data.evaluation]
    with contextlib.ExitStack() as stack:
        loader = BatchLoader(data.train, job.batch, here.data, mesh.data, start=state.consumed_samples)
        stack.enter_context(loader)
        files, monitors = _sinks(job, parallel, data, state, stack, console)
        saves = _saves(job, engine, data, files, state if checkpoint else None, stopping, console, link)
        set_random_state(checkpoint.path if checkpoint else None, job.options.seed, parallel.rank)
        loop = Loop(
            job=job,
            parallel=parallel,
            engine=engine,
            loader=loader,
            eval_sets=eval_sets,
            sinks=() if parallel.rank else (*files, console, *monitors),
            speedometer=_speedometer(job),
            saves=saves,
            stop_code=stopping.code,
            note_step=stopping.note_step,
            progress=link.progress,
            state=state,
        )
        try:
            status = loop.run()
        except TrainingDiverged:
            saves.settle()  # raised on every rank alike: what is being written may be the last good one
            raise
        done = loop.state.step
        link.progress("finishing", done)
        if status == "stopped":
            console.message(
                f"stopped after step {done} of {job.train_steps} ({loop.stop_reason}); {_resume_hint(job)}"
            )
            return Ending("stopped", done, loop.stop_reason)
        if state.step >= job.train_steps and not state.evaluation_due:
            console.message(f"the run had finished at step {done} before")
            _evaluate_again(engine, parallel, eval_sets, done, job, console)
        if line := best_line(loop.state.best_eval_loss):
            console.message(line)
        if job.options.sample_tokens > 0:
            prompt, count = job.options.sample_prompt, job.options.sample_tokens
            console.message(f"sample:\n{sample_text(engine, job, data.tokenizer, prompt, count)}\n")
        console.message(f"finished {counted(done, 'step')}; {_go_on_hint(job, done)}")
    return Ending("finished", done, "")


def _evaluate_again(
    engine: TrainEngine,
    parallel: Parallel,
    eval_sets: Sequence[EvalSet],
    step: int,
    job: Job,
    console: Console,
) -> None:
    """Say the held-out losses of a run that had finished."""
    for name, batches in eval_sets:
        found = evaluate(engine, parallel, batches)
        assert not isinstance(found, Abandoned)
        console.message(evaluation_line(EvalMetrics(step, found[0], name), job.train_steps))


def _saves(
    job: Job,
    engine: TrainEngine,
    data: TrainingData,
    files: Sequence[Any],
    saved: TrainState | None,
    stopping: Stopping,
    console: Console,
    link: RankLink,
) -> RunSaves:
    """What saves the run's checkpoints."""

    def companions(folder: Path) -> None:
        for file in files:
            file.sync()  # the lines up to a checkpoint must outlive the host as it does
        data.tokenizer.save(folder / TOKENIZER_FOLDER)  # so that a checkpoint can go elsewhere alone

    return RunSaves(
        Saver(
            engine,
            job,
            in_background=job.options.async_save,
            companions=companions,
            say=console.message if engine.parallel.rank == 0 else print,
        ),
        saved=saved,
        on_failure="stop" if job.options.save_failure == "stop" else "continue",
        with_progress=lambda state: replace(state, data=data.order.progress(state.consumed_samples)),
        say=console.message,
        note_seconds=stopping.note_save,
        note_saved=link.saved,
    )


def _sinks(
    job: Job,
    parallel: Parallel,
    data: TrainingData,
    state: TrainState,
    stack: contextlib.ExitStack,
    console: Console,
) -> tuple[list[MetricsFile | SampleLog], list[MetricsSink]]:
    """Rank 0's files and monitors; none on other ranks."""
    if parallel.rank != 0:
        return [], []
    path = Path(job.output_dir) / METRICS_FILE
    file = stack.enter_context(MetricsFile(path, state.step, evaluation_due=state.evaluation_due))
    if file.missing_steps:
        console.message(f"{METRICS_FILE} lacks {file.missing_steps} of the steps before this start")
    files: list[MetricsFile | SampleLog] = [file]
    if job.options.log_samples:
        path = Path(job.output_dir) / SAMPLES_FILE
        files.append(SampleLog(path, data.train, job.batch.train_batch_size, state))
        stack.callback(files[-1].close)
    if not job.monitors:
        return files, []
    monitors = Monitors(job.monitors, state.step)
    stack.callback(monitors.close)
    return files, [monitors]


def _speedometer(job: Job) -> Speedometer:
    peak = peak_tflops(job.world.device_name, job.precision.compute)
    return Speedometer(
        tokens_per_step=job.batch.tokens_per_step,
        flops_per_token=training_flops_per_token(job.model, job.batch.sequence_length),
        num_devices=job.mesh.world_size,
        peak_flops=peak * 1e12 if peak else None,
    )


def repetition(job: Job, data: TrainingData) -> list[str]:
    """A line where a run repeats its data so often that repeating stops to help."""
    passes = job.train_steps * job.batch.tokens_per_step / data.train.num_tokens
    if passes <= MANY_PASSES:
        return []
    return [
        f"this run goes {passes:,.0f} times over the training data and will learn it by heart: give it more"
    ]


def origin(job: Job, selection: Selection) -> list[str]:
    """Where the weights come from, and what has been changed since they were saved."""
    if selection.checkpoint is not None:
        return [*selection.notes, *origin_lines(job, selection.checkpoint)]
    return weights_lines(job)


def parallelism(job: Job) -> list[str]:
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


def _resume_hint(job: Job) -> str:
    return f"to resume: {_again(job)}"


def _go_on_hint(job: Job, done: int) -> str:
    return f"to train on: {_again(job)} --train_steps {2 * done}"


def _again(job: Job) -> str:
    """The command that starts this run again, as a shell reads it."""
    folder = job.output_dir
    return shlex.join(["./launch.sh", "--config", f"{folder}/run.json", "--output_dir", folder])
