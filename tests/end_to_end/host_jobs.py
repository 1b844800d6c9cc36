"""Jobs on the hosts of a test: how they are started, what runs of them, and how they ended."""

from __future__ import annotations

import sys

import psutil

from tests.end_to_end.jobs import PROJECT
from tests.hosts import HostProcess, Hosts

SCRIPT = str(PROJECT / "pipeline" / "pretrain.py")
# ./launch.sh, where the tests run in the environment that it makes; else the line that it ends with.
IN_ITS_ENVIRONMENT = (PROJECT / ".venv").resolve() == (PROJECT / sys.prefix).resolve()
LAUNCH = (
    [str(PROJECT / "launch.sh")]
    if IN_ITS_ENVIRONMENT
    else [sys.executable, str(PROJECT / "pipeline" / "launch" / "launch.py")]
)


def finish(hosts: Hosts, job: HostProcess, seconds: float) -> str:
    """Wait for a job that must finish; what it printed.

    Raises:
        AssertionError: it fails or takes longer; the message has what it printed.
    """
    code = job.wait(seconds)
    assert code == 0, f"exit code {code}\n{job.stdout[-4000:]}\n{job.stderr[-4000:]}"
    return job.stdout


def ranks(hosts: Hosts) -> list[psutil.Process]:
    """The processes that train, on all hosts: those that run the script and start no other process for it."""
    running = [process for name in hosts.names for process in hosts.inside(name, SCRIPT)]
    parents = {process.ppid() for process in running}
    return [process for process in running if process.pid not in parents]


def assert_nothing_runs(hosts: Hosts) -> None:
    """Nothing but sshd is left on any host."""
    assert {name: hosts.processes(name) for name in hosts.all_names} == {name: [] for name in hosts.all_names}
