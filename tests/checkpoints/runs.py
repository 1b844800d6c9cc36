"""Runs that resume in another layout, and how they differ from one that was never stopped."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline import reshard
from pipeline.checkpoints.stored import MASTER, StoredState
from tests.checkpoints.layouts import arguments, find
from tests.end_to_end.jobs import Fault, run_faulty_job
from tests.harness import run_job, run_ranks

BEFORE, STEPS = 2, 4
TOLERANCE = 1e-5


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
        run_job(command, find(layout).ranks).check()
        return self.folder / name

    def resumed(self, first: str, second: str, fault: Fault = nothing, **options: str) -> tuple[Path, str]:
        """The folder of a run that resumed in another layout, and what it printed."""
        source = self.trained(first, BEFORE, **options)
        name = f"{source.name} to {second}, {fault.__name__}"
        shutil.copytree(source, self.folder / name)
        command = arguments(self.folder, name, second, steps=STEPS, **options)
        said = run_faulty_job(command, find(second).ranks, fault).check().stdout[0]
        return self.folder / name, said

    def resharded(self, first: str, second: str, **options: str) -> tuple[Path, str]:
        """As `resumed`, from a checkpoint that was converted offline."""
        source = self.trained(first, BEFORE, **options)
        run = self.folder / f"{source.name} to {second}, offline"
        run.mkdir()
        shutil.copy(source / "metrics.jsonl", run)
        command = arguments(self.folder, run.name, second, steps=STEPS, **options)
        made, ranks = run.with_name(f"{run.name}, made"), find(second).ranks
        call = [str(source), str(made), "--world_size", str(ranks), *command]
        assert run_ranks(reshard.main, 1, call) == [0]
        said = run_job([*command, "--resume", str(made)], ranks).check().stdout[0]
        return run, said


def losses(run: Path) -> list[tuple[int, float, float]]:
    """Step, loss and consumed tokens."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [(line["step"], line["loss"], line["tokens"]) for line in lines if "loss" in line]


def saved(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"global_step{step}"


def differences(runs: Runs, run: Path, **options: str) -> list[str]:
    """In what a run that resumed is not one rank that was never stopped: losses, weights, moments."""
    whole = runs.trained("one", STEPS, **options)
    found = []
    for here, there in zip(losses(run), losses(whole), strict=True):
        if here != (there[0], pytest.approx(there[1], rel=TOLERANCE), there[2]):
            found.append(f"step, loss, tokens {here}, not {there}")
    return found + run_ranks(differing_state, 1, saved(run, STEPS), saved(whole, STEPS), TOLERANCE)[0]


def differing_state(one: Path, two: Path, tolerance: float) -> list[str]:
    """What is not equal, in units of the largest value, in the stored state of two checkpoints."""
    first, second = StoredState(one), StoredState(two)
    found = [f"only in one: {name}" for name in first.slicings.keys() ^ second.slicings.keys()]
    for name in first.slicings.keys() & second.slicings.keys():
        if first.scalars(name) != second.scalars(name):
            found.append(f"{name}: {first.scalars(name)} and {second.scalars(name)}")
        keys, others = sorted(first.state_names(name)), sorted(second.state_names(name))
        if keys != others:
            found.append(f"{name}: {keys} and {others}")
        for key in (MASTER, *keys):
            a, b = (state.read(name, key) for state in (first, second))
            if not (a - b).abs().max() <= tolerance * a.abs().max():
                found.append(f"{name}.{key}: {float((a - b).abs().max())} of {float(a.abs().max())}")
    return found
