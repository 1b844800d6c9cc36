"""Every launcher starts the same pretrain.py, on one host and over two, with the losses of one process."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.end_to_end.host_jobs import LAUNCH, SCRIPT
from tests.end_to_end.jobs import PROJECT, Workshop
from tests.harness import run_job
from tests.hosts import Hosts
from tests.hosts.launchers import AS_ROOT, launcher_environment, need

pytestmark = [pytest.mark.slow, pytest.mark.multihost]

RANK = [sys.executable, SCRIPT]
# Sums of other ranks' shares in another order; 32-bit floats have 7 digits.
TOLERANCE = 1e-5
JOB_SECONDS = 150

# On one host, by a name for the run's folder.
ALONE = {
    "torchrun": ["torchrun", "--nproc_per_node", "2", SCRIPT],
    "accelerate": ["accelerate", "launch", "--multi_gpu", "--num_processes", "2", SCRIPT],
    "mpirun": ["mpirun.openmpi", "--oversubscribe", "-n", "2", *RANK],
}


@pytest.fixture(scope="module")
def workshop(hosts: Hosts) -> Workshop:
    return Workshop(hosts.folder)


@pytest.fixture(scope="module")
def losses(workshop: Workshop) -> list[float]:
    """Of one process."""
    run_job(workshop.arguments("one", workshop.config()), 1).check()
    return [step["loss"] for step in workshop.steps("one")]


@pytest.fixture(scope="module")
def slurm(hosts: Hosts) -> dict[str, str]:
    """The environment of Slurm's commands."""
    return launcher_environment(hosts, "slurm")


def check_training(
    hosts: Hosts,
    host: str,
    command: list[str],
    workshop: Workshop,
    losses: list[float],
    env: Mapping[str, str],
) -> None:
    """Two ranks, started by `command` on `host`, train as one process does, and nothing is left of them."""
    run = "-".join(Path(word).name for word in (host, *command[:1], *command[-1:]))
    arguments = workshop.arguments(run, workshop.config())
    done = hosts.run(host, [*command, *arguments], JOB_SECONDS, env={**AS_ROOT, **env}, cwd=PROJECT)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}\n{workshop.logs(run)}"
    assert "data parallel: 2 replicas" in done.stdout
    assert [step["loss"] for step in workshop.steps(run)] == pytest.approx(losses, rel=TOLERANCE)
    assert workshop.outcome(run)["status"] == "finished"
    assert [process for name in hosts.all_names for process in hosts.inside(name, SCRIPT)] == []


# torchrun is also started by the README's own commands, mpirun over two hosts below.
@pytest.mark.parametrize(
    "launcher",
    ["accelerate", *(pytest.param(each, marks=pytest.mark.repeats) for each in ("torchrun", "mpirun"))],
)
def test_on_one_host(hosts: Hosts, workshop: Workshop, losses: list[float], launcher: str) -> None:
    if launcher == "mpirun":
        need("mpirun.openmpi", "openmpi-bin")
    check_training(hosts, "h1", ALONE[launcher], workshop, losses, {})


@pytest.mark.repeats  # --launcher openmpi starts it below
def test_mpirun_over_two_hosts(hosts: Hosts, workshop: Workshop, losses: list[float]) -> None:
    need("mpirun.openmpi", "openmpi-bin")
    command = ["mpirun.openmpi", "--host", "h1,h2", "-x", "MASTER_ADDR=h1", *RANK]
    check_training(hosts, "h0", command, workshop, losses, {})


@pytest.mark.repeats  # launched, MPICH starts ranks in launch/host_check/test_broken_hosts.py
def test_mpiexec_over_two_hosts(hosts: Hosts, workshop: Workshop, losses: list[float]) -> None:
    need("mpiexec.mpich", "mpich")
    rendezvous = ["-genv", "MASTER_ADDR", "h1", "-genv", "MASTER_PORT", "29500"]
    command = ["mpiexec.mpich", "-hosts", "h1,h2", "-ppn", "1", "-n", "2", *rendezvous, *RANK]
    check_training(hosts, "h0", command, workshop, losses, {})


def test_srun_over_two_hosts(
    hosts: Hosts, workshop: Workshop, losses: list[float], slurm: dict[str, str]
) -> None:
    check_training(hosts, "h0", ["srun", "--nodes", "2", "--ntasks", "2", *RANK], workshop, losses, slurm)


def launch(hosts: Hosts, launcher: str) -> list[str]:
    return [*LAUNCH, "--hostfile", str(hosts.write_hostfile(1)), "--launcher", launcher]


@pytest.mark.parametrize("launcher", ["openmpi", pytest.param("mpich", marks=pytest.mark.repeats)])
def test_launch_through_mpi(hosts: Hosts, workshop: Workshop, losses: list[float], launcher: str) -> None:
    environment = launcher_environment(hosts, launcher)
    check_training(hosts, "h0", launch(hosts, launcher), workshop, losses, environment)


@pytest.mark.repeats  # srun starts ranks above
def test_launch_through_slurm(
    hosts: Hosts, workshop: Workshop, losses: list[float], slurm: dict[str, str]
) -> None:
    check_training(hosts, "h0", launch(hosts, "slurm"), workshop, losses, slurm)
