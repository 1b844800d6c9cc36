"""JSON with comments, read strictly: every problem has its line, nothing is guessed.

Beyond RFC 8259 it allows what people write in DeepSpeed files: ``//``, ``#`` and ``/* */`` comments and
trailing commas. It refuses what Python's json lets through: duplicate keys, NaN and infinities, whole
numbers beyond 64 bits, and half characters (lone surrogates).
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.base.problems import Problem
from pipeline.base.user_input import is_text, read_text

_SPACE = re.compile(r"(?:\s|//[^\n]*|#[^\n]*|/\*.*?\*/)*", re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')
# A line of a hostfile, behind comments or none.
_HOST_LINE = re.compile(r"\A(?:\s*#.*\n|\s*\n)*\s*[\w.@-]+[ \t]+slots\s*=")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_WORD = re.compile(r"[A-Za-z_][\w.]*|[^\s,{}\[\]:]+")
_CONSTANTS = {"true": True, "false": False, "null": None}
_MAX_DEPTH = 20
# Of what programs write: the files of thousands of ranks, and any depth that a tokenizer has.
_MOST_SAVED, _MAX_SAVED_DEPTH = 2**32, 100
# Digits of the largest 64-bit number.
_MAX_DIGITS = 19


@dataclass(frozen=True)
class Document:
    """A JSON object as read.

    Attributes:
        path: The file.
        values: Its content.
        lines: Line of each key, by dotted path (``zero_optimization.stage``).
        problems: Why it could not be read, or keys that appear twice. Values are then what was
            understood up to there.
        overlaid: Keys whose values are a command line's (`with_values`).
    """

    path: str
    values: dict[str, Any]
    lines: dict[str, int] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    overlaid: frozenset[str] = frozenset()

    def where(self, key: str) -> str:
        """The dotted key with its file and line, as problems name it."""
        line = self.lines.get(key)
        outer = not line and any(other.startswith(f"{key}.") for other in self.overlaid)
        if outer or any(f"{key}.".startswith(f"{other}.") for other in self.overlaid):
            return f"{key} (--set)"
        return f"{key} ({self.path}:{line})" if line else f"{key} ({self.path})"


def with_values(document: Document, assignments: Sequence[str]) -> Document:
    """The object with values of a command line in it, the last one of each key.

    Args:
        assignments: ``KEY.NAME=VALUE``. VALUE is JSON, or else a text.
    """
    if document.problems and not document.values:  # nothing was understood, and this would hide it
        return document
    values, problems, keys = copy.deepcopy(document.values), list(document.problems), set(document.overlaid)
    for text in assignments:
        key, equals, written = text.partition("=")
        *outer, name = key.split(".")
        if not equals or not all((*outer, name)):
            remedy = "Write it as --set optimizer.params.lr=3e-4"
            problems.append(Problem("set", text, "is not KEY=VALUE", remedy))
            continue
        block: Any = values
        for each in outer:
            block = block.setdefault(each, {}) if isinstance(block, dict) else None
        if not isinstance(block, dict):
            rule = f"{'.'.join(outer)} is no object that could hold it"
            problems.append(Problem("set", text, rule, "Set the outer key, or correct the file"))
        else:
            try:
                block[name] = _value(written)
                keys.add(key)
            except _Malformed as error:
                problems.append(Problem("set", text, error.rule, "Correct the value"))
    return replace(document, values=values, problems=tuple(problems), overlaid=frozenset(keys))


def _value(text: str) -> Any:
    """JSON, or a text that is none and does not begin like a list, an object or a string."""
    parser = _Parser(text, "")
    try:
        value = parser.value("")
        if parser.position == len(text):
            return value
    except _Malformed:
        if text[:1] in ("{", "[", '"'):
            raise
    if text[:1] in ("{", "[", '"'):
        raise _Malformed(parser.position, "something follows the value")
    return text


class _Malformed(ValueError):
    """The text stops being JSON at `position`."""

    def __init__(self, position: int, rule: str, remedy: str = "Correct this line") -> None:
        super().__init__(rule)
        self.position, self.rule, self.remedy = position, rule, remedy


def read_json(path: Path, option: str = "deepspeed_config", kind: str = "a DeepSpeed JSON") -> Document:
    """Read one file; a missing or malformed one is a Document with problems.

    Args:
        option: The option that named the file, and `kind` what it should name.
    """
    try:
        text = read_text(path).removeprefix("\ufeff")
    except FileNotFoundError:
        rule = "there is no such file"
    except (OSError, ValueError) as error:
        rule = f"cannot be read as JSON ({type(error).__name__}: {error})"
    else:
        document = parse_json(text, str(path))
        if not document.values and _HOST_LINE.search(text):
            rule = f"is a hostfile, and {kind} is read here"
            remedy = f"Give it as --hostfile {path}"
            return Document(str(path), {}, {}, (Problem(option, str(path), rule, remedy),))
        return document if document.values or path.suffix not in (".yml", ".yaml") else _yaml(path, option)
    return Document(str(path), {}, {}, (Problem(option, str(path), rule, f"Give the path of {kind}"),))


def _yaml(path: Path, option: str) -> Document:
    rule = "is YAML, and a JSON is read"
    remedy = "Write a JSON; ds_configs/README.md has the names of its keys, and GPT-NeoX's beside them"
    return Document(str(path), {}, {}, (Problem(option, str(path), rule, remedy),))


def saved_json(path: str | Path) -> Any:
    """The value in a file of JSON that a program has written; users may have changed it.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no regular file, no UTF-8 or no JSON, or nested so deeply that others would fail.
    """
    return parse_saved(read_text(path, _MOST_SAVED))


def parse_saved(text: str | bytes) -> Any:
    """The same of a text.

    Raises:
        ValueError: as `saved_json`.
    """
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    inside, depth = [value], 0
    while inside := [item for each in inside for item in _items(each) if isinstance(item, dict | list)]:
        if (depth := depth + 1) > _MAX_SAVED_DEPTH:
            raise ValueError("it is nested too deeply")
    return value


def _items(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def parse_json(text: str, path: str) -> Document:
    """Parse the text of file `path`."""
    parser = _Parser(text, path)
    try:
        values = parser.document()
    except _Malformed as error:
        line = text.count("\n", 0, error.position) + 1
        problem = Problem(f"{path}:{line}", _excerpt(text, error.position), error.rule, error.remedy)
        return Document(path, {}, parser.lines, (*parser.problems, problem))
    return Document(path, values, parser.lines, tuple(parser.problems))


def _excerpt(text: str, position: int) -> str:
    """The line that holds `position`, or its beginning."""
    start = text.rfind("\n", 0, position) + 1
    return text[start : start + 100].split("\n", 1)[0].strip()


class _Parser:
    """Recursive descent over one text; `position` is the next character to read."""

    def __init__(self, text: str, path: str) -> None:
        self.text, self.path, self.position = text, path, 0
        self.lines: dict[str, int] = {}
        self.problems: list[Problem] = []

    def document(self) -> dict[str, Any]:
        self.skip_space()
        if self.peek() != "{":
            raise _Malformed(self.position, "the file is one JSON object, and starts with '{'")
        values = self.object("")
        self.skip_space()
        if self.position < len(self.text):
            raise _Malformed(self.position, "nothing may follow the closing '}'")
        return values

    def value(self, key: str) -> Any:
        if key.count(".") + key.count("[") > _MAX_DEPTH:
            raise _Malformed(self.position, f"nested more than {_MAX_DEPTH} deep")
        character = self.peek()
        if character == "{":
            return self.object(key)
        if character == "[":
            return self.array(key)
        if character == '"':
            return self.string()
        return self.number_or_word()

    def object(self, prefix: str) -> dict[str, Any]:
        self.position += 1
        values: dict[str, Any] = {}
        while self.more("}"):
            start = self.position
            if self.peek() != '"':
                raise _Malformed(start, "expected a key in double quotes")
            name = self.string()
            key = f"{prefix}.{name}" if prefix else name
            self.note_key(key, name in values, start)
            self.expect(":")
            self.skip_space()
            values[name] = self.value(key)
            self.separator("}")
        return values

    def array(self, key: str) -> list[Any]:
        self.position += 1
        values: list[Any] = []
        while self.more("]"):
            values.append(self.value(f"{key}[{len(values)}]"))
            self.separator("]")
        return values

    def string(self) -> str:
        match = _STRING.match(self.text, self.position)
        if not match:
            raise _Malformed(self.position, "the string does not end on its line")
        try:
            value = json.loads(match.group(), strict=True)
        except ValueError as error:
            raise _Malformed(self.position, f"invalid string: {error}") from error
        if not is_text(value):
            raise _Malformed(self.position, "invalid string: half of a surrogate pair")
        self.position = match.end()
        return value

    def number_or_word(self) -> Any:
        word = _WORD.match(self.text, self.position)
        token = word.group() if word else self.peek()
        if token in _CONSTANTS:
            self.position += len(token)
            return _CONSTANTS[token]
        match = _NUMBER.fullmatch(token)
        if not match:
            rule = "expected a value: a number, string in double quotes, true, false, null, object or list"
            if token.strip("+-").lower() in ("nan", "infinity", "inf"):
                rule = f"{token} is not a JSON number"
            raise _Malformed(self.position, rule)
        whole = token.lstrip("-").isdecimal()
        number = math.inf if whole and len(token) > _MAX_DIGITS + 1 else json.loads(token)
        if not math.isfinite(number) or (whole and abs(number) >= 2**63):
            raise _Malformed(self.position, f"{token[:40]} is too large for a number")
        self.position += len(token)
        return number

    def note_key(self, key: str, seen: bool, start: int) -> None:
        line = self.text.count("\n", 0, start) + 1
        if seen:
            rule = f"the key was already given on line {self.lines[key]}"
            self.problems.append(Problem(f"{key} ({self.path}:{line})", "...", rule, "Keep one of the two"))
        self.lines[key] = line

    def more(self, closing: str) -> bool:
        """Whether another element follows; steps over the closing bracket if not."""
        self.skip_space()
        if self.peek() == closing:
            self.position += 1
            return False
        if not self.peek():
            raise _Malformed(len(self.text), f"the file ends where a '{closing}' is missing")
        return True

    def separator(self, closing: str) -> None:
        before = self.position
        self.skip_space()
        if self.peek() == ",":
            self.position += 1
        elif self.peek() != closing:
            rule = f"expected ',' or '{closing}'"
            if "\n" in self.text[before : self.position]:  # hjson, which DeepSpeed reads, needs none there
                raise _Malformed(self.position, rule, "Put a comma at the end of the line before")
            raise _Malformed(self.position, rule)

    def expect(self, character: str) -> None:
        self.skip_space()
        if self.peek() != character:
            raise _Malformed(self.position, f"expected '{character}'")
        self.position += 1

    def peek(self) -> str:
        return self.text[self.position : self.position + 1]

    def skip_space(self) -> None:
        self.position = _SPACE.match(self.text, self.position).end()  # type: ignore[union-attr]
