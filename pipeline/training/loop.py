"""The training loop: data, step, metrics, evaluation, saving, stopping."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from pipeline.checkpoints.folder import TrainState
from pipeline.data.batch import MicroBatch, StepBatch
from pipeline.data.loader import BatchLoader
from pipeline.job.job import Job
from pipeline.parallel.context import Parallel
from pipeline.training.agreement import agree_on_step, gather_rows
from pipeline.training.engine import StepResult, TrainEngine
from pipeline.training.metrics import EvalMetrics, MetricsSink, Speedometer

# Steps after each start in which ranks compare their samples, not just count them.
VERIFIED_STEPS = 5
# A loss scale falls from 2^16 to 1 in 16 overflows; more in a row than this are no start-up effect.
MAX_SKIPPED_IN_A_ROW = 30


class EvalSet(NamedTuple):
    """One set to evaluate: its name, None for the held-out documents of a single source, and this data rank's
    micro-batches."""

    name: str | None
    batches: Sequence[MicroBatch]


class TrainingDiverged(RuntimeError):
    """The loss or the gradient is not finite. Raised on every rank alike."""


@dataclass
class Loop:
    """One start of a run, from `state` to its last step.

    Attributes:
        sinks: Take the metrics: on rank 0 the file, the console and the monitors.
        save: Writes a checkpoint of the state it is given. Collective.
        stop_requested: Whether this rank was asked to stop.
        eval_sets: What is evaluated, in this order; empty where nothing is.
    """

    job: Job
    parallel: Parallel
    engine: TrainEngine
    loader: BatchLoader
    eval_sets: Sequence[EvalSet]
    sinks: Sequence[MetricsSink]
    speedometer: Speedometer
    save: Callable[[TrainState], object]
    stop_requested: Callable[[], bool]
    state: TrainState
    _skipped_in_a_row: int = 0

    def run(self) -> Literal["finished", "stopped"]:
        """Train to the job's last step, or until some rank is asked to stop; both save.

        Raises:
            TrainingDiverged: the loss or gradient norm is not finite, or too many steps in a row overflowed.
        """
        first = self.state.step + 1
        saved = self.state.step or None  # a start at step 0 has no checkpoint behind it
        for step in range(first, self.job.train_steps + 1):
            begin = time.perf_counter()
            batch = next(self.loader)
            verify = step < first + VERIFIED_STEPS
            agreed = agree_on_step(self.parallel, batch, self.stop_requested(), verify)
            if agreed.stop:
                if saved != self.state.step:
                    self.save(self.state)
                return "stopped"
            result = self.engine.train_step(batch.micro_batches, agreed.tokens)
            self._check_finite(result, step, batch)
            self._advance(step, batch)
            self._report(result, time.perf_counter() - begin)
            if self._is_due(step, self.job.eval_interval):
                self._evaluate(step)
            if self._is_due(step, self.job.save_interval):
                self.save(self.state)
                saved = step
        return "finished"

    def _advance(self, step: int, batch: StepBatch) -> None:
        consumed = batch.first_sample + batch.num_samples
        tokens = self.state.tokens + batch.num_tokens
        self.state = replace(self.state, step=step, consumed_samples=consumed, tokens=tokens)

    def _is_due(self, step: int, interval: int) -> bool:
        return step == self.job.train_steps or (interval > 0 and step % interval == 0)

    def _check_finite(self, result: StepResult, step: int, batch: StepBatch) -> None:
        """Refuse to train on from a step that is not finite. An overflow that DeepSpeed skipped left the
        weights as they were, so the run goes on unless that is all it does."""
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
            step=self.state.step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=result.lr,
            tokens=self.state.tokens,
            step_time=step_time,
            data_time=self.loader.data_time,
            skipped=result.skipped,
        )
        for sink in self.sinks:
            sink.step(metrics)

    def _evaluate(self, step: int) -> None:
        for name, batches in self.eval_sets:
            loss = evaluate(self.engine, self.parallel, batches)
            for sink in self.sinks:
                sink.evaluation(EvalMetrics(step, loss, name))


def evaluate(engine: TrainEngine, parallel: Parallel, batches: Sequence[MicroBatch]) -> float:
    """Mean loss per unmasked token over every data rank's `batches`. Collective."""
    rows = gather_rows(parallel, sum(int(batch.mask.sum()) for batch in batches))
    speakers = parallel.mesh.grid[0, :, 0, 0].tolist()  # sequence, tensor and pipeline peers hold the same
    return engine.eval_step(batches, int(rows[speakers, 0].sum()))
