"""Layouts that add the same numbers in the same order agree to the last bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.harness import run_ranks
from tests.parity.cases import Case
from tests.parity.compare import assemble
from tests.parity.layouts import CLIP
from tests.parity.ranks import train_rank

PIPELINE = Case(model="untied", pipeline=2, accumulation=4)
SLICED = Case(model="qwen", sequence=2, tensor=2, zero=2, **CLIP)


def final_weights(case: Case, folder: Path) -> dict[str, torch.Tensor]:
    return assemble(run_ranks(train_rank, case.world_size, case, case.job(folder)), -1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [
        # What is computed twice is computed alike.
        [replace(Case(model="llama"), recompute=mode) for mode in ("none", "full", "selective")],
        [replace(PIPELINE, recompute=mode) for mode in ("none", "full", "selective")],
        [replace(SLICED, recompute=mode) for mode in ("none", "full", "selective")],
        # The order of two addends does not matter: stages 0 to 2 differ in where they add, not in what.
        [Case(data=2, model="llama", zero=stage) for stage in (0, 1, 2)],
        # Micro-batches in order, whether stages overlap them or not. (A tied weight's two gradients would
        # be summed over micro-batches first on two stages, alternating on one.)
        [Case(model="untied", accumulation=4), PIPELINE, replace(PIPELINE, schedule="dualpipev")],
    ],
    ids=["recompute", "recompute in a pipeline", "recompute in slices", "ZeRO stages", "pipelines"],
)
def test_bit_equal_weights(cases: list[Case], tmp_path: Path):
    first, *others = [final_weights(case, tmp_path) for case in cases]
    for case, weights in zip(cases[1:], others, strict=True):
        unequal = [name for name, weight in weights.items() if not torch.equal(weight, first[name])]
        assert (case.id, unequal) == (case.id, [])
