"""The loop's order of events, with an engine that computes nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.checkpoints.manifest import TrainState
from pipeline.data.loader import MicroBatch, StepBatch
from pipeline.engine.engine import StepResult
from pipeline.job.job import Job
from pipeline.parallel.context import Parallel
from pipeline.training.loop import MAX_SKIPPED_IN_A_ROW, EvalSet, Loop, TrainingDiverged
from pipeline.training.metrics import EvalMetrics, StepMetrics
from pipeline.training.throughput import Speedometer
from tests.job.drafts import draft, world

BATCH, SEQUENCE = 16, 64
ZEROS = torch.zeros(2, 4, dtype=torch.int64)
MICRO = MicroBatch(ZEROS, ZEROS, torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0]], dtype=torch.bool), (0, 1))


class Recorder:
    """Stands for engine, sink and save, and writes down what happens.

    Attributes:
        results: Step -> what the engine says of it; loss 1, norm 2 where nothing is said.
    """

    def __init__(self, results: dict[int, dict[str, Any]] | None = None) -> None:
        self.events: list[str] = []
        self.metrics: list[StepMetrics] = []
        self.saved: list[TrainState] = []
        self.tokens: list[int] = []
        self.results = results or {}
        self.taken = 0
        self.resumed: TrainState | None = None

    def train_step(self, batches: tuple[MicroBatch, ...], tokens: int) -> StepResult:
        self.taken += 1
        self.tokens.append(tokens)
        result = {"loss": 1.0, "grad_norm": 2.0, "skipped": False, **self.results.get(self.taken, {})}
        return StepResult(lr=0.1, tokens=tokens, **result)

    eval_batches_at_once = 2
    busy = outstanding = False

    def eval_step(self, batches: tuple[MicroBatch, ...], tokens: int) -> float:
        return float(tokens)

    def step(self, metrics: StepMetrics) -> None:
        self.events.append(f"step {metrics.step}")
        self.metrics.append(metrics)

    def evaluation(self, metrics: EvalMetrics) -> None:
        self.events.append(f"eval {metrics.step}: {metrics.eval_loss}")

    def save(self, state: TrainState) -> None:
        self.events.append(f"save {state.step}")
        self.saved.append(state)

    def settle(self) -> None:
        self.events.append("settle")
        self.outstanding = False

    def complete(self, state: TrainState) -> None:
        """As the real one: the state is saved now, or is already."""
        if self.saved[-1:] != [state] and state != self.resumed:
            self.save(state)


class Batches:
    """The loader's face: endless batches from a position on."""

    data_time = 0.25

    def __init__(self, first: int = 0) -> None:
        self.first = first

    def __iter__(self) -> Iterator[StepBatch]:
        return self

    def __next__(self) -> StepBatch:
        batch = StepBatch((MICRO,), self.first, BATCH, BATCH * SEQUENCE)
        self.first += BATCH
        return batch


@pytest.fixture
def job(tmp_path: Path) -> Job:
    found = draft(tmp_path, {}, world(1), train_steps=5, eval_interval=2).job
    assert found is not None
    return found


def loop(job: Job, recorder: Recorder, state: TrainState | None = None, **changes: Any) -> Loop:
    recorder.resumed = state
    state = state or TrainState()
    parts: dict[str, Any] = {
        "job": job,
        "parallel": Parallel.single(),
        "engine": recorder,
        "loader": Batches(state.consumed_samples),
        "eval_sets": (EvalSet(None, (MICRO, MICRO)),),
        "sinks": (recorder,),
        "speedometer": Speedometer(BATCH * SEQUENCE, 100.0, 1),
        "saves": recorder,
        "stop_code": lambda: 0,
        "state": state,
    }
    return Loop(**{**parts, **changes})


