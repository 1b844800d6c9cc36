"""fp16 without ZeRO is fp16 with ZeRO 1: the same sums rounded alike, and masters that keep what is lost.

That each of them is mixed precision at all is what the matrix compares with a plain loop.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest

from pipeline.engine import deepspeed_patches
from tests.harness import run_ranks
from tests.parity.cases import Case
from tests.parity.compare import assemble
from tests.parity.layouts import FP16
from tests.parity.ranks import Calls, Mutation, train_rank

# Without clipping: a norm that differs in its last bit would now and then round a weight the other way.
CASES = (
    Case(data=2, optimizer="momentum", **FP16),
    Case(pipeline=2, tensor=2, accumulation=2, **FP16),
    Case(pipeline=2, accumulation=4, schedule="dualpipev", scaling="fixed", **FP16),
)
# The norm's squares are summed in another order.
ALLOWED = 1e-6


def largest_difference(case: Case, folder: Path, mutation: Mutation | None = None) -> float:
    """Relative: of losses, norms and masters. Both must leave out the same steps and scale alike."""
    plain = run_ranks(train_rank, case.world_size, case, case.job(folder), mutation)
    sharded = replace(case, zero=1)
    expected = run_ranks(train_rank, case.world_size, sharded, sharded.job(folder))
    sizes = []
    for mine, other in zip(plain, expected, strict=True):
        assert mine.scales == other.scales
        for step, right in zip(mine.steps, other.steps, strict=True):
            assert step.skipped == right.skipped
            sizes.append(abs(step.loss / right.loss - 1))
            sizes.append(0.0 if step.skipped else abs(step.grad_norm / right.grad_norm - 1))
    weights, masters = assemble(plain, -1), assemble(expected, -1)
    sizes += [((weights[name] - each).norm() / each.norm()).item() for name, each in masters.items()]
    return max(sizes)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_trains_as_with_zero_1(case: Case, tmp_path: Path):
    assert largest_difference(case, tmp_path) <= ALLOWED


def masters_are_rounded(calls: Calls) -> None:
    """As if the weights were all that is kept."""
    kind = deepspeed_patches._Unsharded16BitOptimizer
    step = kind.step

    def step_and_round(optimizer: deepspeed_patches._Unsharded16BitOptimizer) -> None:
        calls()
        step(optimizer)
        for weight, master in zip(chain(*optimizer.fp16_groups), chain(*optimizer.fp32_groups), strict=True):
            master.data.copy_(weight.data)

    kind.step = step_and_round


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_rounded_masters_are_noticed(case: Case, tmp_path: Path):
    assert largest_difference(case, tmp_path, masters_are_rounded) > 10 * ALLOWED
