"""Training on one rank, once its engine has the run's first state: the loop, and its summary."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from pipeline.base.problems import JobError
from pipeline.base.words import after_step, counted
from pipeline.checkpoints.copies import CopiesDiffer, CopyCheck
from pipeline.checkpoints.saver import Saver
from pipeline.checkpoints.snapshot import set_random_state
from pipeline.cluster.history import METRICS_FILE
from pipeline.cluster.outcome import Outcome
from pipeline.data.loader import BatchLoader, EvalBatches
from pipeline.data.tokenizer import Tokenizer
from pipeline.engine.engine import TrainEngine
from pipeline.job.job import Job
from pipeline.job.run_file import TOKENIZER_FOLDER
from pipeline.model.counts import training_flops_per_token
from pipeline.training.console import evaluation_line
from pipeline.training.loop import Abandoned, EvalSet, Loop, TrainingDiverged, evaluate, now
from pipeline.training.metrics import EvalMetrics, MetricsSink, best_line
from pipeline.training.monitors import Monitors, Start
from pipeline.training.preparing import Prepared
from pipeline.training.run_files import SAMPLES_FILE, MetricsFile, SampleLog
from pipeline.training.saves import RunSaves
from pipeline.training.summary import continue_hint, export_hint, resume_hint
from pipeline.training.throughput import Speedometer, peak_tflops

logger = logging.getLogger(__name__)

SAMPLE_TEMPERATURE = 0.7


class Sinks(NamedTuple):
    """What takes rank 0's numbers; nothing on other ranks."""

    metrics: MetricsFile | None = None
    samples: SampleLog | None = None
    monitors: Sequence[MetricsSink] = ()

    @property
    def files(self) -> list[MetricsFile | SampleLog]:
        """Those that are there."""
        return [file for file in (self.metrics, self.samples) if file is not None]


def train(engine: TrainEngine, prepared: Prepared) -> Outcome:
    """Loop, then the summary: validation loss, a sample of text, how to continue. Collective.

    Raises:
        TrainingDiverged: the loss or gradient is not finite.
        CopiesDiffer: ranks that must hold the same weights do not.
        SaveFailed: what the run ends with could not be saved.
    """
    checkpoint = prepared.selection.checkpoint
    with contextlib.ExitStack() as stack:
        loader = stack.enter_context(_loader(prepared))
        sinks = _sinks(prepared, stack)
        copies = CopyCheck(engine)
        saves = _saves(engine, prepared, sinks, copies)
        rank = prepared.parallel.rank
        set_random_state(checkpoint.path if checkpoint else None, prepared.job.seed, rank)
        loop = _loop(engine, prepared, loader, sinks, saves, copies)
        try:
            status = loop.run()
        except (TrainingDiverged, CopiesDiffer):
            saves.settle()  # raised on every rank alike: what is being written may be the last good one
            raise
        done = loop.state.step
        prepared.link.progress("finishing", done)
        if status == "stopped":
            of = f"{after_step(done)} of {prepared.job.train_steps}"
            stopped = f"stopped {of} ({loop.stop_reason})"
            logger.info(f"{stopped}; {resume_hint(prepared.job)}")
            return Outcome("stopped", done, message=loop.stop_reason)
        _summarize(loop, prepared, sinks.metrics)
    return Outcome("finished", done)


def _loader(prepared: Prepared) -> BatchLoader:
    job, here = prepared.job, prepared.parallel.coordinates
    start = prepared.state.consumed_samples
    return BatchLoader(prepared.data.train, job.batch, here.data, job.mesh.data, start=start)


def _loop(
    engine: TrainEngine,
    prepared: Prepared,
    loader: BatchLoader,
    sinks: Sinks,
    saves: RunSaves,
    copies: CopyCheck,
) -> Loop:
    job, here = prepared.job, prepared.parallel.coordinates
    share = (job.data.eval_samples, job.batch.micro_batch_size, here.data, job.mesh.data)
    return Loop(
        job=job,
        parallel=prepared.parallel,
        engine=engine,
        loader=loader,
        eval_sets=[
            EvalSet(each.name, tuple(EvalBatches(each.dataset, *share))) for each in prepared.data.evaluation
        ],
        sinks=() if prepared.parallel.rank else (*sinks.files, prepared.console, *sinks.monitors),
        speedometer=_speedometer(job),
        saves=saves,
        stop_code=prepared.stopping.code,
        record_step=prepared.stopping.record_step,
        compare_copies=copies.after_step,
        progress=prepared.link.progress,
        state=prepared.state,
    )