def test_evaluates_then_saves_at_intervals_and_at_the_end(job: Job):
    recorder = Recorder()
    made = loop(replace(job, saves=replace(job.saves, interval=2)), recorder)
    assert made.run() == "finished"
    assert recorder.events == [
        "step 1",
        *("step 2", "eval 2: 6.0", "save 2", "step 3"),
        *("step 4", "eval 4: 6.0", "save 4"),
        *("step 5", "eval 5: 6.0", "save 5"),
    ]
    best = {"loss": 6.0, "step": 2, "sets": {"": {"loss": 6.0, "step": 2}}}
    assert recorder.saved[-1] == made.state
    assert made.state == TrainState(5, 5 * BATCH, 5 * BATCH * SEQUENCE, best_eval_loss=best)


def test_a_step_among_the_best_is_saved_whatever_the_interval(job: Job):
    """Of losses 4, 3, 5 and 1 the second lowest of two is saved, too."""
    recorder = Recorder()
    losses = iter((4.0, 3.0, 5.0, 1.0, 9.0))
    recorder.eval_step = lambda *_: next(losses)  # type: ignore[method-assign]
    saves = replace(job.saves, interval=0, keep_last=1, keep_best=2)
    once = (EvalSet(None, (MICRO,)),)
    made = loop(replace(job, saves=saves, eval_interval=1, train_steps=5), recorder, eval_sets=once)
    assert made.run() == "finished"
    assert [state.step for state in recorder.saved] == [1, 2, 4, 5]  # 5: the run's end
    assert made.state.best_steps == [4, 2]
    due = TrainState(2, 32, evaluation_due=True)
    recorder = Recorder()
    loop(replace(job, saves=saves, train_steps=2), recorder, due).run()
    assert recorder.events == ["eval 2: 6.0", "save 2"]


def test_intervals_of_0_mean_the_end_only(job: Job):
    recorder = Recorder()
    loop(replace(job, saves=replace(job.saves, interval=0), eval_interval=0), recorder).run()
    assert recorder.events[-3:] == ["step 5", "eval 5: 6.0", "save 5"]
    assert len(recorder.events) == 7


def test_without_an_evaluation_set_nothing_is_evaluated(job: Job):
    recorder = Recorder()
    loop(job, recorder, eval_sets=()).run()
    assert not any("eval" in event for event in recorder.events)


def test_the_engine_is_told_unmasked_tokens_and_metrics_count_inputs(job: Job):
    recorder = Recorder()
    loop(job, recorder).run()
    assert recorder.tokens == [3] * 5
    assert [metrics.tokens for metrics in recorder.metrics] == [
        BATCH * SEQUENCE * step for step in range(1, 6)
    ]
    assert recorder.metrics[0].data_time == 0.25


def test_goes_on_from_a_state(job: Job):
    recorder = Recorder()
    state = TrainState(3, 3 * BATCH, 3 * BATCH * SEQUENCE, {"start": 0})
    made = loop(job, recorder, state)
    assert made.run() == "finished"
    assert recorder.events == ["step 4", "eval 4: 6.0", "step 5", "eval 5: 6.0", "save 5"]
    best = {"loss": 6.0, "step": 4, "sets": {"": {"loss": 6.0, "step": 4}}}
    assert made.state == TrainState(5, 5 * BATCH, 5 * BATCH * SEQUENCE, {"start": 0}, best)


def test_a_finished_run_does_nothing(job: Job):
    recorder = Recorder()
    assert loop(job, recorder, TrainState(7, 7 * BATCH)).run() == "finished"
    assert recorder.events == []


def test_a_stop_saves_the_last_whole_step(job: Job):
    recorder = Recorder()
    made = loop(job, recorder, stop_code=lambda: 15 * (recorder.taken == 3))
    assert made.run() == "stopped"
    assert recorder.events[-2:] == ["step 3", "save 3"]
    assert recorder.saved[-1].consumed_samples == 3 * BATCH  # the batch in hand was not trained on


def test_a_stop_right_after_a_save_saves_no_second_time(job: Job):
    recorder = Recorder()
    made = loop(
        replace(job, saves=replace(job.saves, interval=2)),
        recorder,
        stop_code=lambda: 15 * bool(recorder.saved),
    )
    assert made.run() == "stopped"
    assert recorder.events == ["step 1", "step 2", "eval 2: 6.0", "save 2"]


