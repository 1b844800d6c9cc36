"""The layout matrix: every layout trains as one process does, and its replicas stay the same to the bit."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.covering import pairs_of_settings, slow
from tests.harness import run_ranks
from tests.parity.cases import Case
from tests.parity.compare import differences, replica_differences
from tests.parity.layouts import FAST, FOUR_AXES, SLOW
from tests.parity.ranks import train_rank


def check(case: Case, folder: Path) -> None:
    runs = run_ranks(train_rank, case.world_size, case, case.job(folder))
    assert differences(case, runs) == []
    assert replica_differences(runs) == []


@pytest.mark.parametrize("case", FAST, ids=lambda case: case.id)
def test_layout_trains_as_one_process(case: Case, tmp_path: Path):
    check(case, tmp_path)


def test_all_four_axes_at_once_train_as_one_process(tmp_path: Path):
    check(FOUR_AXES, tmp_path)


@pytest.mark.parametrize("case", slow((*FAST, FOUR_AXES), SLOW, pairs_of_settings), ids=lambda case: case.id)
def test_further_layout_trains_as_one_process(case: Case, tmp_path: Path):
    check(case, tmp_path)


def test_no_case_is_listed_twice():
    counts = Counter(case.id for case in (*FAST, FOUR_AXES, *SLOW))
    assert [name for name, count in counts.items() if count > 1] == []
    assert len({*FAST, *SLOW}) == len(FAST) + len(SLOW)
