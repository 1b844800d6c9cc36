"""Typed records: what a user may write, said once, and everything that is wrong with what was written.

A record is a dataclass. The annotation of a field says type and range; `described` says default and meaning:

    @dataclass(frozen=True, slots=True)
    class Pipeline(Record):
        stages: Annotated[int, Limits(1)] = described(1, "Stages.")

The DeepSpeed JSON, the parameters of a schedule, the options of a run and run.json, the fields of a model
and the blend file are all read by it. Why not pydantic: there, a model with one wrong field does not exist,
and here the rules check all the others (reading the wrong one raises `Undecided`); a number or "auto" gets an
error for each alternative; and line, rule, remedy and the reasons of refused keys would all have to be
written beside it.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass
from functools import cache
from math import inf
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pipeline.base.problems import Problem
from pipeline.base.user_input import expanded, is_text
from pipeline.base.words import did_you_mean

AUTO = "auto"
Auto = Literal["auto"]
# Whole numbers fit 64 bits.
HIGHEST = 2**63 - 1
R = TypeVar("R")


class Undecided(Exception):
    """A value that is needed has a problem of its own, which is reported; nothing more can be said."""


@dataclass(frozen=True)
class Limits:
    """Range of a number, or of each number in a list, or the texts that are taken.

    Attributes:
        low, high: Bounds, inclusive; with `above` and `below` they are exclusive.
        choices: The only values.
        filled: A text or list is not empty.
        path: A text is a path, in which ~ and variables are read.
    """

    low: float | None = None
    high: float | None = None
    above: bool = False
    below: bool = False
    choices: tuple[Any, ...] = ()
    filled: bool = False
    path: bool = False

    def admit(self, value: Any) -> bool:
        if self.choices:
            return value in self.choices
        if isinstance(value, (list, tuple)):
            return (bool(value) or not self.filled) and all(self.admit(item) for item in value)
        if isinstance(value, str):
            return bool(value) or not self.filled
        # Written so that NaN is in no range.
        from_low = self.low is None or value > self.low or (value == self.low and not self.above)
        to_high = self.high is None or value < self.high or (value == self.high and not self.below)
        return from_low and to_high

    def __str__(self) -> str:
        if self.choices:
            return f"one of {', '.join(shown(choice) for choice in self.choices)}"
        lower = "" if self.low is None else f"{'above' if self.above else 'at least'} {self.low:g}"
        upper = "" if self.high is None else f"{'below' if self.below else 'at most'} {self.high:g}"
        upper = "finite" if self.high == inf else upper
        return " and ".join(filter(None, (lower, upper, "not empty" if self.filled else "")))


@dataclass(frozen=True)
class Form:
    """One type that a value may have.

    Attributes:
        kind: bool, int, float, str, dict, list, or a record for an object with described fields.
        item: Of a list.
        marks: What else the annotation says.
    """

    kind: type
    limits: Limits = Limits()
    item: Form | None = None
    marks: tuple[Any, ...] = ()

    @property
    def words(self) -> str:
        if self.item is not None:
            return f"a list of {_PLURALS.get(self.item.kind, 'objects {...}')}"
        return str(self.limits) if self.limits.choices else _WORDS.get(self.kind, "an object {...}")

    def fits(self, value: object) -> bool:
        """Whether a value from JSON has this type, whatever its range. A whole number serves as a float."""
        if self.item is not None:
            listed = isinstance(value, (list, tuple))  # of objects, each has problems of its own
            return listed and (is_record(self.item.kind) or all(self.item.fits(item) for item in value))
        if isinstance(value, bool) or self.kind is bool:
            return isinstance(value, bool) and self.kind is bool
        if is_record(self.kind):
            return isinstance(value, dict)
        return isinstance(value, (int, float) if self.kind is float else self.kind)

    def admits(self, value: Any) -> bool:
        """Whether a value of this type is in its range."""
        inside = self.item is None or all(self.item.admits(item) for item in value)
        return inside and self.limits.admit(value)


_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
}
_PLURALS = {int: "whole numbers", float: "numbers", str: "strings"}


@dataclass(frozen=True)
class Field:
    """One field of a record.

    Attributes:
        forms: The types that its value may have.
        auto: The string "auto" leaves the value to the run.
        nullable: None is a value, in Python; in JSON the key is then left out, or null where that has a
            meaning of its own (``null`` among the details).
        default: What holds when it is absent; MISSING: it is required.
        meaning: What it does.
        details: What else the record's reader needs to know.
    """

    name: str
    forms: tuple[Form, ...]
    auto: bool
    nullable: bool
    default: Any
    meaning: str
    details: Mapping[str, Any]

    @property
    def block(self) -> type | None:
        """The record that an object of this name is read as."""
        return next((form.kind for form in self.forms if is_record(form.kind)), None)

    @property
    def choices(self) -> tuple[Any, ...]:
        return next((form.limits.choices for form in self.forms if form.limits.choices), ())

    @property
    def default_text(self) -> str:
        """The default as the documentation says it."""
        if "default_text" in self.details:
            return self.details["default_text"]
        if self.default is MISSING:
            return "required"
        return "absent" if self.default is None or self.block else shown(self.default)

    @property
    def words(self) -> str:
        """The types, in words."""
        return " or ".join([*(form.words for form in self.forms), *(["null"] if self.takes_null else [])])

    @property
    def takes_null(self) -> bool:
        """Whether null in JSON is a value, and not that of an absent key."""
        return self.nullable and "null" in self.details

    @property
    def is_path(self) -> bool:
        """Whether it is one, or a list of them."""
        return any((form.item or form).limits.path for form in self.forms)

    @property
    def limits(self) -> str:
        return next((str(form.limits) for form in self.forms if str(form.limits)), "")


def described(
    default: Any = MISSING, meaning: str = "", *, default_text: str | None = None, **details: Any
) -> Any:
    """A field of a record with its default (none: required) and meaning.

    Args:
        default_text: What the documentation calls the default, where the run decides.
    """
    if default_text is not None:
        details["default_text"] = default_text
    metadata = {"meaning": meaning, **details}
    if is_record(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def is_record(kind: Any) -> bool:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


@cache
def fields_of(record: type) -> Mapping[str, Field]:
    """The fields of a record, by name."""
    hints = get_type_hints(record, include_extras=True)
    return types.MappingProxyType(
        {field.name: _field(field, hints[field.name]) for field in dataclasses.fields(record)}
    )


def _field(field: dataclasses.Field[Any], hint: Any) -> Field:
    parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    default = field.default if field.default_factory is MISSING else field.default_factory()
    kinds = [part for part in parts if part not in (Auto, type(None))]
    details = dict(field.metadata)
    return Field(
        field.name,
        tuple(_form(part) for part in kinds),
        Auto in parts or "auto" in details,
        type(None) in parts,
        default,
        details.pop("meaning", ""),
        details,
    )


def _form(hint: Any) -> Form:
    limits, marks = Limits(), ()
    if get_origin(hint) is Annotated:
        limits = next((each for each in hint.__metadata__ if isinstance(each, Limits)), limits)
        marks = tuple(each for each in hint.__metadata__ if each is not limits)
        hint = hint.__origin__
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        return Form(type(choices[0]), Limits(choices=choices))
    if get_origin(hint) in (list, tuple):
        return Form(list, limits, _form(get_args(hint)[0]), marks)
    return Form(get_origin(hint) or hint, limits, marks=marks)


def shown(value: object) -> str:
    """A value as JSON writes it; 500000000 as 5e8."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)) and value and (abs(value) >= 1e5 or abs(value) < 1e-4):
        digits, _, exponent = f"{value:e}".partition("e")
        digits = digits.rstrip("0").removesuffix(".")
        return f"{digits}e{int(exponent)}" if len(digits) == 1 else str(value)
    return str(value)