def test_a_stop_before_the_first_step_saves_a_start_and_not_a_resumed_state(job: Job):
    recorder = Recorder()
    assert loop(job, recorder, stop_code=lambda: 15).run() == "stopped"
    assert recorder.events == ["save 0"]
    recorder = Recorder()
    assert loop(job, recorder, TrainState(2, 32), stop_code=lambda: 15).run() == "stopped"
    assert recorder.events == []


def test_a_stop_during_an_evaluation_leaves_all_of_it_to_the_next_start(job: Job):
    """Two sets of two parts each; the request comes when the first part of the second set has been done."""
    recorder = Recorder()
    recorder.eval_batches_at_once = 1
    sets = (EvalSet("one", (MICRO, MICRO)), EvalSet("two", (MICRO, MICRO)))
    asked = [0] * 2 + [0, 0] + [0, 15]  # steps 1 and 2, the first set's parts, the second's
    made = loop(job, recorder, eval_sets=sets, stop_code=lambda: asked.pop(0))
    assert made.run() == "stopped"
    assert made.stop_reason == "SIGTERM on rank 0"
    assert recorder.events == ["step 1", "step 2", "save 2"]
    assert recorder.saved[-1].evaluation_due
    assert recorder.saved[-1].best_eval_loss == {}
    recorder.events.clear()
    assert loop(replace(job, train_steps=3), recorder, recorder.saved[-1], eval_sets=sets).run() == "finished"
    assert recorder.events == [*["eval 2: 12.0"] * 2, "step 3", *["eval 3: 12.0"] * 2, "save 3"]
    assert not recorder.saved[-1].evaluation_due


def test_a_save_in_the_background_is_settled_when_no_rank_is_writing(job: Job):
    recorder = Recorder()
    recorder.outstanding = recorder.busy = True

    def done_after_two_steps(metrics: StepMetrics) -> None:
        recorder.busy = metrics.step < 2
        recorder.events.append(f"step {metrics.step}")

    recorder.step = done_after_two_steps
    loop(replace(job, eval_interval=0), recorder, eval_sets=()).run()
    assert recorder.events == ["step 1", "step 2", "settle", "step 3", "step 4", "step 5", "save 5"]


@pytest.mark.parametrize(
    ("result", "says"),
    [
        ({"loss": math.nan}, "the loss is nan at step 3, samples 32 to 47 of the order"),
        ({"loss": math.inf}, "the loss is inf at step 3"),
        ({"grad_norm": math.nan}, "the gradient norm is nan at step 3"),
        ({"grad_norm": math.inf}, "the gradient norm is inf at step 3"),
        ({"loss": math.nan, "skipped": True}, "the loss is nan at step 3"),
    ],
)
def test_what_is_not_finite_ends_the_run_unsaved(result: dict[str, Any], says: str, job: Job):
    recorder = Recorder({3: result})
    with pytest.raises(TrainingDiverged, match=says):
        loop(job, recorder).run()
    assert recorder.events == ["step 1", "step 2", "eval 2: 6.0"]


def test_a_skipped_step_is_reported_and_counted(job: Job):
    recorder = Recorder({2: {"grad_norm": math.inf, "skipped": True}})
    assert loop(job, recorder).run() == "finished"
    assert [metrics.skipped for metrics in recorder.metrics] == [False, True, False, False, False]
    assert recorder.metrics[1].grad_norm == math.inf


def test_overflow_after_overflow_ends_the_run(job: Job):
    overflow = {"grad_norm": math.inf, "skipped": True}
    last = 2 + MAX_SKIPPED_IN_A_ROW
    long = replace(job, train_steps=100, eval_interval=0)
    # One step in between that is applied starts the count again.
    steps = {step: overflow for step in range(1, 100) if step != 1}
    recorder = Recorder(steps)
    with pytest.raises(TrainingDiverged, match=f"31 steps in a row overflowed, the last at step {last}"):
        loop(long, recorder).run()
    steps = {step: overflow for step in range(1, 100) if step % 30}
    assert loop(long, Recorder(steps)).run() == "finished"
