"""The test of the links between processes of this machine: unequal hosts, ranks that hang or die."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time

import psutil
import pytest

from pipeline.cluster.rank_environment import free_port
from pipeline.job.world import LOOPBACK, Host, World
from pipeline.launch.host_check.session import local_command
from pipeline.launch.network_test import network_test
from pipeline.launch.network_test.network_test import NetworkTest, run_network_test
from pipeline.launch.network_test.report import network_problems
from tests.processes import is_running

pytestmark = pytest.mark.slow


def run(*slots: int, seconds: int = 60, address: str = LOOPBACK) -> NetworkTest:
    """Each host is a process of this machine."""
    world = World(tuple(Host(f"h{number}", count) for number, count in enumerate(slots, start=1)), "cpu")
    addresses = [address] * len(slots)
    return run_network_test(
        world, lambda _, script: local_command(script), addresses, free_port(), {}, seconds
    )


def hosts_of_this_test() -> list[psutil.Process]:
    """The host processes that this process started, and their ranks."""
    below = psutil.Process().children(recursive=True)
    return [each for each in below if "pipeline.launch.network_test.host" in each.cmdline()]


def test_hosts_with_unequal_slots() -> None:
    """Over IPv6, where this machine has it: names may lead to such addresses alone."""
    found = run(1, 2, address="::1" if socket.has_dualstack_ipv6() else LOOPBACK)
    assert [problem for problem in network_problems(found) if problem.severity == "error"] == []
    assert sorted(event["rank"] for event in found.events if event["at"] == "done") == [0, 1, 2]
    links = {(event["from"], event["to"]) for event in found.events if event["at"] == "send"}
    assert links == {(0, 1), (1, 0), (1, 2), (2, 1)}
    assert hosts_of_this_test() == []


@pytest.mark.parametrize(
    ("number", "rule"),
    [
        (signal.SIGSTOP, "a link of theirs swallows what is sent"),
        (signal.SIGKILL, "it is killed by signal 9"),
    ],
)
def test_a_rank_that_stops_or_dies_is_named_and_all_end(
    number: signal.Signals, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_test, "_LONGER_SECONDS", 1)
    stopped: list[int] = []

    def disturb() -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and not stopped:
            ranks = [each for host in hosts_of_this_test() for each in host.children()]
            if len(ranks) >= 2:
                stopped.append(ranks[1].pid)
                os.kill(ranks[1].pid, number)
            time.sleep(0.005)

    thread = threading.Thread(target=disturb)
    thread.start()
    found = run(2, seconds=6)
    thread.join()
    assert stopped and not is_running(stopped[0])
    problems = [problem for problem in network_problems(found) if problem.severity == "error"]
    assert len(problems) == 1 and "rank 1 (h1)" in problems[0].key, problems
    assert rule in problems[0].rule
    assert hosts_of_this_test() == []
