"""What hosts are like, as the owners of their ranks find it before a rank starts: without ssh.

    coordinator ── ask ────► first agent of each host ──► cluster.host_probe
                ◄─ answer ──                           ◄── a line
                                                              twice, as over ssh

The second question is put when all have answered the first: hosts then look for what the others have left.
What is asked, and what the answers mean, is the launch's business. Without a launch ranks run already when
agents meet; these say what they know of their host by themselves (`own_facts`), and `differences` compares.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.base.problems import Problem
from pipeline.cluster import host_probe
from pipeline.cluster.rank_environment import RankEnvironment, is_loopback

# As long as over ssh: a slow file system is as slow here.
ANSWER_SECONDS = 75.0
AGAIN_SECONDS = 15.0
# Set by the deepspeed launcher, which takes every line of a hostfile for a machine.
BY_HOSTFILE = "CROSS_RANK"
_PROJECT = Path(__file__).parents[3]
_PIECE = 2**16


@dataclass(frozen=True)
class Verdict:
    """What follows from the answers.

    Attributes:
        problems: Text of what is wrong; empty where ranks can start.
        environment: Variables that every rank is given besides.
    """

    problems: str = ""
    environment: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Inquiry:
    """What a launch asks its hosts.

    Attributes:
        questions: One line for each host, in their order.
        again: The second line, for all of them, from the answers to the first and rank 0's address. An
            answer that has not come is None.
        conclude: The verdict on both answers of each host, and that address.
    """

    questions: tuple[str, ...]
    again: Callable[[Sequence[str | None], str], str]
    conclude: Callable[[Sequence[str | None], Sequence[str | None], str], Verdict]


@dataclass
class Asked:
    """An inquiry on its way.

    Args:
        address: Of rank 0.
    """

    inquiry: Inquiry
    address: str
    _rounds: list[dict[int, str | None]] = field(default_factory=lambda: [{}])
    _since: float = field(default_factory=time.monotonic)

    def take(self, host: int, line: str) -> None:
        """One answer; an empty one says that there will be none."""
        self._rounds[-1].setdefault(host, line or None)

    def next(self, now: float) -> str | Verdict | None:
        """The second question, or the verdict, when all have answered or have had their time."""
        first, *second = self._rounds
        hosts = range(len(self.inquiry.questions))
        seconds = AGAIN_SECONDS if second else ANSWER_SECONDS
        if len(self._rounds[-1]) < len(hosts) and now - self._since < seconds:
            return None
        answers = [first.get(host) for host in hosts]
        if not second:
            self._since = now
            self._rounds.append({host: None for host in hosts if answers[host] is None})
            return self.inquiry.again(answers, self.address)
        return self.inquiry.conclude(answers, [second[0].get(host) for host in hosts], self.address)


class ProbeProcess:
    """The probe as a process beside its agent, which a file system that hangs must not hold up."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._received = b""
        seconds = int(2 * (ANSWER_SECONDS + AGAIN_SECONDS))
        command = [sys.executable, "-I", host_probe.__file__, str(seconds)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        os.set_blocking(self._out.fileno(), False)
        selector.register(self._out, selectors.EVENT_READ)

    def ask(self, line: str) -> None:
        """Put a question. It has read the last one, so that it waits for this."""
        with contextlib.suppress(OSError):  # it has ended, which its answers tell
            self._in.write(line.encode() + b"\n")
            self._in.flush()

    def answers(self) -> list[str]:
        """What it has said since the last call; an empty line when it has ended."""
        if self._out.closed:
            return []
        try:
            piece = os.read(self._out.fileno(), _PIECE)
        except BlockingIOError:
            return []
        if not piece:
            self.end()
            return [""]
        *lines, self._received = (self._received + piece).split(b"\n")
        marked = (line.decode().partition(host_probe.MARK) for line in lines)
        return [answer for _, mark, answer in marked if mark]

    def end(self) -> None:
        """End it. May be called twice."""
        if not self._out.closed:
            self._selector.unregister(self._out)
            self._out.close()
        with contextlib.suppress(OSError):
            self._in.close()  # upon which it takes its tokens away
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()


def own_facts(environ: Mapping[str, str]) -> dict[str, Any]:
    """What an agent knows of its host without being asked: what ranks of one job must have alike. Only those
    that the deepspeed launcher has placed are sure to have a machine for themselves."""
    request = {"project": str(_PROJECT), "cwd": "."}
    machine = host_probe.machine(request)
    versions = {"Python": host_probe.python(request)["version"], **host_probe.packages(request)}
    alone = [machine["host"], machine["boot"]] if BY_HOSTFILE in environ else []
    return {"code": host_probe.project(request)["digest"], "machine": alone, "versions": versions}


def interface_for(place: RankEnvironment, environ: Mapping[str, str]) -> dict[str, str]:
    """What tells gloo the network interface to use, where its own choice is certainly wrong: the host's name
    leads to this machine alone, and ranks are on others. Nothing where all is well, or the way to rank 0 does
    not tell better. A launch has seen to it already."""
    own = host_probe.own_addresses()
    has_others = place.local_size < place.world_size
    if not has_others or "GLOO_SOCKET_IFNAME" in environ or not all(map(is_loopback, own)):
        return {}
    address = host_probe.address_to(place.master_addr)
    name = None if address is None or is_loopback(address) else host_probe.interface_of(address)
    return {} if name is None else {"GLOO_SOCKET_IFNAME": name}


def differences(facts: Mapping[str, Mapping[str, Any]]) -> list[Problem]:
    """What keeps hosts from doing one job together; `facts`: `own_facts` of each, by a name of it, the first
    host's first."""
    (first, here), *others = facts.items()
    problems = []
    for name, there in others:
        if there.get("code") != here.get("code"):
            rule = f"must be {here.get('code')}, as on {first}"
            remedy = "Bring the project's folder up to date there"
            problems.append(Problem(f"{name}: code", there.get("code"), rule, remedy))
        wanted, found = here.get("versions") or {}, there.get("versions") or {}
        for package, version in wanted.items():
            if found.get(package) != version:
                rule = f"must be {version or 'absent'}, as on {first}"
                remedy = "Install the versions of constraints.txt on every host (./launch.sh --setup_only)"
                problems.append(Problem(f"{name}: {package}", found.get(package), rule, remedy))
    machines: dict[tuple[str, ...], str] = {}
    for name, there in facts.items():
        machine = tuple(there.get("machine") or ())
        if machine and (before := machines.setdefault(machine, name)) != name:
            rule = f"is the same machine as {before}: its devices would be used twice"
            remedy = "Keep one line for it in the hostfile, with the sum of the slots"
            problems.append(Problem(f"{name}: machine", machine[0], rule, remedy))
    return problems


def elsewhere(name: str, folder: str, first: str) -> Problem:
    """A host whose ranks would write somewhere else than rank 0."""
    rule = f"ranks there would write to this folder, and rank 0 to {first}"
    remedy = "Start in the same folder on every host, or give --output_dir in full"
    return Problem(f"{name}: output_dir", folder, rule, remedy)
