"""The DeepSpeed JSON as the rules read it, and what to do with a value that has a problem of its own."""

from __future__ import annotations

from typing import Any

from pipeline.base.json_reader import Document
from pipeline.base.problems import Problem
from pipeline.job.validate import AUTO, validate


class Undecided(Exception):
    """A value that is needed has a problem of its own, which is reported; nothing more can be said."""


class Settings:
    """Checked values by dotted key.

    Attributes:
        values: The usable part of the JSON.
        problems: Why the rest is not.
    """

    def __init__(self, document: Document) -> None:
        self._document = document
        self.values, problems = validate(document)
        self.problems = [*document.problems, *problems]

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, or `default` where it is absent.

        Raises:
            Undecided: the value, or the block it is in, was refused.
        """
        if not self._document.values and self._document.problems:
            raise Undecided(key)
        checked: Any = self.values
        written: Any = self._document.values
        for name in key.split("."):
            if name not in written:
                return default
            if name not in checked:
                raise Undecided(key)
            checked, written = checked[name], written[name]
        return checked

    @property
    def written(self) -> dict[str, Any]:
        """The JSON as read, before anything was checked or resolved."""
        return self._document.values

    def given(self, key: str) -> bool:
        """Whether the JSON has the key with a usable value of its own, "auto" not counted."""
        try:
            return self.get(key) not in (None, AUTO)
        except Undecided:
            return False

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
        shown = self.get(key, value) if value is None else value
        return Problem(self.where(key), shown, rule, remedy, "warning" if warn else "error")
