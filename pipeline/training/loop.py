"""The training loop: data, step, metrics, evaluation, saving, stopping."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol

from pipeline.checkpoints.manifest import TrainState
from pipeline.cluster.agent.rank_table import Phase
from pipeline.data.loader import BatchLoader, MicroBatch, StepBatch
from pipeline.engine.agreement import agree_on_step, first_reason, gather_rows
from pipeline.engine.engine import StepResult, TrainEngine
from pipeline.job.job import Job
from pipeline.parallel.context import Parallel
from pipeline.training.metrics import EvalMetrics, MetricsSink, best_of, with_evaluation
from pipeline.training.stopping import reason_text
from pipeline.training.throughput import Speedometer

# Steps after each start in which ranks compare their samples, not just count them.
VERIFIED_STEPS = 5
# A loss scale falls from 2^16 to 1 in 16 overflows; more in a row than this are no start-up effect.
MAX_SKIPPED_IN_A_ROW = 30


class EvalSet(NamedTuple):
    """One set to evaluate: its name, None for the validation documents of a single source, and the
    micro-batches of this data rank."""

    name: str | None
    batches: Sequence[MicroBatch]


class Saves(Protocol):
    """What saves the run's checkpoints. Every method is collective, but for `busy`."""

    @property
    def busy(self) -> bool:
        """Whether this rank is still writing files of a checkpoint."""

    @property
    def outstanding(self) -> bool:
        """Whether a save has begun that does not count yet; the same on every rank."""

    def save(self, state: TrainState) -> None:
        """Save this moment, or begin to. A failure is logged; it ends the run only where asked to."""

    def settle(self) -> None:
        """Make a save count, whose files all ranks have written. A failure is treated as that of `save`."""

    def complete(self, state: TrainState) -> None:
        """Return when the checkpoint of `state` counts.

        Raises:
            SaveFailed: on every rank alike: it cannot be saved.
        """


class TrainingDiverged(RuntimeError):
    """The loss or the gradient is not finite. Raised on every rank alike."""


