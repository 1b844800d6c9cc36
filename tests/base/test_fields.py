"""Typed records: what is taken, what is refused, and what can still be read beside a refused value."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, nan
from typing import Annotated, Any, Literal

import pytest

from pipeline.base.fields import (
    AUTO,
    Auto,
    Limits,
    Record,
    Undecided,
    build,
    check,
    described,
    fields_of,
    range_problems,
    shown,
)


@dataclass(frozen=True, slots=True)
class Inner(Record):
    name: Annotated[str, Limits(filled=True)] = described(meaning="Name.")
    size: Annotated[int, Limits(1)] = described(2, "Size.")


@dataclass(frozen=True, slots=True)
class Outer(Record):
    rate: Annotated[float, Limits(0, 1, above=True, below=True)] | Auto = described(0.5, "Rate.")
    mode: Literal["a", "b"] | list[int] = described("a", "Mode.")
    block: Inner | None = described(None, "A block.")
    blocks: list[Inner] = described([], "Blocks.")


def examined(values: dict[str, Any]) -> tuple[Outer, list[str]]:
    written = dict(values)
    problems = [str(problem) for problem in check(Outer, values, lambda key: key)]
    return build(Outer, values, written), problems


def test_absent_keys_have_their_defaults() -> None:
    record, problems = examined({})
    assert (record.rate, record.mode, record.block, record.blocks, problems) == (0.5, "a", None, [], [])


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"rate": 0}, "rate = 0: must be above 0 and below 1. Give a number, above 0 and below 1, or"),
        ({"rate": nan}, "must be above 0 and below 1"),
        ({"rate": True}, "must be a number, not true or false"),
        ({"rate": None}, "must be a number, not null"),
        ({"mode": "c"}, "must be one of a, b"),
        ({"mode": [1.5]}, "must be one of a, b or a list of whole numbers, not a list"),
        ({"mode": AUTO}, "must be one of a, b"),
        ({"block": 3}, "must be an object {...}, not a number"),
        ({"block": {"name": ""}}, "block.name = '': must not be empty"),
        ({"block": {}}, "block.name = None: is required and was not given"),
        (
            {"block": {"name": "x", "sise": 1}},
            "block.sise = 1: there is no such key. The nearest name is size",
        ),
        ({"blocks": [3]}, "blocks[0] = 3: must be an object {...}, not a number"),
        ({"blocks": [{"name": "x"}, {"name": "y", "size": 0}]}, "blocks[1].size = 0: must be at least 1"),
        ({"block": {"name": "x", "size": 2**63}}, "must be at most 9223372036854775807"),
    ],
)
def test_what_is_refused(values: dict[str, Any], said: str) -> None:
    (problem,) = examined(values)[1]
    assert said in problem


def test_a_refused_value_is_undecided_and_the_others_can_be_read() -> None:
    record, problems = examined({"rate": 2, "mode": [1], "block": {"size": 3.0, "name": 1}})
    assert len(problems) == 2
    assert record.mode == [1] and record.block is not None and record.block.size == 3
    for read in (lambda: record.rate, lambda: record.block.name):
        with pytest.raises(Undecided):
            read()
    with pytest.raises(AttributeError):
        _ = record.nothing


def test_a_required_value_that_is_absent_is_undecided() -> None:
    record, _ = examined({"block": {}})
    assert record.block is not None and record.block.size == 2
    with pytest.raises(Undecided):
        _ = record.block.name


def test_a_default_is_not_shared() -> None:
    examined({})[0].blocks.append(Inner("x", 1))
    assert examined({})[0].blocks == []


def test_ranges_of_a_record_that_was_made() -> None:
    assert [problem.key for problem in range_problems(Inner("", 0))] == ["name", "size"]
    assert fields_of(Inner)["name"].default_text == "required"


@pytest.mark.parametrize(
    ("value", "text"),
    [(True, "true"), (500_000_000, "5e8"), (1_048_576, "1048576"), (1e-8, "1e-8"), (1.0, "1.0"), (0, "0")],
)
def test_defaults_are_shown_as_json_writes_them(value: object, text: str) -> None:
    assert shown(value) == text


def test_a_finite_limit_says_so() -> None:
    assert str(Limits(0, inf, above=True, below=True)) == "above 0 and finite"
