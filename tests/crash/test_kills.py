"""Killed at random points, a run loses nothing (`lives` has the long version of this)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.lives import killed_run

KILLS = 20


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1])
def test_a_run_that_is_killed_again_and_again_is_the_run_that_never_was(seed: int, tmp_path: Path):
    report = killed_run(tmp_path, KILLS, seed)
    assert sum(report.killed.values()) == KILLS
    # The point of the exercise: it was killed in the middle of many different things.
    assert len(report.killed) >= 8, report
    assert report.conversions >= 5, report
