"""A run that goes on in another layout is the run that was never stopped."""

from __future__ import annotations

import functools
import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor

from pipeline.checkpoints import layout_change
from pipeline.checkpoints.folder import read_checkpoint
from pipeline.checkpoints.stored import MASTER, Slice, StoredState
from pipeline.checkpoints.transfer import load_checkpoint, save_checkpoint
from pipeline.cluster.world import Host, World
from pipeline.job.options import parse_options
from pipeline.job.resolve import resolve
from pipeline.parallel.parameters import cut_of
from tests.checkpoints.layouts import LAYOUTS, arguments
from tests.checkpoints.small import start
from tests.end_to_end.jobs import Fault, run_faulty_job
from tests.harness import run_job, run_ranks

BEFORE, STEPS = 2, 4
TOLERANCE = 1e-5

# Each axis alone, then several at once.
FAST = (
    ("dp2 zero1", "pp2"),
    ("tp2", "dp2 zero3"),
    ("dp2 zero3", "one"),
)
SLOW = (
    ("dp2", "dp2 zero1"),
    ("dp2 zero1", "dp2"),
    ("dp2 zero1", "dp2 zero2"),
    ("dp2 zero2", "dp2 zero3"),
    ("dp2 zero3", "dp2 zero1"),
    ("dp2 zero3", "dp2"),
    ("dp2", "dp2 zero3"),
    ("dp2", "dp2 zero2"),
    ("dp2 zero2", "dp2"),
    ("dp2 zero1", "dp2 zero3"),
    ("dp2 zero2", "dp2 zero1"),
    ("dp2 zero1", "dp4 zero1"),
    ("dp4 zero3", "dp2 zero3"),
    ("dp2 zero1", "dp4 zero3 second shard"),
    ("dp4 zero3 second shard", "dp2 zero3"),
    ("dp2 zero2 round robin", "dp2 zero2"),
    ("dp2 zero2", "dp2 zero2 round robin"),
    ("dp2 zero2 offload", "dp2 zero3 offload"),
    ("dp2 zero3 offload", "dp2 zero2"),
    ("one", "tp4"),
    ("tp4", "tp2 zero3"),
    ("tp2 zero3", "tp2"),
    ("tp2", "sp2"),
    ("sp2 zero1", "one"),
    ("sp2", "pp2"),
    ("pp2", "pp2 other boundaries"),
    ("pp2 zero1", "pp4"),
    ("pp4", "pp2 zero1"),
    ("pp2", "dualpipev"),
    ("dualpipev", "one"),
    ("dualpipev zero1", "pp2 zero1"),
    ("dp2 zero2", "dualpipev zero1"),
    ("pp2 tp2 zero1", "dp2 zero3"),
    ("dp2 zero3", "pp2 tp2 zero1"),
    ("pp2 tp2", "tp2 sp2 zero2"),
    ("tp2 sp2 zero2", "pp2 dp2 zero1"),
    ("four-way", "dp2 zero3"),
    ("dp2 zero3", "four-way"),
)
# Untied weights; in Llama's kind fewer key and value heads, gates, and norms shared by tensor ranks, too.
OTHER_MODELS = (
    ("untied", "pp2 zero1", "dp2 zero3"),
    ("untied", "dp2 zero3", "pp2"),
    ("untied", "pp2 tp2", "dualpipev zero1"),
    ("untied", "tp2", "pp4"),
    ("llama", "one", "tp2 zero3"),
    ("llama", "pp2 tp2 zero1", "tp2 zero3"),
    ("llama", "tp2 sp2 zero2", "pp2 tp2"),
)
OPTIMIZERS = (("pp2", "dp2 zero3"), ("dp2 zero3", "tp2"))
# Weights of 16 bits are rounded masters: what is kept to the bit is the master.
FORMATS = (
    ("bf16 dp2 zero1", "bf16 pp2 zero1"),
    ("bf16 pp2 zero1", "bf16 dp2 zero3"),
    ("bf16 dp2 zero3", "bf16 dp2 zero0"),
    ("bf16 dp2 zero0", "bf16 dp2 zero2"),
    ("bf16 dp2 zero2", "dp2"),
    ("dp2 zero3", "bf16 dp2 zero1"),
    ("one", "bf16 dp2 zero0"),
    ("bf16 dp2 zero1", "bf16 dp2 zero1 offload"),
    ("bf16 dp2 zero1 offload", "tp2"),
    ("bf16 pp2 zero0", "bf16 dp2 zero1"),
    ("dp2 zero2", "bf16 pp2 zero0"),
)


