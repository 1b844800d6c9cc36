"""Which cases of a long table always run: few that together show all there is to show, once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case")
Facts = Callable[[Any], Iterable[Hashable]]


def covering(always: Iterable[Case], further: Sequence[Case], facts: Facts) -> list[Case]:
    """The cases of `further` that, added to `always`, show every fact that any case shows.

    Whichever shows most that is new comes next: not the fewest possible, but few, and the same every time.
    """
    missing = {fact for case in further for fact in facts(case)}
    missing -= {fact for case in always for fact in facts(case)}
    chosen = []
    while missing:
        best = max(further, key=lambda case: len(missing.intersection(facts(case))))
        chosen.append(best)
        missing -= set(facts(best))
    return [case for case in further if case in chosen]


def first_fast(cases: Sequence[Any], number: int) -> list[Any]:
    """Parameters of which the first `number` are fast tests, and all others slow ones."""
    rows = (case if isinstance(case, tuple) else (case,) for case in cases[number:])
    return [*cases[:number], *(pytest.param(*row, marks=pytest.mark.slow) for row in rows)]


def slow(always: Iterable[Case], further: Sequence[Case], facts: Facts) -> list[Any]:
    """Parameters for a slow test: all of `further`, those marked repeats that show nothing new."""
    chosen = covering(always, further, facts)
    return [
        pytest.param(case, marks=[pytest.mark.slow, *([] if case in chosen else [pytest.mark.repeats])])
        for case in further
    ]
