"""The layout matrix: every layout trains as one process does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import run_ranks
from tests.parity.cases import Case
from tests.parity.compare import differences, replica_differences
from tests.parity.layouts import FAST
from tests.parity.ranks import train_rank


@pytest.mark.parametrize("case", FAST, ids=lambda case: case.id)
def test_layout_trains_as_one_process(case: Case, tmp_path: Path):
    runs = run_ranks(train_rank, case.world_size, case, case.job(tmp_path))
    assert differences(case, runs) == []
    assert replica_differences(runs) == []