def nothing(*_: Any) -> None:
    """No fault."""


class Runs:
    """Runs of a folder, each trained once and copied from there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @functools.cache  # noqa: B019  lives as long as the module's tests
    def trained(self, layout: str, steps: int, model: str = "tied", optimizer: str = "AdamW") -> Path:
        """The folder of a run that was not stopped."""
        name = f"{layout}, {steps}, {model}, {optimizer}"
        command = arguments(self.folder, name, layout, steps=steps, model=model, optimizer=optimizer)
        run_job(command, LAYOUTS[layout].ranks).check()
        return self.folder / name

    def resumed(self, first: str, second: str, fault: Fault = nothing, **options: str) -> tuple[Path, str]:
        """The folder of a run that went on in another layout, and what it said."""
        source = self.trained(first, BEFORE, **options)
        name = f"{source.name} to {second}, {fault.__name__}"
        shutil.copytree(source, self.folder / name)
        command = arguments(self.folder, name, second, steps=STEPS, **options)
        said = run_faulty_job(command, LAYOUTS[second].ranks, fault).check().stdout[0]
        return self.folder / name, said


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("layouts"))


def losses(run: Path) -> list[tuple[int, float, float]]:
    """Step, loss and consumed tokens."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [(line["step"], line["loss"], line["tokens"]) for line in lines if "loss" in line]


def saved(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"global_step{step}"


def differences(runs: Runs, run: Path, **options: str) -> list[str]:
    """In what a run that went on is not one rank that was never stopped: losses, weights, moments."""
    whole = runs.trained("one", STEPS, **options)
    found = []
    for here, there in zip(losses(run), losses(whole), strict=True):
        if here != (there[0], pytest.approx(there[1], rel=TOLERANCE), there[2]):
            found.append(f"step, loss, tokens {here}, not {there}")
    return found + run_ranks(differing_state, 1, saved(run, STEPS), saved(whole, STEPS), TOLERANCE)[0]


def differing_state(one: Path, two: Path, tolerance: float) -> list[str]:
    """What is not equal, in units of the largest value, in the stored state of two checkpoints."""
    first, second = StoredState(one), StoredState(two)
    found = [f"only in one: {name}" for name in first.cuts.keys() ^ second.cuts.keys()]
    for name in first.cuts.keys() & second.cuts.keys():
        if first.scalars(name) != second.scalars(name):
            found.append(f"{name}: {first.scalars(name)} and {second.scalars(name)}")
        keys = first.state_names(name)
        if keys != second.state_names(name):
            found.append(f"{name}: {keys} and {second.state_names(name)}")
        length = torch.Size(first.cuts[name].full_shape).numel()
        for key in (MASTER, *keys):
            a, b = (state.read(name, key, Slice(None, 1, 0, 0, length)) for state in (first, second))
            if not (a - b).abs().max() <= tolerance * a.abs().max():
                found.append(f"{name}.{key}: {float((a - b).abs().max())} of {float(a.abs().max())}")
    return found


def convert(command: list[str], ranks: int, source: Path) -> list[str]:
    """Load a checkpoint in another layout and save it there. Returns weights that are not rounded masters."""
    job = resolve(parse_options(command), World((Host("localhost", ranks),), "cpu"))
    engine = start(job)
    checkpoint = read_checkpoint(source)
    load_checkpoint(engine, checkpoint)
    stored, wrong = StoredState(source), []
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]) if job.zero_stage == 3 else nullcontext():
            dim = cut_of(parameter).dim
            part = (None, 1, 0) if dim is None else (dim, job.mesh.tensor, engine.parallel.coordinates.tensor)
            master = stored.read(name, MASTER, Slice(*part, 0, parameter.numel()))
            if not torch.equal(parameter.detach().flatten(), master.to(parameter.dtype)):
                wrong.append(name)
    save_checkpoint(engine, job, checkpoint.state)
    return wrong


def name(pair: tuple[str, str]) -> str:
    return " to ".join(pair)


