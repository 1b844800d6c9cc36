"""The loss scale of fp16 comes along into another layout."""

from __future__ import annotations

from pathlib import Path

import pytest
from deepspeed.accelerator import get_accelerator

from pipeline.checkpoints.folder import TrainState, find_checkpoint
from pipeline.checkpoints.transfer import load_checkpoint, save_checkpoint
from pipeline.job.job import Job
from pipeline.parallel.context import Parallel
from pipeline.training.build import build_engine
from tests.checkpoints.small import TIMEOUT, job, start, train
from tests.harness import run_ranks

FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}}
STAGES = {"pipeline": {"stages": 2}, "data_types": {"grad_accum_dtype": "fp16"}}


@pytest.mark.parametrize(
    ("first", "second"), [({}, STAGES), (STAGES, {}), ({}, {"zero_optimization": {"stage": 3}})]
)
def test_the_loss_scale_is_the_saved_one(first: dict, second: dict, tmp_path: Path):
    zero = {"zero_optimization": {"stage": 1}}
    before, after = (
        job(tmp_path, device="cuda", **{**FP16, **zero, **changes}) for changes in (first, second)
    )
    for scales in run_ranks(scales_around_a_change, 2, before, after):
        # Doubled at every second step from the third on: the count of good steps comes along as well.
        assert scales == [512.0, 256.0, 512.0, 512.0, 1024.0]


def scales_around_a_change(before: Job, after: Job) -> list[float]:
    """At a save after three steps, in a fresh engine, after the load, and after each of two more."""
    # DeepSpeed keeps CPUs from what they can do slowly.
    kind = type(get_accelerator())
    kind.is_fp16_supported = lambda _: True
    engine = start(before)
    for seed in (1, 2, 3):
        train(engine, seed)
    save_checkpoint(engine, before, TrainState(step=3))
    scales = [engine.deepspeed.optimizer.loss_scale]
    engine = build_engine(after, Parallel.create(after.mesh, TIMEOUT))
    scales.append(engine.deepspeed.optimizer.loss_scale)
    load_checkpoint(engine, find_checkpoint(after.output_dir, "auto"))
    scales.append(engine.deepspeed.optimizer.loss_scale)
    for seed in (4, 5):
        assert not train(engine, seed).skipped
        scales.append(engine.deepspeed.optimizer.loss_scale)
    return scales
