"""A DeepSpeed JSON against the table of keys: names, types, ranges and "auto". No rule between two keys."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from pipeline.base.json_reader import Document
from pipeline.base.problems import Problem
from pipeline.base.words import did_you_mean
from pipeline.job.foreign_keys import REFUSED, REMOVED
from pipeline.job.schema import KEYS, Key, children

AUTO = "auto"

# Described by the schedules themselves.
_OPEN_BLOCKS = frozenset({"scheduler.params"})
_EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a string",
    "object": "an object {...}",
    "numbers": "a list of numbers",
    "strings": "a list of strings",
    "partition": '"parameters", "uniform" or a list of whole numbers',
}


def validate(document: Document) -> tuple[dict[str, Any], list[Problem]]:
    """The values that can be used, whole floats turned into integers, and what is wrong with the rest.

    A value with a problem is left out, so that later rules judge only what was understood.
    """
    values = copy.deepcopy(document.values)
    problems = list(_check_block("", values, document))
    return values, problems


def _check_block(block: str, values: dict[str, Any], document: Document) -> Iterator[Problem]:
    for name in list(values):
        path = f"{block}.{name}" if block else name
        problem = _foreign(block, name, values[name], document) or _check_value(path, values, name, document)
        if problem:
            del values[name]
            yield problem
        elif isinstance(values[name], dict) and path not in _OPEN_BLOCKS:
            yield from _check_block(path, values[name], document)


def _foreign(block: str, name: str, value: object, document: Document) -> Problem | None:
    """Whether the key is one that is not taken here."""
    path = f"{block}.{name}" if block else name
    if "." in name and (path in KEYS or path in REFUSED or path in REMOVED):
        rule = "a key with a dot in it is no key of a block"
        outer, inner = path.rsplit(".", 1)
        return Problem(document.where(path), value, rule, f'Write "{inner}" inside the block {outer}')
    if path in REMOVED:
        return Problem(document.where(path), value, "DeepSpeed 0.19 has removed this key", REMOVED[path])
    if path in REFUSED:
        return Problem(document.where(path), value, *REFUSED[path])
    if path not in KEYS:
        rule = f"there is no such key in {block}" if block else "there is no such key"
        return Problem(document.where(path), value, rule, _remedy_for_unknown(name, block))
    return None


def _remedy_for_unknown(name: str, block: str) -> str:
    """The likely spelling in this block, or the block where the name would be right."""
    elsewhere = [path for path in KEYS if path.rpartition(".")[2] == name]
    if elsewhere and name not in children(block):
        return f"It belongs at {' or '.join(elsewhere)}"
    return did_you_mean(name, children(block))


def _check_value(path: str, values: dict[str, Any], name: str, document: Document) -> Problem | None:
    key, value = KEYS[path], values[name]
    if value == AUTO:
        if key.auto:
            return None
        rule = '"auto" is resolved for batch sizes, optimizer and schedule values and bf16.enabled only'
        return Problem(document.where(path), value, rule, f"Give {_EXPECTED[key.kind]}, or leave it out")
    if key.kind == "int" and isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        values[name] = value = int(value)
    if not _is_kind(key, value):
        rule = f"must be {_EXPECTED[key.kind]}, not {_json_type(value)}"
        return Problem(document.where(path), value, rule, _allowed(key))
    if not _in_range(key, value):
        return Problem(document.where(path), value, f"must be {_range(key)}", _allowed(key))
    return None


def _is_kind(key: Key, value: object) -> bool:
    if key.kind == "partition":
        return value in ("parameters", "uniform") or _is_list(value, int)
    if key.kind == "numbers":
        return _is_list(value, (int, float))
    if key.kind == "strings":
        return _is_list(value, str)
    if isinstance(value, bool):
        return key.kind == "bool"
    kinds: dict[str, Any] = {"int": int, "float": (int, float), "str": str, "object": dict, "bool": bool}
    return isinstance(value, kinds[key.kind])


def _is_list(value: object, kind: type | tuple[type, ...]) -> bool:
    return isinstance(value, list) and all(isinstance(v, kind) and not isinstance(v, bool) for v in value)


def _in_range(key: Key, value: Any) -> bool:
    if key.choices:
        return value in key.choices
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, (str, bool, dict)):
            continue
        if key.low is not None and (number < key.low or (key.above and number == key.low)):
            return False
        if key.high is not None and number > key.high:
            return False
    return True


def _range(key: Key) -> str:
    if key.choices:
        return f"one of {', '.join(str(choice) for choice in key.choices)}"
    lower = f"{'above' if key.above else 'at least'} {key.low:g}" if key.low is not None else ""
    upper = f"at most {key.high:g}" if key.high is not None else ""
    return " and ".join(filter(None, (lower, upper)))


def _allowed(key: Key) -> str:
    """The remedy for a wrong value."""
    bounds = _range(key)
    text = f"Give {_EXPECTED[key.kind]}" + (f", {bounds}" if bounds else "")
    return text + (', or "auto"' if key.auto else "") + f" (default: {key.default})"


def _json_type(value: object) -> str:
    if value is None:
        return "null"
    names = {bool: "true or false", int: "a number", float: "a number", str: "a string", dict: "an object"}
    return names.get(type(value), "a list")