def check(runs: Runs, first: str, second: str, **options: str) -> None:
    run, said = runs.resumed(first, second, **options)
    # Settings inside a ZeRO stage change what lies where in the files, and are no change of the layout.
    assert ("; layout changed: " in said) != ("round robin" in first + second)
    assert differences(runs, run, **options) == []


@pytest.mark.parametrize("pair", FAST, ids=name)
def test_another_layout_goes_on(pair: tuple[str, str], runs: Runs):
    check(runs, *pair)


@pytest.mark.slow
@pytest.mark.parametrize("pair", SLOW, ids=name)
def test_further_layout_goes_on(pair: tuple[str, str], runs: Runs):
    check(runs, *pair)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "first", "second"), OTHER_MODELS)
def test_other_models_go_on(model: str, first: str, second: str, runs: Runs):
    check(runs, first, second, model=model)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["SGD", "momentum"])
@pytest.mark.parametrize("pair", OPTIMIZERS, ids=name)
def test_other_optimizers_go_on(optimizer: str, pair: tuple[str, str], runs: Runs):
    check(runs, *pair, optimizer=optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("pair", FORMATS, ids=name)
def test_other_formats_go_on(pair: tuple[str, str], runs: Runs):
    """In 16 bits a layout's sums are its own, so that the loss is compared at what 8 bits resolve."""
    run, _ = runs.resumed(*pair)
    whole = [loss for _, loss, _ in losses(runs.trained("one", STEPS))]
    assert [loss for _, loss, _ in losses(run)] == pytest.approx(whole, rel=2**-8)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["bf16 pp2 zero0", "bf16 dp2 zero0", "dp2 zero2 round robin"])
def test_the_same_layout_goes_on_to_the_bit(layout: str, runs: Runs):
    """Where DeepSpeed cannot read what it wrote, it is converted all the same."""
    run, said = runs.resumed(layout, layout)
    assert "layout changed" not in said
    assert losses(run) == losses(runs.trained(layout, STEPS))


@pytest.mark.slow
@pytest.mark.parametrize("pair", [*FAST, *SLOW, *FORMATS], ids=name)
def test_not_a_bit_is_lost(pair: tuple[str, str], runs: Runs):
    first, second = pair
    source = saved(runs.trained(first, BEFORE), BEFORE)
    run, ranks = f"{first} as {second}", LAYOUTS[second].ranks
    command = arguments(runs.folder, run, second, steps=BEFORE)
    assert run_ranks(convert, ranks, command, ranks, source) == [[]] * ranks
    assert run_ranks(differing_state, 1, source, saved(runs.folder / run, BEFORE), 0.0) == [[]]


def moments_are_dropped(*_: Any) -> None:
    read = StoredState.read

    def forgetful(stored: StoredState, name: str, key: str, wanted: Slice) -> Tensor:
        return read(stored, name, key, wanted) * (key == MASTER)

    StoredState.read = forgetful


def steps_are_forgotten(*_: Any) -> None:
    scalars = StoredState.scalars
    StoredState.scalars = lambda stored, name: {k: v * 0 for k, v in scalars(stored, name).items()}


def slices_are_exchanged(*_: Any) -> None:
    """Each tensor rank takes the slice of the one before it."""
    read = StoredState.read

    def exchanged(stored: StoredState, name: str, key: str, wanted: Slice) -> Tensor:
        return read(stored, name, key, wanted._replace(index=(wanted.index - 1) % wanted.parts))

    StoredState.read = exchanged


def weights_are_not_refreshed(*_: Any) -> None:
    layout_change.refresh_weights = lambda engine: None


@pytest.mark.parametrize(
    ("fault", "pair"),
    [
        (moments_are_dropped, ("dp2 zero1", "pp2")),
        (steps_are_forgotten, ("dp2 zero1", "pp2")),
        (slices_are_exchanged, ("one", "tp2")),
        (weights_are_not_refreshed, ("one", "dp2 zero3")),
    ],
    ids=lambda value: value.__name__ if callable(value) else name(value),
)
def test_the_comparison_sees_a_wrong_conversion(fault: Fault, pair: tuple[str, str], runs: Runs):
    run, _ = runs.resumed(*pair, fault)
    assert differences(runs, run)
