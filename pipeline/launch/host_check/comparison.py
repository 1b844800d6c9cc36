"""What the table of host checks is made of: a check, and how hosts are compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pipeline.base.words import few
from pipeline.launch.host_check.ask import Answers, HostReport

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Survey:
    """What checks look at.

    Attributes:
        answers: Of the hosts that were reached, and of this machine.
        device: What the ranks compute on.
        output_bytes: Space that the job needs in its output folder.
        cache_bytes: The same for its cache folder.
        world_size: Ranks of the job.
        launch: Address of this machine, to which ranks report.
        interface: The network interface that gloo is set to use; None for the one of the host's name.
    """

    answers: Answers
    device: Literal["cpu", "cuda"]
    output_bytes: int = 0
    cache_bytes: int = 0
    world_size: int = 1
    launch: str = ""
    interface: str | None = None

    @property
    def hosts(self) -> tuple[HostReport, ...]:
        """Those that answered."""
        return tuple(report for report in self.answers.hosts if report.failure is None)

    @property
    def here(self) -> Mapping[str, Any]:
        """The facts of the machine that starts the job."""
        return self.answers.here.facts


@dataclass(frozen=True)
class Finding:
    """What is wrong with one host. A remedy or severity of None is the check's own; {host} is the host."""

    host: str
    value: str
    rule: str
    remedy: str | None = None
    severity: Severity | None = None


# Value and rule, then remedy and severity where they are not the check's.
Fault = tuple[str | None, ...]
Test = Callable[["Check", Survey], Iterable[Finding]]


@dataclass(frozen=True)
class Check:
    """One line of the table.

    Attributes:
        name: As printed.
        fact: The fact of the probe that it is about; "" for one about the exchange itself.
        show: A host's value in the table, "" for none, from that fact (from the report if `fact` is "").
        tests: Say what is wrong.
        remedy: What to do about it.
        severity: Of what its tests find.
    """

    name: str
    fact: str
    show: Callable[[Any], str]
    tests: tuple[Test, ...]
    remedy: str
    severity: Severity = "error"

    def value(self, report: HostReport) -> str:
        """What the table shows for a host."""
        if not self.fact:
            return self.show(report)
        return "unknown" if failed(report.facts, self.fact) else self.show(report.facts[self.fact])

    def findings(self, survey: Survey) -> Iterator[Finding]:
        """Everything that is wrong. A fact that a host could not find out is a warning of its own."""
        for report in survey.hosts:
            if self.fact and (reason := failed(report.facts, self.fact)):
                remedy = "Look on {host} yourself"
                yield Finding(
                    report.host.name, "unknown", f"cannot be found out ({reason})", remedy, "warning"
                )
        for test in self.tests:
            yield from test(self, survey)


def failed(facts: Mapping[str, Any], fact: str) -> str | None:
    """Why a fact could not be found out, None if it could."""
    found = facts.get(fact, {"error": "there was no answer"})
    return found["error"] if isinstance(found, dict) and set(found) == {"error"} else None


def known(check: Check, survey: Survey) -> Iterator[HostReport]:
    """The hosts whose value of this check is known."""
    for report in survey.hosts:
        if not check.fact or not failed(report.facts, check.fact):
            yield report


def as_here(check: Check, survey: Survey) -> Iterator[Finding]:
    """Every host must have what the machine has that starts the job."""
    if failed(survey.here, check.fact):
        return
    here = check.show(survey.here[check.fact])
    for report in known(check, survey):
        if (value := check.value(report)) != here:
            yield Finding(report.host.name, value, f"must be {here or 'absent'}, as on this machine")


def alike(check: Check, survey: Survey) -> Iterator[Finding]:
    """All hosts must have the same: what this machine has, if one of them has that, else what most have."""
    return _compare(check, survey, {report.host.name: check.value(report) for report in known(check, survey)})


def alike_where_there(check: Check, survey: Survey) -> Iterator[Finding]:
    """The same, among the hosts that have the thing at all."""
    values = {report.host.name: check.value(report) for report in known(check, survey)}
    return _compare(check, survey, {name: value for name, value in values.items() if value})


def _compare(check: Check, survey: Survey, values: Mapping[str, str]) -> Iterator[Finding]:
    if len(set(values.values())) < 2:
        return
    here = check.value(survey.answers.here)
    most = here if here in values.values() else Counter(values.values()).most_common(1)[0][0]
    others = [name for name, value in values.items() if value == most]
    for name, value in values.items():
        if value != most:
            yield Finding(name, value or "none", f"must be {most or 'absent'}, as on {few(others)}")


def each(test: Callable[[HostReport, Survey], Fault | None]) -> Test:
    """Each host is tested by itself."""

    def test_each(check: Check, survey: Survey) -> Iterator[Finding]:
        for report in known(check, survey):
            if fault := test(report, survey):
                yield Finding(report.host.name, *fault)

    return test_each
