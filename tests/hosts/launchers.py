"""What the launchers of Debian's packages need on the hosts before launch.sh can use them."""

from __future__ import annotations

import pytest

from tests.hosts.hosts import Hosts
from tests.hosts.process import LOGIN
from tests.hosts.requirements import find
from tests.hosts.slurm import start_slurm, why_no_slurm

# Open MPI refuses to start as root without.
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def need(command: str, package: str) -> None:
    """Skip the test, visibly, where the command is missing."""
    if not find(command):
        pytest.skip(f"{command} is missing (package {package})")


def launcher_environment(hosts: Hosts, launcher: str) -> dict[str, str]:
    """Variables for `launch.sh --launcher LAUNCHER`, once for each launcher of some hosts; Slurm is started,
    with one slot on each."""
    if launcher == "openmpi":
        need("mpirun.openmpi", "openmpi-bin")
        return AS_ROOT
    if launcher == "mpich":
        need("mpiexec.mpich", "mpich")
        # Debian's `mpirun` is the one of Open MPI where both are installed.
        mpirun = hosts.new_folder("mpich") / "mpirun"
        mpirun.write_text('#!/bin/sh\nexec mpiexec.mpich "$@"\n', encoding="utf-8")
        mpirun.chmod(0o755)
        return {"PATH": f"{mpirun.parent}:{LOGIN['PATH']}"}
    if reason := why_no_slurm():
        pytest.skip(reason)
    return start_slurm(hosts, slots=1)
