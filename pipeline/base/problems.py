"""What is wrong with a job description, said once and completely.

Everything that reads a user's input (options, JSON, hostfile, model file) returns or collects
`Problem` objects instead of raising at the first one, so that a user sees all of them together.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from pipeline.base.words import cut

Severity = Literal["error", "warning", "note"]

# Characters of a rule or remedy, which may have lists in them.
_LONGEST = 2000
# ... and of a value that is an object or a list.
_LONGEST_OF_PARTS = 100
EXIT_FINISHED = 0
EXIT_FAILED = 1
EXIT_WRONG_JOB = 2
EXIT_STOPPED = 3


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, or worth a warning.

    Attributes:
        key: The option, JSON key (dotted) or file and line that carries the value.
        value: What was given, as the user wrote it.
        rule: What must hold, with the numbers worked out.
        remedy: What to change, concretely; a note has none.
        severity: An ``error`` refuses the job; with a ``warning`` it starts; a ``note`` says that a setting
            changes nothing here.
    """

    key: str
    value: object
    rule: str
    remedy: str
    severity: Severity = "error"

    def __str__(self) -> str:
        return f"{self.severity}: {self.said}" + (f" {self.advice}" if self.remedy else "")

    @property
    def said(self) -> str:
        """What is wrong, as a sentence; of a long value the ends."""
        parts = isinstance(self.value, (dict, list))  # which the key leads to, with its line
        value = cut(repr(self.value), _LONGEST_OF_PARTS) if parts else cut(repr(self.value))
        return f"{cut(self.key)} = {value}: {cut(self.rule, _LONGEST)}."

    @property
    def advice(self) -> str:
        return f"{cut(self.remedy, _LONGEST)}."


class JobError(ValueError):
    """The job description is wrong; nothing was started. Carries every problem found."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def job_error(key: str, value: object, rule: str, remedy: str) -> JobError:
    """The error of a single problem."""
    return JobError([Problem(key, value, rule, remedy)])
