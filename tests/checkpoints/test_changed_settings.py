"""What changes in the JSON between two starts holds after a resume: the checkpoint does not bring it back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param

from pipeline.checkpoints.load import load_checkpoint
from pipeline.checkpoints.manifest import TrainState
from pipeline.engine.build import build_engine
from pipeline.engine.engine import TrainEngine
from pipeline.job.job import Job
from tests.checkpoints.saved_runs import find_checkpoint
from tests.checkpoints.small import job, save_checkpoint, start, train
from tests.harness import run_ranks

LAYOUTS = {
    "zero 0": {},
    "zero 1": {"zero_optimization": {"stage": 1}},
    "zero 3": {"zero_optimization": {"stage": 3}},
    "bf16, zero 1": {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}},
    "pipeline": {"pipeline": {"stages": 2}, "zero_optimization": {"stage": 1}},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_clipping_and_optimizer_settings_are_the_new_ones(name: str, tmp_path: Path):
    momentum = {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}}
    plain = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.0}}
    before = job(tmp_path, **LAYOUTS[name], optimizer=momentum, gradient_clipping=1.0)
    after = job(tmp_path, **LAYOUTS[name], optimizer=plain, gradient_clipping=0.1)
    results = run_ranks(step_after_resume, 2, before, after)
    assert all(norm > 0.1 for norm, _ in results)
    # Without momentum a clipped step is as long as rate * clip, whatever came before. A pipeline's stages
    # have a part of it each (and of a tied weight both the whole).
    lengths = [length for _, length in results]
    length = max(lengths) if name != "pipeline" else sum(part**2 for part in lengths) ** 0.5
    assert length == pytest.approx(0.1 * 0.1, rel=1e-2)


def step_after_resume(before: Job, after: Job) -> tuple[float, float]:
    """Gradient norm and length of this rank's first step after a resume with another JSON."""
    engine = start(before)
    train(engine, 1)
    save_checkpoint(engine, before, TrainState(step=1))
    engine = build_engine(after, engine.parallel)
    load_checkpoint(engine, find_checkpoint(after.output_dir, "auto"))
    weights = _weights(engine)
    norm = train(engine, 2).grad_norm
    return norm, float((_weights(engine) - weights).norm())


def _weights(engine: TrainEngine) -> torch.Tensor:
    """Of this rank, whole, fp32; a tied weight on the stage that owns it."""
    plain = engine.job.zero_stage == 0
    return torch.cat(
        [
            (parameter if plain else safe_get_full_fp32_param(parameter)).detach().flatten().clone()
            for parameter in engine.module.parameters()
            if not getattr(parameter, "ds_pipe_replicated", False)
        ]
    )
