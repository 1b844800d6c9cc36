"""The lowest losses of each set and of all."""

from __future__ import annotations

import math

from pipeline.training.metrics import Best, best_line, best_of, with_evaluation


def test_the_first_is_the_lowest_and_a_lower_one_replaces_it():
    best = with_evaluation({}, 2, {None: (3.0, 10)})
    assert best == {"loss": 3.0, "step": 2, "sets": {"": {"loss": 3.0, "step": 2}}}
    best = with_evaluation(best, 4, {None: (3.5, 10)})
    assert best_of(best, None) == Best(3.0, 2)
    best = with_evaluation(best, 6, {None: (2.5, 10)})
    assert best == {"loss": 2.5, "step": 6, "sets": {"": {"loss": 2.5, "step": 6}}}


def test_all_together_is_the_mean_over_tokens():
    best = with_evaluation({}, 1, {"books": (2.0, 30), "code": (4.0, 10)})
    assert (best["loss"], best["step"]) == (2.5, 1)
    best = with_evaluation(best, 2, {"books": (2.2, 30), "code": (3.0, 10)})
    assert (best["loss"], best["step"]) == (2.4, 2)
    assert best["sets"] == {"books": {"loss": 2.0, "step": 1}, "code": {"loss": 3.0, "step": 2}}
    assert best_line(best) == (
        "best validation loss 2.4000 after step 2, books 2.0000 after step 1, code 3.0000 after step 2"
    )


def test_of_equal_ones_the_earlier_stays():
    best = with_evaluation(with_evaluation({}, 1, {None: (3.0, 1)}), 2, {None: (3.0, 1)})
    assert best["step"] == 1


def test_no_number_is_never_the_lowest():
    best = with_evaluation({}, 1, {None: (math.nan, 1)})
    assert best == {"sets": {}}
    assert best_of(best, None) is None
    assert best_line(best) is None
    best = with_evaluation(with_evaluation(best, 2, {None: (3.0, 1)}), 3, {None: (math.nan, 1)})
    assert best_of(best, None) == Best(3.0, 2)


def test_the_lowest_are_listed_for_a_run_that_keeps_them():
    """A run that begins to keep them later has the lowest that it knows."""
    best = with_evaluation({}, 1, {None: (3.0, 1)})
    for step, loss in ((2, 3.5), (3, 2.0), (4, math.nan), (5, 2.0), (6, 9.0), (7, 2.5)):
        best = with_evaluation(best, step, {None: (loss, 1)}, keep=3)
    assert best["lowest"] == [[3, 2.0], [5, 2.0], [7, 2.5]]
    assert with_evaluation(best, 8, {None: (1.0, 1)}, keep=1)["lowest"] == [[8, 1.0]]
    assert "lowest" not in with_evaluation(best, 8, {None: (1.0, 1)})


def test_without_sets_nothing_changes():
    assert with_evaluation({}, 1, {}) == {}
    assert best_line({}) is None
