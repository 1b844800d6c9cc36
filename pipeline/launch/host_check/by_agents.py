"""The check of the hosts without ssh (``--no_ssh_check``): the owners of their ranks ask and compare, when
the launcher has started them, and before they start a rank.

What needs the login itself (its shell, the way back) is not looked at, and devices ranks look at themselves.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Sequence
from dataclasses import replace

from pipeline.base.command import say
from pipeline.cluster.agent.host_inquiry import Inquiry, Verdict
from pipeline.cluster.forwarded_environment import on_interface
from pipeline.cluster.launcher_options import LauncherOptions
from pipeline.job.report import problems_text
from pipeline.job.resolve import Draft
from pipeline.job.world import Host
from pipeline.launch.host_check.ask import (
    Answers,
    HostReport,
    ask_hosts,
    remote_shell,
    request_line,
    second_line,
)
from pipeline.launch.host_check.host_check import (
    NoAddress,
    exported_to,
    host_check_of,
    host_problems,
    launch_address,
    question_of,
)
from pipeline.launch.host_check.inventory import SOFTWARE
from pipeline.launch.host_check.session import Failure
from pipeline.launch.host_check.system import SYSTEM

_OF_SYSTEM = ("free disk", "output folder", "own name", "rendezvous", "links", "machine")
CHECKS = (*SOFTWARE, *(check for check in SYSTEM if check.name in _OF_SYSTEM))
_SILENT = Failure(
    "no answer",
    "its rank's owner is there, and the look at the host does not come to an end",
    "See on {host} whether a file system hangs (df), or leave it out with --exclude {host}",
)


def inquiry_of(draft: Draft, launcher: LauncherOptions, output_bytes: int) -> Inquiry:
    """What the agents of this job's hosts are asked, and what follows from it.

    Args:
        draft: The job, its world included.
        output_bytes: What it writes at a time into its output folder.
    """
    hosts, exported, run = draft.world.hosts, exported_to(draft.world), secrets.token_hex(4)
    question = question_of(draft, launcher, exported)
    with contextlib.suppress(NoAddress):  # which the start will say
        question = replace(question, launch=launch_address(draft.world, launcher))
    here = ask_hosts((), replace(question, listen=None, launch=""), remote_shell()).here
    first = [replace(question, listen=question.listen if index == 0 else None) for index in range(len(hosts))]

    def again(answers: Sequence[str | None], address: str) -> str:
        return second_line([_report(*each) for each in zip(hosts, answers, strict=True)], address)

    def conclude(answers: Sequence[str | None], others: Sequence[str | None], address: str) -> Verdict:
        reports = tuple(_report(*each) for each in zip(hosts, answers, others, strict=True))
        found = host_check_of(draft, question, Answers(here, reports, address), exported)
        problems = host_problems(replace(found.survey, output_bytes=output_bytes), CHECKS)
        text = problems_text([each.problem for each in problems])
        if any(each.problem.severity == "error" for each in problems):
            return Verdict(text)
        if text:
            say(text)
        return Verdict(environment=tuple(on_interface(found.world.interface, exported).items()))

    questions = (request_line(each, run, index) for index, each in enumerate(first))
    return Inquiry(tuple(questions), again, conclude)


def _report(host: Host, answer: str | None, other: str | None = None) -> HostReport:
    if answer is None:
        return HostReport(host, {}, _SILENT)
    return HostReport(host, json.loads(answer), **json.loads(other or "{}"))
