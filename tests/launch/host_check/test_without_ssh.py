"""`--no_ssh_check`: nobody goes to the hosts first, and the owners of the ranks compare them all the same."""

from __future__ import annotations

import sys

import pytest

from tests.end_to_end.host_jobs import assert_nothing_runs
from tests.end_to_end.jobs import PROJECT, Workshop

SETTINGS = PROJECT / "pipeline" / "job" / "facts.py"


@pytest.mark.slow
@pytest.mark.multihost
def test_hosts_that_do_not_fit_end_the_start_before_a_rank_with_one_list(make_hosts) -> None:
    """The current folder is on the login host alone, one host has other code and other data, and a machine
    has two names: before, ranks trained in the hosts' home folders, and shared their devices."""
    hosts = make_hosts(2)
    workshop = Workshop(hosts.folder)
    hostfile = hosts.write_hostfile(1, ["h1", "h2", "twin"])
    for name in hosts.all_names:
        with hosts.path(name, "/etc/hosts").open("a") as file:
            file.write(f"{hosts.address('h1')} twin\n")
    known = hosts.path("h0", "/run/home/.ssh/known_hosts")
    known.write_text(known.read_text().replace("h1,", "h1,twin,", 1))
    hosts.path("h0", "/run/only_here").mkdir()
    job = workshop.arguments("run", workshop.config(train_batch_size=9))
    hosts.replace_file("h2", SETTINGS, SETTINGS.read_text() + "\n# changed\n")
    (text, *_) = sorted((hosts.folder / "text").iterdir())
    hosts.replace_file("h2", text, "another text\n")
    launch = [sys.executable, PROJECT / "pipeline" / "launch" / "launch.py", "--no_ssh_check"]
    done = hosts.run("h0", [*launch, "--hostfile", hostfile, *job], 120, cwd="/run/only_here")
    said = " ".join(done.stderr.split())
    assert done.returncode == 2, said
    for problem in (
        "error: h1, h2, twin: current folder = 'missing': ranks start in this machine's current folder.",
        "error: h2: code = ",
        "error: h2: data = ",
        "error: twin: machine = 'h1': is the same machine as h1",
    ):
        assert said.count(problem) == 1 + (problem in said.partition("Job refused")[2]), said
    assert "importing torch" not in said and not (hosts.folder / "run").exists()
    homes = [hosts.path(name, "/run/home/runs").exists() for name in hosts.names]
    assert not any(homes)
    assert_nothing_runs(hosts)
