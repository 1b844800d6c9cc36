"""Every launcher starts the same pretrain.py, on one host and over two, with the losses of one process."""

from __future__ import annotations

import sys

import pytest

from tests.end_to_end.jobs import PROJECT, Workshop
from tests.harness import run_job
from tests.hosts import Hosts
from tests.hosts.requirements import find
from tests.hosts.slurm import start_slurm, why_no_slurm

pytestmark = [pytest.mark.slow, pytest.mark.multihost]

SCRIPT = str(PROJECT / "pipeline" / "pretrain.py")
RANK = [sys.executable, SCRIPT]
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
# Sums of other ranks' shares in another order; 32-bit floats have 7 digits.
TOLERANCE = 1e-5
JOB_SECONDS = 150

# On one host, by a name for the run's folder.
ALONE = {
    "torchrun": ["torchrun", "--nproc_per_node", "2", SCRIPT],
    "accelerate": ["accelerate", "launch", "--multi_gpu", "--num_processes", "2", SCRIPT],
    "mpirun": ["mpirun.openmpi", "--oversubscribe", "-n", "2", *RANK],
}
# From the login host, one rank on each of h1 and h2.
TOGETHER = {
    "mpirun": ["mpirun.openmpi", "--host", "h1,h2", "-x", "MASTER_ADDR=h1", *RANK],
    "mpiexec": [
        *("mpiexec.mpich", "-hosts", "h1,h2", "-ppn", "1", "-n", "2"),
        *("-genv", "MASTER_ADDR", "h1", "-genv", "MASTER_PORT", "29500", *RANK),
    ],
    "srun": ["srun", "--nodes", "2", "--ntasks", "2", *RANK],
}


@pytest.fixture(scope="module")
def workshop(hosts: Hosts) -> Workshop:
    return Workshop(hosts.folder)


@pytest.fixture(scope="module")
def losses(workshop: Workshop) -> list[float]:
    """Of one process."""
    run_job(workshop.arguments("one", workshop.config()), 1).check()
    return [step["loss"] for step in workshop.steps("one")]


def needs(launcher: str) -> None:
    """Skip where Debian's package is missing."""
    for command, package in (("mpirun.openmpi", "openmpi-bin"), ("mpiexec.mpich", "mpich")):
        if launcher == command and not find(command):
            pytest.skip(f"{command} is missing (package {package})")
    if launcher == "srun" and (reason := why_no_slurm()):
        pytest.skip(reason)


def check_training(
    hosts: Hosts, host: str, command: list[str], workshop: Workshop, losses: list[float], env: dict[str, str]
) -> None:
    """Two ranks, started by `command` on `host`, train as one process does, and nothing is left of them."""
    needs(command[0])
    run = f"{command[0]}-{host}"
    arguments = workshop.arguments(run, workshop.config())
    done = hosts.run(host, [*command, *arguments], JOB_SECONDS, env=AS_ROOT | env, cwd=PROJECT)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert "data: 2 replicas" in done.stdout
    assert [step["loss"] for step in workshop.steps(run)] == pytest.approx(losses, rel=TOLERANCE)
    assert workshop.outcome(run)["status"] == "finished"
    left = [line for name in hosts.names for line in hosts.processes(name) if SCRIPT in line]
    assert left == []


@pytest.mark.parametrize("launcher", ALONE)
def test_on_one_host(hosts: Hosts, workshop: Workshop, losses: list[float], launcher: str) -> None:
    check_training(hosts, "h1", ALONE[launcher], workshop, losses, {})


@pytest.mark.parametrize("launcher", TOGETHER)
def test_over_two_hosts(hosts: Hosts, workshop: Workshop, losses: list[float], launcher: str) -> None:
    env = start_slurm(hosts, slots=1) if launcher == "srun" and not why_no_slurm() else {}
    check_training(hosts, "h0", TOGETHER[launcher], workshop, losses, env)
