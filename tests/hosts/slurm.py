"""Slurm on the hosts: h0 has the controller, the workers are its nodes. Ready in a second or two."""

from __future__ import annotations

import os

from tests.hosts.hosts import LOGIN_HOST, Hosts
from tests.hosts.requirements import find

# Commands, and Debian's packages with them.
PACKAGES = {"slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "srun": "slurm-wlm", "munged": "munge"}
CONFIGURATION = """\
ClusterName=tests
SlurmctldHost={login}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
StateSaveLocation=/run/slurmctld
SlurmdSpoolDir=/run/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
NodeName={nodes} CPUs={slots}
PartitionName=all Nodes=ALL Default=YES State=UP
"""
START_SECONDS = 20.0


def why_no_slurm() -> str | None:
    """The reason why there can be no Slurm on the hosts; None if there can."""
    missing = [f"{name} (package {PACKAGES[name]})" for name in PACKAGES if not find(name)]
    return f"Slurm needs commands that are missing: {', '.join(missing)}" if missing else None


def start_slurm(hosts: Hosts, slots: int) -> dict[str, str]:
    """Start Slurm on the hosts, with `slots` CPUs on each worker; the environment for its commands."""
    folder = hosts.new_folder("slurm")
    configuration, key = folder / "slurm.conf", folder / "munge.key"
    configuration.write_text(
        CONFIGURATION.format(login=LOGIN_HOST, nodes=",".join(hosts.names), slots=slots), encoding="utf-8"
    )
    # A host has no control groups of its own, and this kind asks for none before they are used.
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n", encoding="utf-8")
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    files = ("key-file", key), ("log-file", "/run/munge/log"), ("seed-file", "/run/munge/seed")
    options = " ".join(f"--{name}={path}" for name, path in (*files, ("pid-file", "/run/munge/pid")))
    script = f"mkdir -p /run/munge /run/slurmd /run/slurmctld && munged --force {options}"
    for host in (LOGIN_HOST, *hosts.names):
        assert hosts.run(host, ["sh", "-c", script], timeout=20).returncode == 0
    hosts.start(LOGIN_HOST, ["slurmctld", "-D", "-f", configuration])
    for host in hosts.names:
        hosts.start(host, ["slurmd", "-D", "-f", configuration])
    environment = {"SLURM_CONF": str(configuration)}

    def are_idle() -> bool:
        seen = hosts.run(LOGIN_HOST, ["sinfo", "-h", "-o", "%T %D"], timeout=10, env=environment)
        return seen.stdout.strip() == f"idle {len(hosts.names)}"

    hosts.wait_until(are_idle, START_SECONDS, "idle Slurm nodes")
    return environment