def _summarize(loop: Loop, prepared: Prepared, file: MetricsFile | None) -> None:
    """What a run that has finished says. `file`: rank 0's."""
    job, state = prepared.job, prepared.state
    done = loop.state.step
    if state.step >= job.train_steps and not state.evaluation_due:
        logger.info(f"the run had finished at step {done} before")
        _evaluate_again(loop, prepared, file)
    if line := best_line(loop.state.best_eval_loss):
        logger.info(line)
        if hint := export_hint(job, loop.state.best_eval_loss["step"]):
            logger.info(hint)
    prompt, count = job.reporting.sample_prompt, job.reporting.sample_tokens
    if count > 0:
        logger.info(f"sampling up to {counted(count, 'token')} ...")  # a pass over a whole sequence for each
        try:
            text = sample_text(loop.engine, job, prepared.data.tokenizer, prompt, count)
            logger.info(f"sample:\n{text}\n")
        except JobError as error:  # on all ranks alike, and the run is as good as without a sample
            logger.info(f"no sample of {prompt!r}: {error}")
    logger.info(f"finished {counted(done, 'step')}; {continue_hint(job, done)}")


def sample_text(engine: TrainEngine, job: Job, tokenizer: Tokenizer, prompt: str, count: int) -> str:
    """`prompt` continued by `count` sampled tokens (fewer where a document ends). Collective.

    Each token costs a forward pass over a whole sequence: fine for a look at a model, slow for more.
    """
    generator = torch.Generator().manual_seed(job.seed)
    length = job.batch.sequence_length
    text = tokenizer.encode(prompt).tolist() or [tokenizer.end_of_document]
    for _ in range(count):
        window = torch.tensor(text[-length:])
        tokens = torch.zeros(job.batch.micro_batch_size, length, dtype=torch.int64)
        tokens[0, : len(window)] = window
        logits = engine.next_token_logits(tokens.to(engine.deepspeed.device), len(window) - 1)
        logits = logits[: tokenizer.vocab_size].cpu()  # a model may have more ids, which are no text
        chosen = torch.multinomial(torch.softmax(logits / SAMPLE_TEMPERATURE, -1), 1, generator=generator)
        if engine.parallel.control_group is not None:
            dist.broadcast(chosen, src=0, group=engine.parallel.control_group)
        if int(chosen) == tokenizer.end_of_document:
            break
        text.append(int(chosen))
    return tokenizer.decode(text)


def _evaluate_again(loop: Loop, prepared: Prepared, file: MetricsFile | None) -> None:
    """Report the validation losses of a run that had finished: this start may have other sets, or more
    samples of them."""
    for name, batches in loop.eval_sets:
        begin = time.perf_counter()
        found = evaluate(loop.engine, loop.parallel, batches)
        assert not isinstance(found, Abandoned)
        seconds = round(time.perf_counter() - begin, 6)
        metrics = EvalMetrics(loop.state.step, found[0], name, eval_time=seconds, time=now())
        logger.info(evaluation_line(metrics, prepared.job.train_steps))
        if file is not None:
            file.evaluation_again(metrics)


def _saves(engine: TrainEngine, prepared: Prepared, sinks: Sinks, copies: CopyCheck) -> RunSaves:
    """What saves the run's checkpoints."""
    rules, data = prepared.job.saves, prepared.data

    def extra_files(folder: Path) -> None:
        for file in sinks.files:
            file.sync()  # the lines up to a checkpoint must outlive the host as it does
        data.tokenizer.save(folder / TOKENIZER_FOLDER)  # so that a checkpoint can go elsewhere alone

    return RunSaves(
        Saver(
            engine,
            prepared.job,
            in_background=rules.in_background,
            extra_files=extra_files,
        ),
        saved=prepared.state if prepared.selection.checkpoint else None,
        on_failure="stop" if rules.stop_on_failure else "continue",
        with_progress=lambda state: replace(state, data=data.state(state.consumed_samples)),
        compare_copies=copies.before_save,
        record_seconds=prepared.stopping.record_save,
        record_saved=prepared.link.saved,
    )


def _sinks(prepared: Prepared, stack: contextlib.ExitStack) -> Sinks:
    """Rank 0's files and monitors, closed with the stack."""
    if prepared.parallel.rank != 0:
        return Sinks()
    job, state, folder = prepared.job, prepared.state, Path(prepared.job.output_dir)
    metrics = MetricsFile(folder / METRICS_FILE, state.step, evaluation_due=state.evaluation_due)
    found = Sinks(stack.enter_context(metrics))
    if metrics.missing_steps:
        missing = f"{METRICS_FILE} lacks {metrics.missing_steps} of the steps before this start"
        logger.info(missing)
    if job.reporting.log_samples:
        batch_size = job.batch.train_batch_size
        samples = SampleLog(folder / SAMPLES_FILE, prepared.data.train, batch_size, state)
        found = found._replace(samples=stack.enter_context(samples))
    if not job.monitors:
        return found
    start = Start(
        folder,
        state.step,
        recorded=metrics.last_step,
        evaluation_due=state.evaluation_due,
        samples_per_step=job.batch.train_batch_size,
    )
    return found._replace(monitors=[stack.enter_context(Monitors(job.monitors, start))])


def _speedometer(job: Job) -> Speedometer:
    peak = peak_tflops(job.world.device_name, job.precision.compute)
    return Speedometer(
        tokens_per_step=job.batch.tokens_per_step,
        flops_per_token=training_flops_per_token(job.model, job.batch.sequence_length),
        num_devices=job.mesh.world_size,
        peak_flops=peak * 1e12 if peak else None,
    )
