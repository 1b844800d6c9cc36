"""bf16 gradients of micro-batches are summed in fp32.

The same micro-batch n times must give the gradient of one: with loss / n, n a power of two, every partial sum
is a multiple k * g / n that fp32 holds exactly. bf16 has no room for most of them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipeline.engine.build import build_engine
from pipeline.engine.distributed import start_distributed
from pipeline.job.job import Job
from pipeline.parallel.context import Parallel
from tests.harness import run_ranks
from tests.parity.batches import micro_batches
from tests.parity.cases import Case
from tests.parity.ranks import TIMEOUT, Slice, slices

# In bf16, rounding still puts the sum of four right in the end; that of sixteen it does not.
TIMES = 16
ZERO1 = Case(data=2, zero=1, batch=4, precision="bf16")
CASES = [
    ZERO1,
    # Stages 2 and 3 reduce each micro-batch: a sum over two ranks has more bits than either gradient, so
    # that here the second rank is a tensor rank.
    replace(ZERO1, data=1, tensor=2, zero=2),
    replace(ZERO1, data=1, tensor=2, zero=3),
    replace(ZERO1, data=1, pipeline=2),
]


def repeated_rank(case: Case, job: Job) -> dict[str, Slice]:
    """The weights after one step on n copies of a micro-batch; `case` has as many steps of accumulation."""
    start_distributed("cpu", 0, TIMEOUT)
    parallel = Parallel.create(job.mesh, TIMEOUT)
    engine = build_engine(job, parallel)
    once = replace(case, accumulation=1, batch=case.batch // case.accumulation)
    batch = micro_batches(once, 2, parallel.coordinates.data)[0]
    engine.train_step([batch] * case.accumulation, 16 * case.accumulation)
    return slices(engine)


def weights_after(case: Case, accumulation: int, folder: Path) -> list[dict[str, Slice]]:
    case = replace(case, accumulation=accumulation, batch=case.batch * accumulation)
    return run_ranks(repeated_rank, case.world_size, case, case.job(folder))


def unequal(case: Case, folder: Path) -> list[str]:
    once, often = (weights_after(case, times, folder) for times in (1, TIMES))
    return [
        name
        for one, many in zip(once, often, strict=True)
        for name, part in one.items()
        if not torch.equal(part.values, many[name].values)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_gradients_add_up_exactly(case: Case, tmp_path: Path):
    assert unequal(case, tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_bf16_sums_would_be_told_apart(case: Case, tmp_path: Path):
    assert unequal(replace(case, accumulate="bf16"), tmp_path) != []
