"""Random generators: no step draws from one, and a checkpoint holds those of every rank."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.checkpoints.manifest import TrainState
from pipeline.checkpoints.saver import Saver
from pipeline.checkpoints.snapshot import random_state, set_random_state
from pipeline.job.job import Job
from tests.checkpoints.small import job, start, train
from tests.harness import run_ranks


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return torch.equal(one, other) if torch.is_tensor(one) else one == other


def states_around_steps(job: Job) -> list[bool]:
    """Whether the generators are the same after two steps; and after something that draws."""
    engine = start(job)
    train(engine, 1)  # the first step allocates and compiles
    before = random_state()
    train(engine, 2)
    train(engine, 3)
    same = equal(before, random_state())
    torch.rand(())
    return [same, equal(before, random_state())]


@pytest.mark.parametrize(
    "config",
    [
        {"zero_optimization": {"stage": 1}},
        {"zero_optimization": {"stage": 3}},
        {"pipeline": {"stages": 2}},
        {"activation_checkpointing": {"mode": "full"}},
    ],
    ids=["zero 1", "zero 3", "pipeline", "recomputation"],
)
def test_no_step_draws_from_a_generator(config: dict, tmp_path: Path):
    """Dropout is a hash of seed, step and position."""
    assert run_ranks(states_around_steps, 2, job(tmp_path, dropout=0.5, **config)) == [[True, False]] * 2


def save_and_draw(job: Job) -> tuple[float, float, float]:
    engine = start(job)
    set_random_state(None, 7, engine.parallel.rank)
    draws()
    Saver(engine, job).begin(TrainState(step=1))
    return draws()


def test_a_checkpoint_holds_the_generators_of_every_rank(tmp_path: Path):
    first, second = run_ranks(save_and_draw, 2, job(tmp_path))
    assert not set(first) & set(second)
    folder = tmp_path / "run" / "checkpoints" / "global_step1"
    kept = random_state()
    for rank, drawn in enumerate((first, second)):
        set_random_state(folder, 0, rank)
        assert draws() == drawn
    set_random_state(folder, 7, 2)  # a rank more than there were
    assert draws() not in (first, second)
    random.setstate(kept["python"])


def test_a_new_start_takes_them_from_the_seed():
    set_random_state(None, 7, 1)
    one = draws()
    set_random_state(None, 7, 1)
    assert draws() == one
    set_random_state(None, 8, 1)
    assert draws() != one
