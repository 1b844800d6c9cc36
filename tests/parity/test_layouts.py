"""The layout matrix: every layout trains as one process does, and its replicas stay the same to the bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import fields
from itertools import product
from pathlib import Path

import pytest

from tests.covering import first_fast, slow
from tests.harness import run_ranks
from tests.parity.cases import Case
from tests.parity.compare import differences, replica_differences
from tests.parity.layouts import FAST, FOUR_AXES, SLOW
from tests.parity.ranks import train_rank


def what_settings_meet(case: Case) -> set[Hashable]:
    """By this some cases of `SLOW` are chosen that always run; the rest are repeats.

    Each value of each setting, and each kind of parallelism with each other one and with each number format.
    """
    kinds = {
        ("pipelined", case.pipeline > 1, case.schedule),
        ("sliced", case.tensor > 1),
        ("sequence sliced", case.sequence > 1),
        ("zero", case.zero),
    }
    formats = {(case.precision, case.accumulate), ("clip", case.clip > 0)}
    each = {(field.name, repr(getattr(case, field.name))) for field in fields(case)}
    return each | set(product(kinds, kinds)) | set(product(kinds, formats))


def check(case: Case, folder: Path) -> None:
    runs = run_ranks(train_rank, case.world_size, case, case.job(folder))
    assert differences(case, runs) == []
    assert replica_differences(runs) == []
    assert {run.differ for run in runs} == {""}


@pytest.mark.parametrize("case", first_fast(FAST, 6), ids=lambda case: case.id)
def test_layout_trains_as_one_process(case: Case, tmp_path: Path):
    check(case, tmp_path)


def test_all_four_axes_at_once_train_as_one_process(tmp_path: Path):
    check(FOUR_AXES, tmp_path)


@pytest.mark.parametrize("case", slow((*FAST, FOUR_AXES), SLOW, what_settings_meet), ids=lambda case: case.id)
def test_further_layout_trains_as_one_process(case: Case, tmp_path: Path):
    check(case, tmp_path)


def test_no_case_is_listed_twice():
    counts = Counter(case.id for case in (*FAST, FOUR_AXES, *SLOW))
    assert [name for name, count in counts.items() if count > 1] == []
    assert len({*FAST, *SLOW}) == len(FAST) + len(SLOW)
