"""The network test, of the links between a job's ranks: starts a process per slot for a few seconds.

here ──ssh──> host.py on each host ──fork──> a rank per slot
     <─────── events: reached, joined, bandwidths, failures
"""

from __future__ import annotations

import json
import math
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.job.resolve import PROJECT
from pipeline.job.world import World
from pipeline.launch.host_check.ask import RemoteShell
from pipeline.launch.host_check.session import Session, close_all, failure_of, room_for
from pipeline.launch.network_test.host import MARK

LEAST_SECONDS = 120
# Three times at most (hosts + 1) x slots rounds; the first make a connection for each pair.
_SECONDS_PER_SLOT = 0.5
# Room above the ranks' own limit, so that their words about it arrive.
_LONGER_SECONDS = 10
_CONNECT_SECONDS = 45
_GRACE_SECONDS = 2.0
_POLL_SECONDS = 0.05


@dataclass
class NetworkTest:
    """What the hosts and ranks said.

    Attributes:
        silent: (host's number, why) of those that said nothing.
        unreached: (from, to, why): host numbers between which no connection is made.
        started: Whether the ranks were started, because every host reached every other.
        events: Of the ranks, in the order of arrival.
        loads: Of each host before the start: processes that want to run, per core.
    """

    world: World
    silent: list[tuple[int, str]] = field(default_factory=list)
    unreached: list[tuple[int, int, str]] = field(default_factory=list)
    started: bool = False
    events: list[dict[str, Any]] = field(default_factory=list)
    loads: dict[int, float] = field(default_factory=dict)


def run_network_test(
    world: World,
    shell: RemoteShell,
    addresses: Sequence[str],
    port: int,
    environment: Mapping[str, str],
    seconds: int | None = None,
) -> NetworkTest:
    """Try every link of `world`; ends after at most about `seconds`, and leaves no process behind.

    Args:
        shell: How hosts are reached.
        addresses: Of each host, as the others reach it.
        port: Of the ranks' rendezvous on the first host.
        environment: Variables for the ranks.
        seconds: None: `time_limit`.
    """
    found = NetworkTest(world)
    seconds = time_limit(world) if seconds is None else seconds
    deadline = time.monotonic() + seconds + _LONGER_SECONDS
    program = f"{shlex.quote(sys.executable)} -m pipeline.launch.network_test.host"
    script = f"cd {shlex.quote(str(PROJECT))} && exec {program}"
    sessions: list[Session] = []
    room_for(len(world.hosts))
    try:
        for host in world.hosts:
            sessions.append(Session(shell(host, script), MARK))
        for number, session in enumerate(sessions):
            session.send(json.dumps(_request(world, number, addresses[0], port, environment, seconds)))
        if _connect(found, sessions, addresses) and not found.unreached:
            _measure(found, sessions, deadline)
    finally:
        said = close_all(sessions)
    found.silent = [(number, failure_of(said[number]).rule) for number, _ in found.silent]
    return found


def time_limit(world: World) -> int:
    """Seconds that the test of so many links may take; it takes much less where all of them are well."""
    slots = max(host.slots for host in world.hosts)
    return LEAST_SECONDS + math.ceil(_SECONDS_PER_SLOT * slots * (len(world.hosts) + 1))


def _request(
    world: World, number: int, address: str, port: int, environment: Mapping[str, str], seconds: int
) -> dict[str, Any]:
    host = world.hosts[number]
    return {
        "host": number,
        "slots": [each.slots for each in world.hosts],
        "first_rank": sum(each.slots for each in world.hosts[:number]),
        "devices": list(host.devices) if world.device == "cuda" else None,
        "address": address,
        "port": port,
        "environment": dict(environment),
        "seconds": seconds,
    }


def _connect(found: NetworkTest, sessions: Sequence[Session], addresses: Sequence[str]) -> bool:
    """Let every host connect to every other; whether all of them answered."""
    ports = _answers(found, sessions)
    if len(ports) < len(sessions):
        return False
    found.loads = {answer["host"]: answer["load"] for answer in ports}
    hosts = [(address, answer["port"]) for address, answer in zip(addresses, ports, strict=True)]
    for session in sessions:
        session.send(json.dumps({"hosts": hosts}))
    answers = _answers(found, sessions)
    for answer in answers:
        reasons = {int(number): reason for number, reason in answer["unreached"].items()}
        found.unreached += [(answer["host"], number, reason) for number, reason in reasons.items()]
    return len(answers) == len(sessions)


def _answers(found: NetworkTest, sessions: Sequence[Session]) -> list[dict[str, Any]]:
    """The next answer of each host; those without one are noted."""
    deadline = time.monotonic() + _CONNECT_SECONDS
    answers = []
    for number, session in enumerate(sessions):
        if (answer := session.answer(deadline)) is None:
            found.silent.append((number, ""))
        else:
            answers.append(json.loads(answer[0]))
    return answers


def _measure(found: NetworkTest, sessions: Sequence[Session], deadline: float) -> None:
    """Start the ranks and take down what they say, until all have ended or one has failed."""
    found.started = True
    for session in sessions:
        session.send("{}")
    while any(not session.ended for session in sessions) and time.monotonic() < deadline:
        for session in sessions:
            while not session.ended and (answer := session.answer(0.0)) is not None:
                found.events.append(json.loads(answer[0]))
        if any(event["at"] in ("failed", "ended") for event in found.events):
            # The others wait for it now, and would until their time is up.
            deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        time.sleep(_POLL_SECONDS)
