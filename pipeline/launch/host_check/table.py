"""What the hosts answered, as one table for a person. rich; no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from pipeline.launch.host_check.host_check import CHECKS, HostCheck
from pipeline.launch.host_check.judge import Check, Survey, few


def hosts_table(found: HostCheck) -> Table:
    """One line for each check: its value on all hosts, or which hosts have which; the wrong ones coloured."""
    table = Table(box=None, title="Hosts", title_justify="left", title_style="bold", pad_edge=False)
    for heading in ("  check", "found", ""):
        table.add_column(heading, no_wrap=heading != "found", overflow="fold")
    marks = _marks(found)
    reports = found.survey.answers.hosts
    silent = [report.host.name for report in reports if report.failure is not None]
    table.add_row(
        "  reachable", f"{len(reports) - len(silent)} of {len(reports)}", marks.get("reachable", "ok")
    )
    for name, values in check_values(found.survey):
        table.add_row(f"  {name}", _told(values, len(found.survey.hosts)), marks.get(name, "ok"))
    return table


def hosts_line(found: HostCheck) -> str:
    """That there is nothing to say, in one line."""
    count = len(found.survey.hosts)
    return f"Checked {count} {'host' if count == 1 else 'hosts'}: nothing stands in the way."


def _marks(found: HostCheck) -> dict[str, Text]:
    """The verdict on each check that found something."""
    marks: dict[str, Text] = {}
    for each in sorted(found.problems, key=lambda each: each.problem.severity, reverse=True):
        style = "bold red" if each.problem.severity == "error" else "bold yellow"
        marks[each.check] = Text(each.problem.severity, style)
    return marks


def check_values(
    survey: Survey, checks: Sequence[Check] = CHECKS
) -> Iterator[tuple[str, dict[str, list[str]]]]:
    """(name, hosts by value) of each check; checks without any value are left out."""
    for check in checks:
        values: dict[str, list[str]] = defaultdict(list)
        for report in survey.hosts:
            if value := check.value(report):
                values[value].append(report.host.name)
        if values:
            yield check.name, dict(values)


def _told(values: dict[str, list[str]], count: int) -> str:
    if len(values) == 1 and len(next(iter(values.values()))) == count:
        return next(iter(values))
    return "\n".join(f"{value}: {few(hosts)}" for value, hosts in values.items())
