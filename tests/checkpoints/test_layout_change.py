"""A run that resumes in another layout is the run that was never stopped."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor

from pipeline.checkpoints import load
from pipeline.checkpoints.load import load_checkpoint
from pipeline.checkpoints.manifest import read_checkpoint
from pipeline.checkpoints.stored import MASTER, Slice, StoredState
from pipeline.job.options import parse_options
from pipeline.job.resolve import resolve
from pipeline.job.schema import KEYS
from pipeline.job.world import Host, World
from pipeline.parallel.parameters import slicing_of
from tests.checkpoints.layouts import OPTIMIZERS, Layout, arguments, find
from tests.checkpoints.matrices import (
    FAST,
    FORMATS,
    OFFLINE,
    OTHER,
    RESHAPE,
    Row,
    offline,
    special,
    values,
)
from tests.checkpoints.runs import BEFORE, STEPS, Runs, differences, differing_state, losses, saved
from tests.checkpoints.small import save_checkpoint, start
from tests.covering import slow
from tests.end_to_end.jobs import Fault
from tests.harness import run_ranks


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("layouts"))


def convert(command: list[str], ranks: int, source: Path) -> list[str]:
    """Load a checkpoint in another layout and save it there. Returns weights that are not rounded masters."""
    job = resolve(parse_options(command), World((Host("localhost", ranks),), "cpu"))
    engine = start(job)
    checkpoint = read_checkpoint(source)
    load_checkpoint(engine, checkpoint)
    stored, wrong = StoredState(source), []
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]) if job.zero_stage == 3 else nullcontext():
            dim = slicing_of(parameter).dim
            part = (None, 1, 0) if dim is None else (dim, job.mesh.tensor, engine.parallel.coordinates.tensor)
            master = stored.read(name, MASTER, Slice(*part, 0, parameter.numel()))
            if not torch.equal(parameter.detach().flatten(), master.to(parameter.dtype)):
                wrong.append(name)
    save_checkpoint(engine, job, checkpoint.state)
    return wrong


def name(row: Row) -> str:
    model, first, second = row
    return f"{model}, {first} to {second}"


def sizes(layout: str) -> Layout:
    """A layout without what only moves things inside the files of a rank."""
    found = find(layout)
    return found if "pipeline" in found.more else replace(found, offload="none", more={})


def is_same(losses_here: list[float], runs: Runs, model: str) -> bool:
    """Whether losses are those of one fp32 rank, to what the 8 bits of bf16 resolve: in 16 bits a layout's
    sums are its own."""
    whole = [loss for _, loss, _ in losses(runs.trained("one", STEPS, model))]
    return losses_here == pytest.approx(whole, rel=2**-8)


def check(runs: Runs, row: Row, optimizer: str = "AdamW") -> None:
    model, first, second = row
    run, said = runs.resumed(first, second, model=model, optimizer=optimizer)
    # Settings inside a ZeRO stage change what lies where in the files, and are no change of the layout.
    assert ("; layout changed: " in said) != (sizes(first) == sizes(second))
    assert differences(runs, run, model=model, optimizer=optimizer) == []


@pytest.mark.parametrize(
    "row", [FAST[0], *(pytest.param(row, marks=pytest.mark.slow) for row in FAST[1:])], ids=name
)
def test_another_layout_resumes(row: Row, runs: Runs):
    check(runs, row)


@pytest.mark.parametrize("row", slow((*FAST, *OTHER), RESHAPE, values), ids=name)
def test_any_layout_resumes(row: Row, runs: Runs):
    check(runs, row)


@pytest.mark.parametrize("row", slow((), OTHER, special), ids=name)
def test_further_layout_resumes(row: Row, runs: Runs):
    check(runs, row)


@pytest.mark.parametrize("row", slow((), FORMATS, offline), ids=name)
def test_other_formats_resume(row: Row, runs: Runs):
    model, first, second = row
    run, _ = runs.resumed(first, second, model=model)
    assert is_same([loss for _, loss, _ in losses(run)], runs, model)


@pytest.mark.parametrize("row", slow((), OFFLINE, offline), ids=name)
def test_an_offline_conversion_resumes(row: Row, runs: Runs):
    model, first, second = row
    run, said = runs.resharded(first, second, model=model)
    assert "; layout changed: " not in said
    if "bf16" in first + second:
        assert is_same([loss for _, loss, _ in losses(run)], runs, model)
    else:
        assert differences(runs, run, model=model) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "optimizer"),
    [
        (("tied", "pp2", "dp2 zero3"), "SGD"),
        (("tied", "dp2 zero3", "tp2"), "momentum"),
        pytest.param(("tied", "dp2 zero3", "tp2"), "SGD", marks=pytest.mark.repeats),
        pytest.param(("tied", "dp2 zero3", "tp2"), "Adam", marks=pytest.mark.repeats),
        pytest.param(("tied", "pp2", "dp2 zero3"), "Adam", marks=pytest.mark.repeats),
        pytest.param(("tied", "pp2", "dp2 zero3"), "momentum", marks=pytest.mark.repeats),
    ],
    ids=lambda value: value if isinstance(value, str) else name(value),
)
def test_other_optimizers_resume(row: Row, optimizer: str, runs: Runs):
    check(runs, row, optimizer)


# The state of Adam has the names of AdamW's.
@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer", ["momentum", *(pytest.param(each, marks=pytest.mark.repeats) for each in ("SGD", "Adam"))]
)
def test_other_optimizers_are_converted_offline(optimizer: str, runs: Runs):
    run, _ = runs.resharded("dp2 zero1", "tp2", optimizer=optimizer)
    assert differences(runs, run, optimizer=optimizer) == []


def test_every_optimizer_that_a_job_may_have_is_carried():
    assert {values["type"] for values in OPTIMIZERS.values()} == set(KEYS["optimizer.type"].choices)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["bf16 pp2", "bf16 dp2", "dp2 zero2 round robin"])
def test_the_same_layout_resumes_to_the_bit(layout: str, runs: Runs):
    """Where DeepSpeed cannot read what it wrote, it is converted all the same."""
    run, said = runs.resumed(layout, layout)
    assert "layout changed" not in said
    assert losses(run) == losses(runs.trained(layout, STEPS))


# The other rows also train above; those of `OFFLINE` have each value and format on either side.
@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [
        *slow((), OFFLINE, offline),
        *(pytest.param(row, marks=pytest.mark.repeats) for row in (*FAST, *OTHER)),
    ],
    ids=name,
)
def test_not_a_bit_is_lost(row: Row, runs: Runs):
    model, first, second = row
    source = saved(runs.trained(first, BEFORE, model), BEFORE)
    run, ranks = f"{first} as {second}, {model}", find(second).ranks
    command = arguments(runs.folder, run, second, steps=BEFORE, model=model)
    assert run_ranks(convert, ranks, command, ranks, source) == [[]] * ranks
    assert run_ranks(differing_state, 1, source, saved(runs.folder / run, BEFORE), 0.0) == [[]]


def moments_are_dropped(*_: Any) -> None:
    view = StoredState.view

    def forgetful(stored: StoredState, name: str, key: str, wanted: Slice) -> Tensor:
        return view(stored, name, key, wanted) * (key == MASTER)

    StoredState.view = forgetful


def steps_are_forgotten(*_: Any) -> None:
    scalars = StoredState.scalars
    StoredState.scalars = lambda stored, name: {k: v * 0 for k, v in scalars(stored, name).items()}


def slices_are_exchanged(*_: Any) -> None:
    """Each tensor rank takes the slice of the one before it."""
    view = StoredState.view

    def exchanged(stored: StoredState, name: str, key: str, wanted: Slice) -> Tensor:
        return view(stored, name, key, wanted._replace(index=(wanted.index - 1) % wanted.parts))

    StoredState.view = exchanged


def weights_are_not_refreshed(*_: Any) -> None:
    load.refresh_weights = lambda engine: None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "pair"),
    [
        (moments_are_dropped, ("dp2 zero1", "pp2")),
        (steps_are_forgotten, ("dp2 zero1", "pp2")),
        (slices_are_exchanged, ("one", "tp2")),
        (weights_are_not_refreshed, ("one", "dp2 zero3")),
    ],
    ids=lambda value: value.__name__ if callable(value) else " to ".join(value),
)
def test_the_comparison_sees_a_wrong_conversion(fault: Fault, pair: tuple[str, str], runs: Runs):
    run, _ = runs.resumed(*pair, fault)
    assert differences(runs, run)