def whole(field: Field, value: Any) -> Any:
    """The value, a whole float such as 5e8 turned into an int where whole numbers are meant."""
    kinds = [form.kind for form in field.forms]
    if isinstance(value, float) and int in kinds and float not in kinds and value.is_integer():
        return int(value) if abs(value) <= HIGHEST else value
    return value


def with_paths(field: Field, value: Any) -> Any:
    """The value with ~ and variables read, if it is a path or has some; of ``NAME=PATH``, those behind NAME.

    Raises:
        ValueError: a path cannot be read; the text says why.
    """
    if not field.is_path:
        return value
    if isinstance(value, (list, tuple)):
        return type(value)(with_paths(field, item) for item in value)
    if not isinstance(value, str):
        return value
    name, equals, path = value.partition("=")
    named = bool(equals) and path.startswith(("~", "$"))
    return f"{name}={expanded(path)}" if named else expanded(value)


def path_problem(field: Field, value: object, where: str) -> Problem | None:
    """Why `with_paths` cannot read the value."""
    try:
        with_paths(field, value)
    except ValueError as error:
        return Problem(where, value, str(error), "Write the path in full")
    return None


def type_problem(field: Field, value: object, where: str) -> Problem | None:
    """Whether a value has none of the field's types."""
    if (value == AUTO and field.auto) or any(form.fits(value) for form in field.forms):
        return None
    if value is None and field.takes_null:
        return None
    remedy = remedy_for(field)
    if isinstance(value, str):
        with suppress(ValueError):
            meant = json.loads(value)
            if any(form.fits(meant) and form.admits(meant) for form in field.forms):
                remedy = f"Write {value} without the quotes"
    return Problem(where, value, f"must be {field.words}, not {_json_type(value)}", remedy)


