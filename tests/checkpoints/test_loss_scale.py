"""The loss scale of fp16 comes along, into another layout as well; how it acts is set by the new JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from deepspeed.accelerator import get_accelerator

from pipeline.checkpoints.load import load_checkpoint
from pipeline.checkpoints.manifest import TrainState
from pipeline.engine.build import build_engine
from pipeline.engine.engine import TrainEngine
from pipeline.job.job import Job
from pipeline.parallel.context import Parallel
from tests.checkpoints.saved_runs import find_checkpoint
from tests.checkpoints.small import TIMEOUT, job, save_checkpoint, start, train
from tests.harness import run_ranks

FP16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}
FIXED = {"enabled": True, "loss_scale": 64}
OTHER = {
    "enabled": True,
    "initial_scale_power": 4,
    "loss_scale_window": 500,
    "hysteresis": 4,
    "consecutive_hysteresis": True,
    "min_loss_scale": 16,
}
ZERO_1, ZERO_2, ZERO_3 = ({"zero_optimization": {"stage": stage}} for stage in (1, 2, 3))
SUMS = {**ZERO_1, "data_types": {"grad_accum_dtype": "fp16"}}
STAGES = {**SUMS, "pipeline": {"stages": 2}}
DUALPIPEV = {**SUMS, "pipeline": {"stages": 2, "schedule": "dualpipev"}, "train_batch_size": 8}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        *((same, same) for same in (ZERO_1, ZERO_2, ZERO_3, STAGES)),
        *((ZERO_1, STAGES), (STAGES, ZERO_1), (ZERO_1, ZERO_3), (ZERO_3, DUALPIPEV)),
    ],
)
def test_its_state_continues_as_the_json_says(first: dict, second: dict, tmp_path: Path):
    jobs = [
        job(tmp_path, device="cuda", **layout, fp16=fp16)
        for layout, fp16 in ((first, FP16), (second, FP16), (second, OTHER), (second, FIXED))
    ]
    for saved, same, other, fixed, dynamic_again in run_ranks(scalers_around_changes, 2, *jobs):
        # Doubled at every second step from the third on: the count of good steps comes along as well.
        assert (saved["cur_scale"], saved["cur_iter"]) == (512.0, 3)
        assert same == [saved, 512.0, 1024.0]
        settings = {"scale_window": 500, "delayed_shift": 4, "min_scale": 16, "consecutive_hysteresis": True}
        assert other == [{**saved, **settings, "cur_hysteresis": 4}, 512.0, 512.0]
        assert fixed == [{"cur_scale": 64, "dynamic": False}, 64, 64]
        settings = {key: saved[key] for key in ("scale_window", "delayed_shift", "min_scale")}
        started = {**saved, **settings, "cur_scale": 256.0, "cur_iter": 0}
        assert dynamic_again == [started, 256.0, 256.0]


def scalers_around_changes(before: Job, same: Job, other: Job, fixed: Job) -> list[Any]:
    """The scaler at a save after three steps; then, of a fresh engine for each JSON, the scaler after the
    load and the scale after each of two more steps; and the same from a fixed scale back to a dynamic one."""
    _allow_fp16()
    engine = start(before)
    for seed in (1, 2, 3):
        train(engine, seed)
    save_checkpoint(engine, before, TrainState(step=3))
    scales: list[Any] = [_scaler(engine)]
    for after in (same, other, fixed):
        engine = _resumed(after)
        scales.append([_scaler(engine), *_scales(engine)])
    save_checkpoint(engine, fixed, TrainState(step=5))
    engine = _resumed(same)
    return [*scales, [_scaler(engine), *_scales(engine)]]


@pytest.mark.parametrize("second", [ZERO_1, ZERO_3])
def test_overflows_stay_counted(second: dict, tmp_path: Path):
    shown = {"enabled": True, "initial_scale_power": 40, "hysteresis": 3}
    jobs = [
        job(tmp_path, ranks=1, device="cuda", **layout, fp16={**shown, **changes})
        for layout, changes in (
            (ZERO_1, {}),
            (second, {}),
            (second, {"hysteresis": 5, "min_loss_scale": 2**41}),
            (second, {"hysteresis": 1}),
        )
    ]
    (saved, *resumed), *_ = run_ranks(counts_after_overflows, 1, *jobs)
    assert saved == {"cur_scale": 2.0**40, "last_overflow_iter": 1, "cur_hysteresis": 1, "skipped": 2}
    assert resumed == [saved, {**saved, "cur_scale": 2.0**41, "cur_hysteresis": 3}, saved]


def counts_after_overflows(before: Job, *afters: Job) -> list[dict[str, Any]]:
    """At a save after two steps that were skipped, and resumed with each of the other jobs."""
    _allow_fp16()
    engine = start(before)
    assert all(train(engine, seed).skipped for seed in (1, 2))
    save_checkpoint(engine, before, TrainState(step=2))
    return [_counts(engine), *(_counts(_resumed(after)) for after in afters)]


def _counts(engine: TrainEngine) -> dict[str, Any]:
    kept = {key: _scaler(engine)[key] for key in ("cur_scale", "last_overflow_iter", "cur_hysteresis")}
    return {**kept, "skipped": engine.deepspeed.skipped_steps}


def _allow_fp16() -> None:
    """DeepSpeed keeps CPUs from what they can do slowly."""
    kind = type(get_accelerator())
    kind.is_fp16_supported = lambda _: True


def _resumed(job: Job) -> TrainEngine:
    engine = build_engine(job, Parallel.create(job.mesh, TIMEOUT))
    load_checkpoint(engine, find_checkpoint(job.output_dir, "auto"))
    return engine


def _scaler(engine: TrainEngine) -> dict[str, Any]:
    optimizer = engine.deepspeed.optimizer
    assert optimizer.dynamic_loss_scale == optimizer.loss_scaler.dynamic
    return {key: value for key, value in vars(optimizer.loss_scaler).items() if key != "dtype"}


def _scales(engine: TrainEngine) -> list[float]:
    """After each of two steps, neither of them skipped."""
    scales = []
    for seed in (4, 5):
        assert not train(engine, seed).skipped
        scales.append(engine.deepspeed.optimizer.loss_scale)
    return scales
