"""The tables of layout changes cover what their rules say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest

from tests.checkpoints.layouts import AXES, find
from tests.checkpoints.matrices import BITS, FAST, FORMATS, OFFLINE, OTHER, RESHAPE, Row

Value = tuple[str, Any]
VALUES = [(axis, value) for axis, values in AXES.items() for value in values]
WEIGHTS = ("tied", "untied")


def values(layout: str) -> set[Value]:
    return set(find(layout).values().items())


def formats(row: Row) -> tuple[str, str]:
    return find(row[1]).compute, find(row[2]).compute


def sides(rows: Iterable[Row]) -> tuple[set[Value], set[Value]]:
    """The values with which something is saved, and those with which it is resumed."""
    rows = list(rows)
    return set().union(*(values(row[1]) for row in rows)), set().union(*(values(row[2]) for row in rows))


def test_any_value_is_resumed_as_any_other():
    seen = {pair for _, first, second in RESHAPE for pair in product(values(first), values(second))}
    assert [pair for pair in product(VALUES, VALUES) if pair not in seen] == []


@pytest.mark.parametrize("weights", WEIGHTS)
def test_any_value_is_met_by_both_kinds_of_weights(weights: str):
    saved, resumed = sides(row for row in RESHAPE if row[0] == weights)
    assert saved == resumed == set(VALUES)


def test_the_first_table_is_in_fp32():
    assert {formats(row) for row in (*FAST, *RESHAPE, *OTHER)} == {("fp32", "fp32")}


@pytest.mark.parametrize("change", [("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "bf16")])
def test_any_value_is_met_by_each_change_of_format(change: tuple[str, str]):
    rows = [row for row in FORMATS if formats(row) == change]
    saved, resumed = sides(rows)
    assert saved == resumed == set(VALUES)
    assert {row[0] for row in rows} == set(WEIGHTS)


@pytest.mark.parametrize("table", [OFFLINE, BITS], ids=["offline", "bits"])
def test_any_value_and_format_is_met_on_both_sides(table: tuple[Row, ...]):
    saved, resumed = sides(table)
    assert saved >= set(VALUES)
    assert resumed >= set(VALUES)
    for side in zip(*map(formats, table), strict=True):
        assert set(side) == {"fp32", "bf16"}


@pytest.mark.parametrize("table", [(*FAST, *RESHAPE, *OTHER), FORMATS, OFFLINE])
def test_no_row_is_listed_twice_or_stays(table: tuple[Row, ...]):
    assert [row for row, count in Counter(table).items() if count > 1] == []
    assert [row for row in table if row[1] == row[2]] == []
