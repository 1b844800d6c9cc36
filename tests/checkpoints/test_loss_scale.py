"""The loss scale of fp16 comes along, into another layout as well; how it acts is set by the new JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.checkpoint.constants import LOSS_SCALER

from pipeline.checkpoints.load import load_checkpoint
from pipeline.checkpoints.manifest import TrainState
from pipeline.checkpoints.stored import MASTER, StoredState
from pipeline.checkpoints.stored import Slice as StoredSlice
from pipeline.engine.build import build_engine
from pipeline.engine.engine import StepResult, TrainEngine
from pipeline.job.job import Job
from pipeline.parallel.context import Parallel
from tests.checkpoints.saved_runs import find_checkpoint
from tests.checkpoints.small import TIMEOUT, job, save_checkpoint, start, train
from tests.covering import first_fast
from tests.harness import run_ranks
from tests.parity.ranks import Slice, allow_fp16, slices

FP16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}
FIXED = {"enabled": True, "loss_scale": 64}
# Its eps is not lost beside gradients that are left scaled.
ADAM = {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-3}}
OTHER = {
    "enabled": True,
    "initial_scale_power": 4,
    "loss_scale_window": 500,
    "hysteresis": 4,
    "consecutive_hysteresis": True,
    "min_loss_scale": 16,
}
ZERO_0, ZERO_1, ZERO_2, ZERO_3 = ({"zero_optimization": {"stage": stage}} for stage in (0, 1, 2, 3))
SLICES = {**ZERO_0, "tensor_parallel": {"autotp_size": 2}}
STAGES, STAGES_1 = ({**zero, "pipeline": {"stages": 2}} for zero in (ZERO_0, ZERO_1))
DUALPIPEV, DUALPIPEV_1 = (
    {**zero, "pipeline": {"stages": 2, "schedule": "dualpipev"}, "train_batch_size": 8}
    for zero in (ZERO_0, ZERO_1)
)
CHANGES = (
    *((ZERO_1, STAGES_1), (STAGES_1, ZERO_1), (ZERO_1, ZERO_3)),
    *((STAGES, STAGES), (ZERO_0, ZERO_1), (ZERO_1, ZERO_0), (STAGES, STAGES_1), (ZERO_3, DUALPIPEV)),
)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (ZERO_1, ZERO_1),
        (ZERO_3, DUALPIPEV_1),
        *(pytest.param(same, same, marks=pytest.mark.slow) for same in (ZERO_0, ZERO_2, ZERO_3, STAGES_1)),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in CHANGES),
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
    allow_fp16()
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


@pytest.mark.parametrize(
    ("first", "second"), first_fast([(ZERO_1, ZERO_3), (ZERO_1, ZERO_1), (ZERO_0, ZERO_0)], 1)
)
def test_overflows_stay_counted(first: dict, second: dict, tmp_path: Path):
    shown = {"enabled": True, "initial_scale_power": 40, "hysteresis": 3}
    jobs = [
        job(tmp_path, ranks=1, device="cuda", **layout, fp16={**shown, **changes})
        for layout, changes in (
            (first, {}),
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
    allow_fp16()
    engine = start(before)
    assert all(train(engine, seed).skipped for seed in (1, 2))
    save_checkpoint(engine, before, TrainState(step=2))
    return [_counts(engine), *(_counts(_resumed(after)) for after in afters)]


@pytest.mark.parametrize("layout", first_fast([STAGES, ZERO_0, DUALPIPEV], 1))
def test_a_resumed_run_is_the_one_that_never_stopped(layout: dict, tmp_path: Path):
    """To the bit: losses, norms and masters; the scale, which doubles at the first step after the save."""
    same = job(tmp_path, device="cuda", **layout, fp16=FP16, optimizer=ADAM)
    for unbroken, resumed in run_ranks(steps_after_a_save, 2, same, same):
        assert [step[:2] for step in resumed[0]] == [step[:2] for step in unbroken[0]]
        assert resumed[1] == unbroken[1] == [512.0, 1024.0]
        assert resumed[2].keys() == unbroken[2].keys()
        assert all(torch.equal(part.values, unbroken[2][name].values) for name, part in resumed[2].items())


def steps_after_a_save(
    before: Job, after: Job
) -> list[tuple[list[StepResult], list[float], dict[str, Slice]]]:
    """Two steps of the engine that saved, and of one that loaded: results, scales and masters."""
    allow_fp16()
    engine = start(before)
    for seed in (1, 2, 3):
        train(engine, seed)
    save_checkpoint(engine, before, TrainState(step=3))
    told = []
    for going_on in (engine, _resumed(after)):
        steps, scales = [], []
        for seed in (4, 5):
            steps.append(train(going_on, seed))
            scales.append(going_on.deepspeed.optimizer.loss_scale)
        told.append((steps, scales, slices(going_on)))
    return told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"),
    [(ZERO_0, ZERO_1), (ZERO_1, STAGES), (STAGES, DUALPIPEV_1), (DUALPIPEV_1, SLICES), (SLICES, ZERO_3)],
)
def test_masters_go_into_another_layout_as_they_are(first: dict, second: dict, tmp_path: Path):
    jobs = [job(tmp_path, device="cuda", **layout, fp16=FP16, optimizer=ADAM) for layout in (first, second)]
    assert run_ranks(masters_that_differ, 2, *jobs) == [[], []]


def masters_that_differ(before: Job, after: Job) -> list[str]:
    """Those, of a loaded engine, that are not what the checkpoint says."""
    allow_fp16()
    engine = start(before)
    for seed in (1, 2, 3):
        train(engine, seed)
    stored = StoredState(save_checkpoint(engine, before, TrainState(step=3)))
    engine = _resumed(after)
    tensor = (engine.parallel.mesh.tensor, engine.parallel.coordinates.tensor)
    differing = []
    for name, part in slices(engine).items():
        cut = (None, 1, 0) if part.dim is None else (part.dim, *tensor)
        right = stored.read(name, MASTER, StoredSlice(*cut, 0, part.values.numel()))
        if not torch.equal(part.values.flatten(), right):
            differing.append(name)
    return differing


def test_a_checkpoint_of_bf16_without_a_scaler_is_read(tmp_path: Path):
    """As those saved before there was one without ZeRO."""
    sums = {"data_types": {"grad_accum_dtype": "bf16"}}
    assert run_ranks(
        scale_after_earlier_state, 1, job(tmp_path, ranks=1, bf16={"enabled": True}, **sums)
    ) == [1.0]


def scale_after_earlier_state(job: Job) -> float:
    optimizer = start(job).deepspeed.optimizer
    state = optimizer.state_dict()
    del state[LOSS_SCALER]
    optimizer.load_state_dict(state)
    return optimizer.loss_scale


def _counts(engine: TrainEngine) -> dict[str, Any]:
    kept = {key: _scaler(engine)[key] for key in ("cur_scale", "last_overflow_iter", "cur_hysteresis")}
    return {**kept, "skipped": engine.deepspeed.skipped_steps}


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
