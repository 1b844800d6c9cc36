"""Asks all hosts of a job at once what they are like.

here ──ssh──> probe on each host
     ───────> the question            1. facts, and a token in each folder       ─┐
     <─────── one line of JSON                                                     │ all have answered,
     ───────> "continue"              2. whose tokens are there? is rank 0's       │ or time is up
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

from pipeline.cluster import host_probe
from pipeline.cluster.host_probe import MARK, REQUEST
from pipeline.job.world import Host
from pipeline.launch.host_check.session import (
    Failure,
    Output,
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
        launch: Address of this machine, to which ranks report and by which they are seen; "" if they do not.
        commands: Programs that the launcher starts on each host.
        python: This machine's interpreter, which ranks use everywhere.
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
    python: str = sys.executable


@dataclass(frozen=True)
class HostReport:
    """What one host answered.

    Attributes:
        host: The host; its `slots` and `devices` are what the job wants.
        facts: By name, as `pipeline.cluster.host_probe.FACTS` gives them; empty without an answer.
        failure: Why there is no answer; None with one.
        noise: What its shell printed at login.
        clock: Seconds by which its clock is ahead of this machine's, at least; 0 if they may agree.
        seen: Of each folder, the places in the host list of those whose tokens are there; the place after
            the last is this machine's.
        reached: Why it does not reach the rendezvous; None if it does, or was not asked to.
        reports: The same for this machine.
        unreached: Why it does not reach others at their own name ("own") or on the network by which they
            were asked ("net"), by their places.
    """

    host: Host
    facts: dict[str, Any]
    failure: Failure | None = None
    noise: str = ""
    clock: float = 0.0
    seen: dict[str, list[int]] = field(default_factory=dict)
    reached: str | None = None
    reports: str | None = None
    unreached: dict[str, dict[str, str]] = field(default_factory=lambda: {"own": {}, "net": {}})


@dataclass(frozen=True)
class Answers:
    """The result of a survey of hosts.

    Attributes:
        here: The machine that asks, and starts the job.
        hosts: One report for each host, in their order.
        address: At which the others tried to reach the first one.
    """

    here: HostReport
    hosts: tuple[HostReport, ...]
    address: str = ""


RemoteShell = Callable[[Host, str], list[str]]


def remote_shell(launcher: str | None = None, ssh_port: int | None = None) -> RemoteShell:
    """The command that runs a script on another host: over the same connection as the launcher."""
    if launcher == "slurm":
        return lambda host, script: srun_command(host.name, script)
    return lambda host, script: remote_command(host.name, script, ssh_port)


def ask_hosts(
    hosts: Sequence[Host], question: Question, shell: RemoteShell, seconds: float = ANSWER_SECONDS
) -> Answers:
    """Ask all `hosts`, and this machine, in parallel; the answers after at most about `seconds`."""
    here = len(hosts)
    # The own answer comes first: where this machine is short of anything, hosts are named.
    asked = [(here, Host("here", 1)), *enumerate(hosts)]
    run, script = secrets.token_hex(4), _script(seconds)
    exchanges: list[_Exchange] = []
    room_for(len(asked))
    try:
        for index, host in asked:
            listens = question.listen if index == 0 else 0 if index == here and question.launch else None
            line = request_line(replace(question, listen=listens), run, index)
            command = local_command(script) if index == here else shell(host, script)
            exchanges.append(_Exchange(host, command, line))
        exchanges.append(exchanges.pop(0))
        deadline = time.monotonic() + seconds
        for exchange in exchanges:
            exchange.first_answer(deadline)
        address = _rendezvous(question, exchanges)
        _second_round(exchanges, address, question.launch)
    finally:
        running = [exchange for exchange in exchanges if exchange.session is not None]
        said = close_all([exchange.session for exchange in running])
        for exchange, words in zip(running, said, strict=True):
            exchange.conclude(words)
    return Answers(exchanges[-1].report, tuple(exchange.report for exchange in exchanges[:-1]), address)


def request_line(question: Question, run: str, index: int) -> str:
    """The line that asks host number `index`. `run`: names the tokens of all of them."""
    return f"{REQUEST}{json.dumps({**asdict(question), 'run': run, 'index': index})}"


def _rendezvous(question: Question, exchanges: Sequence[_Exchange]) -> str:
    """Where the first host is: as the user says, as ssh reached it, or by its name in the hostfile."""
    first = exchanges[0].report
    reached = first.facts.get("machine", {}).get("address")
    return question.address or reached or first.host.name.rpartition("@")[2]


def _second_round(exchanges: Sequence[_Exchange], address: str, launch: str) -> None:
    """All have left their tokens, and the first one listens if it can: start the second round."""
    *hosts, here = (exchange.report for exchange in exchanges)
    line = second_line(hosts, address, (launch, here.facts.get("port")))
    for exchange in exchanges:
        exchange.proceed(line)
    deadline = time.monotonic() + _SECOND_ANSWER_SECONDS
    for exchange in exchanges:
        exchange.second_answer(deadline)


def second_line(hosts: Sequence[HostReport], address: str, launch: tuple[str, object] = ("", None)) -> str:
    """What hosts try in the second round: to reach the first one at `address`, and this machine where it
    listens."""
    port = hosts[0].facts.get("port") if hosts else None
    reached, reports = (
        place if isinstance(place[1], int) and place[0] else None for place in ((address, port), launch)
    )
    doors = [host.facts.get("doors", {"own": None, "net": None}) for host in hosts]
    return json.dumps({"reached": reached, "reports": reports, "doors": doors})


class _Exchange:
    """The exchange with one host; its report is completed step by step."""

    def __init__(self, host: Host, command: Sequence[str], request: str) -> None:
        self.report = HostReport(host, {})
        self._began = time.time()
        try:
            self.session: Session | None = Session(command, MARK)
            self.session.send(f"{_ANSWERS_TO_PROMPTS}{request}")
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

    def proceed(self, line: str) -> None:
        if self.session is not None and self.report.facts:
            self.session.send(line)

    def second_answer(self, deadline: float) -> None:
        if self.session is not None and self.report.facts and (answer := self.session.answer(deadline)):
            self.report = replace(self.report, **json.loads(answer[0]))

    def conclude(self, output: Output) -> None:
        """The connection is closed: a host that gave no answer gets its reason."""
        failure = None if self.report.facts else failure_of(output)
        self.report = replace(self.report, failure=failure, noise=output.noise.strip())


def _script(seconds: float) -> str:
    """One line of sh that runs the probe: with this project's Python, or with any if that is not there."""
    packed = base64.b64encode(zlib.compress(Path(host_probe.__file__).read_bytes(), 9)).decode()
    code = f"import base64,zlib;exec(zlib.decompress(base64.b64decode('{packed}')))"
    words = f"-I -c {shlex.quote(code)} {int(3 * seconds)}"
    pythons = f"{shlex.quote(sys.executable)} python3"
    start = f'for p in {pythons}; do command -v "$p" >/dev/null 2>&1 && exec "$p" {words}; done'
    return f"{start}; echo there is no Python >&2; exit 127"
