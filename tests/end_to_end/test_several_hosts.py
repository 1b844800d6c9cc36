"""Jobs over real hosts, with a pipeline from one to the other: losses, checkpoints, and other numbers of hosts."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from tests.end_to_end.jobs import PROJECT, Workshop
from tests.harness import run_job
from tests.hosts import Hosts

pytestmark = [pytest.mark.slow, pytest.mark.multihost, pytest.mark.timeout(600)]

# What launch.sh runs when it has made its environment.
LAUNCH = [sys.executable, str(PROJECT / "pipeline" / "cluster" / "launch.py")]
DEEPSPEED = ["deepspeed"]
SCRIPT = str(PROJECT / "pipeline" / "pretrain.py")
# Sums of other ranks' shares in another order; 32-bit floats have 7 digits.
TOLERANCE = 1e-5
JOB_SECONDS = 200
STEPS = 6


def losses(workshop: Workshop, run: str) -> list[float]:
    return [step["loss"] for step in workshop.steps(run)]


@pytest.fixture(scope="module")
def curve(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process."""
    workshop = Workshop(tmp_path_factory.mktemp("one"))
    run_job(workshop.arguments("run", workshop.config(), steps=STEPS), 1).check()
    return losses(workshop, "run")


def finish(done: CompletedProcess[str]) -> CompletedProcess[str]:
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert f"finished" in done.stdout
    return done


def assert_nothing_runs(hosts: Hosts) -> None:
    assert {name: hosts.processes(name) for name in ("h0", *hosts.names)} == {"h0": [], **{n: [] for n in hosts.names}}


def test_two_hosts_then_one_then_two_again(hosts: Hosts, curve: list[float]) -> None:
    workshop = Workshop(hosts.folder)
    two, one = hosts.write_hostfile(2), hosts.write_hostfile(2, ["h2"], "one_host")
    legs = [
        # (start, layout of that many ranks, steps at its end)
        ([*LAUNCH, "--hostfile", two], {"pipeline": {"stages": 2}, "zero_optimization": {"stage": 1}}, 2),
        ([*LAUNCH, "--hostfile", one], {"zero_optimization": {"stage": 2}}, 4),
        (["deepspeed", "--hostfile", two, SCRIPT], {"pipeline": {"stages": 2}, "tensor_parallel": {"autotp_size": 2}}, 6),
    ]
    for start, layout, steps in legs:
        config = workshop.config(f"to_{steps}", **layout)
        arguments = workshop.arguments("run", config, steps=steps)
        done = finish(hosts.run("h0", [*start, *arguments], JOB_SECONDS, cwd=PROJECT))
        assert ("resumed from" in done.stdout) == (steps > 2)
        assert_nothing_runs(hosts)
    assert losses(workshop, "run") == pytest.approx(curve, rel=TOLERANCE)
