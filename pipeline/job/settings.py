"""The DeepSpeed JSON as the rules read it: typed values, and where each of them stands in the file."""

from __future__ import annotations

import copy
from typing import Any

from pipeline.base.fields import AUTO, build, check
from pipeline.base.json_reader import Document
from pipeline.base.problems import Problem
from pipeline.base.words import did_you_mean
from pipeline.job.foreign_keys import REFUSED, REMOVED
from pipeline.job.schema import KEYS, DeepSpeedConfig, children


class Settings:
    """A file that was read, key by key.

    Attributes:
        config: Typed values, with the defaults of what is absent. A value that was refused raises `Undecided`
            where it is read; so does every value of a file that is no JSON.
        values: The usable part of what was written.
        problems: Why the rest is not.
    """

    def __init__(self, document: Document) -> None:
        self._document = document
        self.values: dict[str, Any] = copy.deepcopy(document.values)
        problems = check(DeepSpeedConfig, self.values, document.where, self._refuse)
        self.problems = [*document.problems, *problems]
        unread = bool(document.problems) and not document.values
        written = dict.fromkeys(children("")) if unread else document.values
        self.config: DeepSpeedConfig = build(DeepSpeedConfig, self.values, written)

    @property
    def written(self) -> dict[str, Any]:
        """The JSON as read, before anything was checked or resolved."""
        return self._document.values

    def given(self, key: str) -> bool:
        """Whether the JSON has the key with a usable value of its own, "auto" not counted."""
        return _at(self.values, key) not in (None, AUTO)

    def value(self, key: str) -> Any:
        """The usable value that was written for a key; None where there is none."""
        return _at(self.values, key)

    def names(self, block: str) -> tuple[str, ...]:
        """The keys with usable values that a block was given."""
        return tuple(_at(self.values, block) or ())

    def absent(self, key: str) -> bool:
        """Whether the JSON does not have the key, not even with a value that was refused."""
        written: Any = self._document.values
        for name in key.split("."):
            if not isinstance(written, dict) or name not in written:
                return True
            written = written[name]
        return False

    def where(self, key: str) -> str:
        """The key with its file and line."""
        return self._document.where(key)

    def problem(self, key: str, rule: str, remedy: str, value: object = None, warn: bool = False) -> Problem:
        """A problem of one key, at its line. `value` stands in for a key that is absent."""
        shown = _at(self.values, key) if value is None else value
        return Problem(self.where(key), shown, rule, remedy, "warning" if warn else "error")

    def _refuse(self, block: str, name: str, value: object) -> Problem | None:
        """Why a key is not taken here, or not with "auto"."""
        path = f"{block}.{name}" if block else name
        reason = _foreign(block, name, path)
        if reason is None and value == AUTO and not KEYS[path].auto:
            rule = '"auto" is resolved for batch sizes, optimizer and schedule values and bf16.enabled only'
            reason = rule, f"Give {KEYS[path].words}, or leave it out"
        return reason and Problem(self.where(path), value, *reason)


def _foreign(block: str, name: str, path: str) -> tuple[str, str] | None:
    """Rule and remedy for a key that is none of those that act."""
    if "." in name and (path in KEYS or path in REFUSED or path in REMOVED):
        outer, inner = path.rsplit(".", 1)
        return "a key with a dot in it is no key of a block", f'Write "{inner}" inside the block {outer}'
    if path in REMOVED:
        return "DeepSpeed 0.19 has removed this key", REMOVED[path]
    if path in REFUSED:
        return REFUSED[path]
    if path in KEYS:
        return None
    owners = [each for each in KEYS if each.rpartition(".")[2] == name]
    belongs = f"It belongs at {' or '.join(owners)}" if owners and name not in children(block) else None
    return f"there is no such key{block and f' in {block}'}", belongs or did_you_mean(name, children(block))


def _at(values: Any, key: str) -> Any:
    """The value of a dotted key; None where there is none."""
    for name in key.split("."):
        if not isinstance(values, dict) or name not in values:
            return None
        values = values[name]
    return values
