"""Asks all hosts of a job at once what they are like.

here ──ssh──> probe on each host
     ───────> the question            1. facts, and a token in each folder       ─┐
     <─────── one line of JSON                                                     │ all have answered,
     ───────> "go on"                 2. whose tokens are there? is rank 0's       │ or time is up
     <─────── one line of JSON           port reached?                            ─┘

The question goes through standard input, because it names all files of the data: an argument of a program may
have 128 KiB.
"""

from __future__ import annotations

import base64
import json
import secrets
import shlex
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.job.world import Host
from pipeline.launch.host_check.probe import MARK, REQUEST
from pipeline.launch.host_check.session import (
    Failure,
    Said,
    Session,
    close_all,
    failure_of,
    local_command,
    no_client,
    remote_command,
    room_for,
    srun_command,
)

# Logins take seconds where a directory service is slow, and nvidia-smi may take most of a minute.
ANSWER_SECONDS = 75
_SECOND_ANSWER_SECONDS = 15
# A shell's start-up file that reads a line would take the probe's. Under the launcher it reads nothing.
_ANSWERS_TO_PROMPTS = "\n\n\n"
_PROBE = Path(__file__).with_name("probe.py")


@dataclass(frozen=True)
class Question:
    """What every host is asked.

    Attributes:
        project: The project's folder.
        cwd: The folder in which ranks start.
        files: Files that describe the job.
        data: Local paths that are trained on.
        folders: Where the job writes; the first one is the output folder.
        environment: Variables that the launcher sets for the ranks.
        address: Of the rendezvous, as the user gave it; "" for the one by which the first host is reached.
        listen: Port of the rendezvous, tried on the first host. 0: it finds a free one. None: not tried.
        launch: Address of this machine, to which ranks report; "" if they do not.
        commands: Programs that the launcher starts on each host.
    """

    project: str
    cwd: str
    files: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    address: str = ""
    listen: int | None = None
    launch: str = ""
    commands: tuple[str, ...] = ()


@dataclass(frozen=True)
class HostReport:
    """What one host answered.

    Attributes:
        host: Whom it is about; its `slots` and `devices` are what the job wants.
        facts: By name, as `pipeline.launch.host_check.probe.FACTS` gives them; empty without an answer.
        failure: Why there is no answer; None with one.
        noise: What its shell printed unasked.
        clock: Seconds by which its clock is ahead of this machine's, at least; 0 if they may agree.
        seen: Of each folder, the places in the host list of those whose tokens are there; the place after
            the last is this machine's.
        reached: Why it does not reach the rendezvous; None if it does, or was not asked to.
        reports: The same for this machine.
    """

    host: Host
    facts: dict[str, Any]
    failure: Failure | None = None
    noise: str = ""
    clock: float = 0.0
    seen: dict[str, list[int]] = field(default_factory=dict)
    reached: str | None = None
    reports: str | None = None


@dataclass(frozen=True)
class Answers:
    """What was found out.

    Attributes:
        here: The machine that asks, and starts the job.
        hosts: One report for each host, in their order.
        address: At which the others tried to reach the first one.
    """

    here: HostReport
    hosts: tuple[HostReport, ...]
    address: str = ""


Way = Callable[[Host, str], list[str]]


def way_to_hosts(launcher: str | None = None, ssh_port: int | None = None) -> Way:
    """The command that runs a script on another host: as the launcher goes there."""
    if launcher == "slurm":
        return lambda host, script: srun_command(host.name, script)
    return lambda host, script: remote_command(host.name, script, ssh_port)


