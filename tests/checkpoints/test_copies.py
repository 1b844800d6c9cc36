"""Copies that must be equal: one that is not is named, and when they are compared.

That nothing is said of equal ones is shown by every layout of `tests/parity`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from pipeline.base.words import rank_list
from pipeline.checkpoints import copies
from pipeline.checkpoints.copies import CopiesDiffer, CopyCheck, copies_of
from pipeline.engine.build import build_engine
from pipeline.engine.distributed import start_distributed
from pipeline.engine.engine import TrainEngine
from pipeline.job.job import Job
from pipeline.parallel.context import Parallel
from tests.covering import first_fast
from tests.harness import run_ranks
from tests.parity.batches import global_batches, micro_batches
from tests.parity.cases import Case
from tests.parity.layouts import ALL_ON_CPU, CLIP, FP16
from tests.parity.ranks import TIMEOUT, allow_fp16

NORM, TABLE = "3.norm1.weight", "tied_modules.embed.weight"
ADAM = {"optimizer": "AdamW", "learning_rate": 0.01}
REPLICAS, TENSOR, TIED = "over replicas", "over tensor ranks", "over stages of a tied weight"


class Change(NamedTuple):
    """`by` is added to the first `elements` of one copy on one rank, for which `says` is to be said."""

    rank: int
    name: str
    what: str
    says: str
    by: float = 1e-3
    elements: int | None = None


def both(over: str, *ranks: int) -> str:
    return f"{over}: {rank_list(ranks)}"


def messages(case: Case, job: Job, changes: Sequence[Change]) -> list[str]:
    """What is said of each change after a step, when nothing may be said before."""
    start_distributed("cpu", 0, TIMEOUT)
    if case.precision == "fp16":
        allow_fp16()
    parallel = Parallel.create(job.mesh, TIMEOUT)
    engine = build_engine(job, parallel)
    check = CopyCheck(engine)
    tokens = int(global_batches(case.batch).mask[0].sum())
    engine.train_step(micro_batches(case, 0, parallel.coordinates.data), tokens)
    check.after_step(1)
    return [_message(engine, check, change) for change in changes]


def _message(engine: TrainEngine, check: CopyCheck, change: Change) -> str:
    """What is said while one copy is changed."""
    values, before = torch.zeros(1), torch.zeros(1)
    if engine.parallel.rank == change.rank:
        here = {(copy.name, copy.what): copy.values for copy in copies_of(engine)}
        values = here[change.name, change.what].view(-1)
        before = values.clone()
        values[: change.elements] += change.by
        assert not torch.equal(values, before), "the format has no such value"
    try:
        check.before_save(2)
    except CopiesDiffer as error:
        return str(error)
    finally:
        values.copy_(before)
    return ""


# The first three together have each kind of copy.
CASES = [
    (
        Case(data=2, clip=0.05, **ADAM),
        [
            Change(1, NORM, "weight", both(f"{NORM} (weight) {REPLICAS}", 0, 1)),
            Change(0, TABLE, "exp_avg", both(f"{TABLE} (exp_avg) {REPLICAS}", 0, 1), 1e-2, 1),
        ],
    ),
    (
        Case(sequence=2, tensor=2, zero=1, **ADAM),
        [
            Change(1, NORM, "weight", both(f"{NORM} (weight) {TENSOR}", 0, 1)),
            Change(3, "5.weight", "master", both(f"5.weight (master) {TENSOR}", 2, 3)),
            Change(3, "5.weight", "exp_avg_sq", both(f"5.weight (exp_avg_sq) {TENSOR}", 2, 3)),
            # Gathered from one owner: one element, in its last digits.
            Change(2, TABLE, "weight", both(f"{TABLE} (weight) {REPLICAS}", 0, 2), 1e-6, 1),
        ],
    ),
    (
        Case(pipeline=2, data=3, batch=12, zero=1, accumulation=2, model="five layers", **CLIP),
        [
            Change(3, TABLE, "weight", both(f"{TABLE} (weight) {TIED}", 0, 3)),
            Change(4, TABLE, "weight", f"{TABLE} (weight) {REPLICAS}: rank 4 against ranks 3, 5"),
        ],
    ),
    (
        Case(pipeline=2, data=2, accumulation=2, precision="bf16", accumulate="bf16", **ADAM),
        [
            Change(1, TABLE, "weight", both(f"{TABLE} (weight) {REPLICAS}", 0, 1), 0.5, 1),
            Change(2, TABLE, "weight", both(f"{TABLE} (weight) {TIED}", 0, 2), 0.5),
        ],
    ),
    (
        Case(data=2, tensor=2, zero=3, zero_options=ALL_ON_CPU, clip=0.05, **ADAM),
        [
            Change(1, NORM, "master", both(f"{NORM} (master) {TENSOR}", 0, 1)),
            Change(1, NORM, "exp_avg_sq", both(f"{NORM} (exp_avg_sq) {TENSOR}", 0, 1)),
            # Small enough to be whole on every rank.
            Change(2, NORM, "weight", both(f"{NORM} (weight) {REPLICAS}", 0, 2)),
        ],
    ),
    (
        Case(tensor=2, **FP16, **ADAM),
        [
            Change(1, NORM, "master", both(f"{NORM} (master) {TENSOR}", 0, 1), 0.2),
            Change(1, NORM, "exp_avg", both(f"{NORM} (exp_avg) {TENSOR}", 0, 1), 0.2),
        ],
    ),
    (
        Case(data=2, **FP16, **ADAM),
        [Change(1, NORM, "master", both(f"{NORM} (master) {REPLICAS}", 0, 1))],
    ),
    (
        Case(pipeline=2, tensor=2, accumulation=4, schedule="dualpipev", model="qk norm", **CLIP),
        [Change(3, NORM, "weight", both(f"{NORM} (weight) {TENSOR}", 2, 3))],
    ),
]


@pytest.mark.parametrize(("case", "changes"), first_fast(CASES, 3), ids=[case.id for case, _ in CASES])
def test_a_copy_that_is_changed_is_named(case: Case, changes: list[Change], tmp_path: Path):
    for said in run_ranks(messages, case.world_size, case, case.job(tmp_path), changes):
        for message, change in zip(said, changes, strict=True):
            assert change.says in message, (change, message)


def test_comparing_takes_a_thousandth_of_the_time(monkeypatch: pytest.MonkeyPatch):
    """A comparison of 20 ms after steps of 100: the next one comes 200 steps later, or before a save."""
    now, compared = 0.0, []

    def differences(check: CopyCheck) -> list[Any]:
        nonlocal now
        now += 0.02
        compared.append(step)
        return []

    monkeypatch.setattr(CopyCheck, "_differences", differences)
    monkeypatch.setattr(copies, "time", SimpleNamespace(perf_counter=lambda: now))
    check = CopyCheck(SimpleNamespace(parallel=Parallel.single(), step=7))
    for step in range(8, 500):
        now += 0.1
        check.after_step(step)
        if step in (208, 300):
            check.before_save(step)
    assert compared == [8, 208, 300]