@dataclass
class Loop:
    """One start of a run, from `state` to its last step.

    Attributes:
        sinks: Take the metrics: on rank 0 the file, the console and the monitors.
        saves: Writes the checkpoints.
        stop_code: 0, or why this rank was asked to stop (`pipeline.training.stopping`).
        record_step: Called with each step's seconds, what followed it included.
        compare_copies: Called after each step, to compare now and then what ranks must all have alike.
        eval_sets: What is evaluated, in this order; empty where nothing is.
        progress: Hears what this rank does, with how many steps taken.
        stop_reason: Why the run was stopped; empty before.
    """

    job: Job
    parallel: Parallel
    engine: TrainEngine
    loader: BatchLoader
    eval_sets: Sequence[EvalSet]
    sinks: Sequence[MetricsSink]
    speedometer: Speedometer
    saves: Saves
    stop_code: Callable[[], int]
    state: TrainState
    record_step: Callable[[float], object] = lambda seconds: None
    compare_copies: Callable[[int], object] = lambda step: None
    progress: Callable[[Phase, int], object] = lambda phase, step: None
    stop_reason: str = ""
    _skipped_in_a_row: int = 0
    _save_time: float = 0.0  # since the last step's metrics

    def run(self) -> Literal["finished", "stopped"]:
        """Train to the job's last step, or until some rank is asked to stop; both save.

        Raises:
            TrainingDiverged: the loss or gradient norm is not finite, or too many steps in a row overflowed.
            CopiesDiffer: ranks that must hold the same weights do not.
            SaveFailed: what the run ends with could not be saved.
        """
        first = self.state.step + 1
        if self.state.evaluation_due:
            if not self._evaluate(self.state.step):
                return self._stop()
            if self._is_among_best(self.state.step):
                self._timed(lambda: self.saves.save(self.state))
        for step in range(first, self.job.train_steps + 1):
            begin = time.perf_counter()
            self.progress("training", self.state.step)
            batch = next(self.loader)
            verify = step < first + VERIFIED_STEPS
            agreed = agree_on_step(self.parallel, batch, self.stop_code(), verify, self.saves.busy)
            if self.saves.outstanding and not agreed.writing:
                begin += self._timed(self.saves.settle)
            if agreed.reason is not None:
                self.stop_reason = reason_text(agreed.reason)
                return self._stop()
            result = self.engine.train_step(batch.micro_batches, agreed.tokens)
            self._check_finite(result, step, batch)
            self._advance(step, batch)
            self._report(result, time.perf_counter() - begin)
            self.record_step(time.perf_counter() - begin)
            self.compare_copies(step)
            if self._is_due(step, self.job.eval_interval) and not self._evaluate(step):
                return self._stop()
            if self._is_due(step, self.job.saves.interval) or self._is_among_best(step):
                self.progress("saving", step)
                self._timed(lambda: self.saves.save(self.state))
        self.progress("saving", self.state.step)
        self.saves.complete(self.state)
        return "finished"

    def _stop(self) -> Literal["stopped"]:
        self.progress("saving", self.state.step)
        self.saves.complete(self.state)
        return "stopped"

    def _timed(self, save: Callable[[], None]) -> float:
        """Seconds that a save, or its end, took; the next step's metrics have them."""
        begin = time.perf_counter()
        save()
        seconds = time.perf_counter() - begin
        self._save_time += seconds
        return seconds

    def _advance(self, step: int, batch: StepBatch) -> None:
        consumed = batch.first_sample + batch.num_samples
        tokens = self.state.tokens + batch.num_tokens
        self.state = replace(self.state, step=step, consumed_samples=consumed, tokens=tokens)

    def _is_due(self, step: int, interval: int) -> bool:
        return step == self.job.train_steps or (interval > 0 and step % interval == 0)

    def _is_among_best(self, step: int) -> bool:
        """Whether `step` is to be saved for its validation loss. Collective where such are kept: rank 0 says
        so for all, as a last digit in which ranks differed would have some of them wait for ever."""
        if self.job.saves.keep_best is None:
            return False
        return bool(gather_rows(self.parallel, int(step in self.state.best_steps))[0, 0])

    def _check_finite(self, result: StepResult, step: int, batch: StepBatch) -> None:
        """Refuse to train on from a step that is not finite. An overflow that DeepSpeed skipped left the
        weights as they were, so the run continues unless that is all it does."""
        last = batch.first_sample + batch.num_samples - 1
        where = f"step {step}, samples {batch.first_sample} to {last} of the order"
        if not math.isfinite(result.loss):
            raise TrainingDiverged(f"the loss is {result.loss} at {where}")
        if not result.skipped and not math.isfinite(result.grad_norm):
            raise TrainingDiverged(f"the gradient norm is {result.grad_norm} at {where}")
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if result.skipped else 0
        if self._skipped_in_a_row > MAX_SKIPPED_IN_A_ROW:
            raise TrainingDiverged(f"{self._skipped_in_a_row} steps in a row overflowed, the last at {where}")

    def _report(self, result: StepResult, step_time: float) -> None:
        metrics = self.speedometer.measure(
            self.state.step,
            result,
            tokens=self.state.tokens,
            step_time=step_time,
            data_time=self.loader.data_time,
            save_time=round(self._save_time, 6),
            time=now(),
        )
        self._save_time = 0.0
        for sink in self.sinks:
            sink.step(metrics)

    def _evaluate(self, step: int) -> bool:
        """Evaluate every set, or none: a stop leaves all of it to the next start. Whether it was done."""
        self.progress("evaluating", step)
        losses: dict[str | None, tuple[float, int]] = {}
        times: dict[str | None, tuple[float, float]] = {}
        for name, batches in self.eval_sets:
            begin = time.perf_counter()
            found = evaluate(self.engine, self.parallel, batches, self.stop_code)
            if isinstance(found, Abandoned):
                self.state = replace(self.state, evaluation_due=True)
                self.stop_reason = reason_text(found.reason)
                return False
            losses[name] = found
            times[name] = round(time.perf_counter() - begin, 6), now()
        best = with_evaluation(self.state.best_eval_loss, step, losses, self.job.saves.keep_best)
        self.state = replace(self.state, evaluation_due=False, best_eval_loss=best)
        for name, (loss, _) in losses.items():
            for sink in self.sinks:
                sink.evaluation(EvalMetrics(step, loss, name, best_of(best, name), *times[name]))
        return True


def now() -> float:
    """Seconds since 1970, to the millisecond."""
    return round(time.time(), 3)


class Abandoned(NamedTuple):
    """An evaluation that was given up because some rank was asked to stop: the rank, and its code."""

    reason: tuple[int, int]


def evaluate(
    engine: TrainEngine,
    parallel: Parallel,
    batches: Sequence[MicroBatch],
    stop_code: Callable[[], int] = lambda: 0,
) -> tuple[float, int] | Abandoned:
    """Mean loss per unmasked token over every data rank's `batches`, and the number of these tokens.

    Collective. It goes through the batches in parts, each as many as the engine needs to be busy, and before
    each part the ranks look whether one of them was asked to stop.
    """
    # One of each data rank: its sequence, tensor and pipeline peers hold the same.
    counting = parallel.mesh.grid[0, :, 0, 0].tolist()
    tokens, total, size = 0, 0.0, engine.eval_batches_at_once
    for first in range(0, len(batches), size):
        mine = sum(int(batch.mask.sum()) for batch in batches) if first == 0 else 0
        rows = gather_rows(parallel, mine, stop_code())
        tokens = tokens or int(rows[counting, 0].sum())
        if (reason := first_reason(rows[:, 1])) is not None:
            return Abandoned(reason)
        total += engine.eval_step(batches[first : first + size], tokens)
    return total, tokens