def ask_hosts(
    hosts: Sequence[Host], question: Question, way: Way, seconds: float = ANSWER_SECONDS
) -> Answers:
    """Ask all `hosts`, and this machine, in parallel; the answers after at most about `seconds`."""
    here = len(hosts)
    # The own answer comes first: where this machine is short of anything, hosts are named.
    asked = [(here, Host("here", 1)), *enumerate(hosts)]
    run, script = secrets.token_hex(4), _script(seconds)
    talks: list[_Talk] = []
    room_for(len(asked))
    try:
        for index, host in asked:
            listens = question.listen if index == 0 else None
            if index == here and question.launch:
                listens = 0
            request = {**asdict(replace(question, listen=listens)), "run": run, "index": index}
            command = local_command(script) if index == here else way(host, script)
            talks.append(_Talk(host, command, request))
        talks.append(talks.pop(0))
        deadline = time.monotonic() + seconds
        for talk in talks:
            talk.first_answer(deadline)
        address = _rendezvous(question, talks)
        _go_on(talks, address, question.launch)
    finally:
        running = [talk for talk in talks if talk.session is not None]
        said = close_all([talk.session for talk in running])
        for talk, words in zip(running, said, strict=True):
            talk.conclude(words)
    return Answers(talks[-1].report, tuple(talk.report for talk in talks[:-1]), address)


def _rendezvous(question: Question, talks: Sequence[_Talk]) -> str:
    """Where the first host is: as the user says, as ssh reached it, or by its name in the hostfile."""
    first = talks[0].report
    reached = first.facts.get("machine", {}).get("address")
    return question.address or reached or first.host.name.rpartition("@")[2]


def _go_on(talks: Sequence[_Talk], address: str, launch: str) -> None:
    """All have left their tokens, and the first one listens, if they do at all: let them look around."""
    ports = [talk.report.facts.get("port") for talk in (talks[0], talks[-1])]
    places = [(where, port) for where, port in zip((address, launch), ports, strict=True)]
    reached, reports = (place if isinstance(place[1], int) and place[0] else None for place in places)
    line = json.dumps({"reached": reached, "reports": reports})
    for talk in talks:
        talk.go_on(line)
    deadline = time.monotonic() + _SECOND_ANSWER_SECONDS
    for talk in talks:
        talk.second_answer(deadline)


class _Talk:
    """The exchange with one host; its report grows as it goes on."""

    def __init__(self, host: Host, command: Sequence[str], request: dict[str, Any]) -> None:
        self.report = HostReport(host, {})
        self._began = time.time()
        try:
            self.session: Session | None = Session(command, MARK)
            self.session.say(f"{_ANSWERS_TO_PROMPTS}{REQUEST}{json.dumps(request)}")
        except OSError as error:
            self.session = None
            self.report = replace(self.report, failure=no_client(command[0], error))

    def first_answer(self, deadline: float) -> None:
        if self.session is not None and (answer := self.session.answer(deadline)) is not None:
            text, came = answer
            facts = json.loads(text)
            began = facts["began"]
            ahead = min(0.0, began - self._began) or max(0.0, began - came)
            self.report = replace(self.report, facts=facts, clock=ahead)

    def go_on(self, line: str) -> None:
        if self.session is not None and self.report.facts:
            self.session.say(line)

    def second_answer(self, deadline: float) -> None:
        if self.session is not None and self.report.facts and (answer := self.session.answer(deadline)):
            self.report = replace(self.report, **json.loads(answer[0]))

    def conclude(self, said: Said) -> None:
        """The connection is closed: a host that gave no answer gets its reason."""
        failure = None if self.report.facts else failure_of(said)
        self.report = replace(self.report, failure=failure, noise=said.noise.strip())


def _script(seconds: float) -> str:
    """One line of sh that runs the probe: with this project's Python, or with any if that is not there."""
    packed = base64.b64encode(zlib.compress(_PROBE.read_bytes(), 9)).decode()
    code = f"import base64,zlib;exec(zlib.decompress(base64.b64decode('{packed}')))"
    words = f"-I -c {shlex.quote(code)} {int(3 * seconds)}"
    pythons = f"{shlex.quote(sys.executable)} python3"
    start = f'for p in {pythons}; do command -v "$p" >/dev/null 2>&1 && exec "$p" {words}; done'
    return f"{start}; echo there is no Python >&2; exit 127"
