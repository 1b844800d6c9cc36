"""The test of the links between real hosts: measured, cut, and nothing left behind."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.hosts import Hosts

pytestmark = [pytest.mark.multihost, pytest.mark.slow]
PROJECT = Path(__file__).resolve().parents[3]


def command(hosts: Hosts, slots: int) -> list[str | Path]:
    where = ["--hostfile", hosts.write_hostfile(slots), "--output_dir", hosts.folder / "run"]
    return [sys.executable, "-m", "pipeline.check", "--fabric", *where]


def test_every_link_is_measured(hosts: Hosts) -> None:
    done = hosts.run("h0", command(hosts, 2), timeout=90, cwd=PROJECT)
    assert done.returncode == 0, done.stdout + done.stderr
    text = " ".join(done.stdout.split())
    for part in (
        "all-reduce, all ranks",
        "all-to-all, inside hosts",
        "all-reduce, between hosts",
        "This job can start.",
    ):
        assert part in text, text
    rows = {
        line.split()[0]: line.split()[1:]
        for line in done.stdout.splitlines()
        if line.startswith((" h1 ", " h2 "))
    }
    assert all(float(cell) > 0 for host in ("h1", "h2") for cell in rows[host])
    assert hosts.processes("h1") == hosts.processes("h2") == []
    assert list(hosts.folder.iterdir()) == []


def test_a_cut_link_is_named_and_the_others_are_not(make_hosts) -> None:
    hosts = make_hosts(3)
    route = ["ip", "route", "add", "prohibit", hosts.address("h3")]
    assert hosts.run("h2", route, timeout=5).returncode == 0
    done = hosts.run("h0", command(hosts, 1), timeout=60, cwd=PROJECT)
    assert done.returncode == 2
    assert "error: h2 -> h3 = " in done.stdout and "error: h3 -> h2 = " in done.stdout, done.stdout
    assert "This job cannot start: 2 errors." in done.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_the_one_who_asked(hosts: Hosts, number: signal.Signals) -> None:
    check = hosts.start("h0", command(hosts, 2), cwd=PROJECT)
    # One for the host and one for each of its slots.
    hosts.wait_until(lambda: sum("network_test.host" in each for each in hosts.processes("h2")) == 3, 60)
    check.send_signal(number)
    check.wait(20)
    hosts.wait_until(lambda: hosts.processes("h1") == hosts.processes("h2") == [], 15)