def range_problem(field: Field, value: object, where: str) -> Problem | None:
    """Whether a value that has one of the field's types is out of its range."""
    if value == AUTO and field.auto:
        return None
    if isinstance(value, str) and not is_text(value):
        return Problem(where, value, "is not UTF-8 text", "Use UTF-8")
    if isinstance(value, int) and abs(value) > HIGHEST:
        return Problem(where, value, f"must be at most {HIGHEST}", remedy_for(field))
    forms = [form for form in field.forms if form.fits(value)]
    if not forms or any(form.admits(value) for form in forms):
        return None
    rule = "must not be empty" if forms[0].limits.filled else f"must be {forms[0].limits}"
    return Problem(where, value, rule, remedy_for(field))


def remedy_for(field: Field) -> str:
    """What may be given instead of a wrong value."""
    bounds = "" if field.limits in ("", field.words) else f", {field.limits}"
    auto = ', or "auto"' if field.auto else ""
    default = field.default_text
    return f"Give {field.words}{bounds}{auto}" + ("" if default in _NONE else f" (default: {default})")


_NONE = ("absent", "required")


def _json_type(value: object) -> str:
    names: dict[Any, str] = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "a string",
        dict: "an object",
    }
    return "null" if value is None else names.get(type(value), "a list")


# Block, name and value of a key -> why it is not taken, if it is not.
Refuse = Callable[[str, str, object], "Problem | None"]


def check(
    record: type,
    values: dict[str, Any],
    where: Callable[[str], str],
    refuse: Refuse | None = None,
    block: str = "",
) -> Iterator[Problem]:
    """What is wrong with an object that should be a record. Wrong values are removed from `values`, so that
    the rest can be used, whole floats become integers, and paths are read.

    Args:
        where: Dotted key -> what problems call it (file and line).
        refuse: Asked before a key is looked at.
        block: Dotted key of the object itself.
    """
    known, written = fields_of(record), list(values.items())
    for name, value in written:
        path = f"{block}.{name}" if block else name
        problem = refuse(block, name, value) if refuse else None
        if problem is None and name not in known:
            problem = Problem(where(path), value, "there is no such key", did_you_mean(name, known))
        if problem is None:
            values[name] = value = whole(known[name], value)
            problem = value_problem(known[name], value, where(path))
        if problem is not None:
            del values[name]
            yield problem
        else:
            values[name] = value = with_paths(known[name], value)
            yield from _check_inside(known[name], value, where, refuse, path)
    for name in known.keys() - dict(written).keys():
        if known[name].default is MISSING:
            path = f"{block}.{name}" if block else name
            yield Problem(where(path), None, "is required and was not given", remedy_for(known[name]))


def _check_inside(
    field: Field, value: Any, where: Callable[[str], str], refuse: Refuse | None, path: str
) -> Iterator[Problem]:
    """Objects in a value that is an object with described fields, or a list of them."""
    if isinstance(value, dict) and field.block is not None:
        yield from check(field.block, value, where, refuse, path)
    for form in field.forms:
        if form.item is not None and is_record(form.item.kind) and isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, dict):
                    yield from check(form.item.kind, item, where, refuse, f"{path}[{index}]")
                else:
                    rule = f"must be an object {{...}}, not {_json_type(item)}"
                    yield Problem(where(f"{path}[{index}]"), item, rule, f"Give {form.item.words}")


def value_problem(field: Field, value: object, where: str) -> Problem | None:
    """What is wrong with one value."""
    return (
        type_problem(field, value, where)
        or range_problem(field, value, where)
        or path_problem(field, value, where)
    )


def range_problems(record: Any, where: Callable[[str], str] = str) -> Iterator[Problem]:
    """What is out of range in the fields of a record that was made from values of the right types; of a list,
    each item by itself."""
    for name, field in fields_of(type(record)).items():
        value = getattr(record, name)
        if isinstance(value, tuple):
            items = dataclasses.replace(field, forms=tuple(form.item for form in field.forms if form.item))
            yield from filter(None, (range_problem(items, item, where(name)) for item in value))
        elif value is not None and (problem := range_problem(field, value, where(name))):
            yield problem


class Record:
    """Base of the records that are built from what could be used of an object. A value that was refused is
    not set, and reading it raises `Undecided`. Slots, so that no default replaces it."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name in fields_of(type(self)):
            raise Undecided(name)
        raise AttributeError(name)


def build(record: type[R], values: Mapping[str, Any], written: Mapping[str, Any]) -> R:
    """The record of an object.

    Args:
        values: What `check` left.
        written: The object before: what is in it and not in `values` was refused.
    """
    made = object.__new__(record)
    for name, field in fields_of(record).items():
        if name in values:
            value = values[name]
            if field.block is not None and isinstance(value, dict):
                value = build(field.block, value, written[name])
            object.__setattr__(made, name, value)
        elif name not in written and field.default is not MISSING:
            default = field.default
            object.__setattr__(
                made, name, copy.copy(default) if isinstance(default, (list, dict)) else default
            )
    return made
