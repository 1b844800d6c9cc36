"""A run that goes on in another layout is the run that was never stopped."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints.layouts import LAYOUTS, arguments
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
    ("dp2 zero1", "dp4 zero1"),
    ("dp4 zero3", "dp2 zero3"),
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
UNTIED = (("pp2 zero1", "dp2 zero3"), ("dp2 zero3", "pp2"), ("pp2 tp2", "dualpipev zero1"), ("tp2", "pp4"))
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


class Runs:
    """Runs of a folder, each trained once and copied from there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @functools.cache  # noqa: B019  lives as long as the module's tests
    def trained(self, layout: str, model: str, steps: int) -> Path:
        """The folder of a run that was not stopped."""
        name = f"{layout}, {model}, {steps}"
        command = arguments(self.folder, name, layout, steps=steps, model=model)
        run_job(command, LAYOUTS[layout].ranks).check()
        return self.folder / name

    def resumed(self, first: str, second: str, model: str = "tied", **changes: Any) -> tuple[Path, str]:
        """The folder of a run that went on in another layout, and what it said."""
        source = self.trained(first, model, BEFORE)
        name = f"{first} to {second}, {model}, {changes}"
        shutil.copytree(source, self.folder / name)
        command = arguments(self.folder, name, second, steps=STEPS, model=model, **changes)
        said = run_job(command, LAYOUTS[second].ranks).check().stdout[0]
        return self.folder / name, said


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("layouts"))


def losses(run: Path) -> list[tuple[int, float, float]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [(line["step"], line["loss"], line["tokens"]) for line in lines if "loss" in line]


def check(runs: Runs, first: str, second: str, model: str = "tied") -> str:
    """Losses, weights and moments are those of one rank that was never stopped."""
    run, said = runs.resumed(first, second, model)
    whole = runs.trained("one", model, STEPS)
    for (step, loss, tokens), expected in zip(losses(run), losses(whole), strict=True):
        assert (step, tokens) == (expected[0], expected[2])
        assert loss == pytest.approx(expected[1], rel=TOLERANCE)
    paths = (folder / "checkpoints" / f"global_step{STEPS}" for folder in (run, whole))
    assert run_ranks(differing_state, 1, *paths, TOLERANCE) == [[]]
    return said


def differing_state(one: Path, two: Path, tolerance: float) -> list[str]:
    """What is not equal, in units of the largest value, in the stored state of two checkpoints."""
    import torch

    from pipeline.checkpoints.stored import MASTER, Slice, StoredState

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


def name(pair: tuple[str, str]) -> str:
    return " to ".join(pair)


@pytest.mark.parametrize("pair", FAST, ids=name)
def test_another_layout_goes_on(pair: tuple[str, str], runs: Runs):
    assert "; layout changed: " in check(runs, *pair)


@pytest.mark.slow
@pytest.mark.parametrize("pair", SLOW, ids=name)
def test_further_layout_goes_on(pair: tuple[str, str], runs: Runs):
    check(runs, *pair)


@pytest.mark.slow
@pytest.mark.parametrize("pair", UNTIED, ids=name)
def test_untied_weights_go_on(pair: tuple[str, str], runs: Runs):
    check(runs, *pair, model="untied")
