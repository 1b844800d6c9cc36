"""The exact start of the deepspeed launcher for a world: everything it would guess is said."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.cluster.agent.launch_spec import LaunchSpec, encode
from pipeline.cluster.forwarded_environment import launcher_environment
from pipeline.cluster.launcher_options import LauncherOptions
from pipeline.cluster.rank_environment import free_port
from pipeline.cluster.world import available_cores
from pipeline.job.world import LOOPBACK, World

SCRIPT = Path(__file__).resolve().parents[1] / "pretrain.py"
DEEPSPEED = (sys.executable, "-m", "deepspeed.launcher.runner")
# DeepSpeed's own default. Where hosts are started one by one, all must know it beforehand; otherwise the
# coordinator replaces it by a port that is free on the first host.
REMOTE_MASTER_PORT = 29500


@dataclass(frozen=True)
class Launch:
    """One start of the deepspeed launcher.

    Attributes:
        command: Its argument list; no shell reads it.
        environment: Its environment, which local ranks inherit.
        master_port: Port of the rendezvous, as the launcher is told.
    """

    command: tuple[str, ...]
    environment: dict[str, str]
    master_port: int


def plan_launch(
    options: LauncherOptions,
    world: World,
    spec: LaunchSpec,
    environment: Mapping[str, str],
    job_arguments: Sequence[str] = (),
    script: str | Path = SCRIPT,
    deepspeed: Sequence[str] = DEEPSPEED,
) -> Launch:
    """The exact start of `script` on every rank of `world`.

    The job's arguments stand on the command line only where there is no coordinator that hands them out: with
    --no_ssh, when no shell reads it.
    """
    port = options.master_port or (free_port() if world.is_local else REMOTE_MASTER_PORT)
    # The launcher's log of its own doings would hide the job's; what it refuses it raises, and that shows.
    arguments = ["--log_level", "critical", *_where(options, world), *_rendezvous(options, world, port)]
    arguments += _passed_on(options)
    if not world.is_local and not options.no_ssh and options.launcher in (None, "pdsh"):
        # The level does not reach the other hosts, whose launchers would print every rank's command. What
        # this option is given goes through a shell there, which makes it two.
        arguments += ["--enable_each_rank_log", "None --log_level=critical"]
    command = (
        *deepspeed,
        *arguments,
        str(script),
        encode(spec),
        *(job_arguments if options.no_ssh else ()),
    )
    return Launch(command, _environment(world, environment, world.is_local or options.no_ssh), port)


def _where(options: LauncherOptions, world: World) -> list[str]:
    """The hosts and slots, said so that the launcher cannot understand anything else."""
    if world.hostfile is not None:
        arguments = ["--hostfile", world.hostfile]
        for name in ("include", "exclude", "num_nodes", "num_gpus"):
            value = getattr(options, name)
            if value not in (None, ""):
                arguments += [f"--{name}", str(value)]
        if len(world.hosts) == 1 and not world.is_local:
            # With one host left the launcher would start the job here instead of there.
            arguments.append("--force_multi")
        return arguments
    host = world.hosts[0]
    if world.device == "cpu":
        # It counts a CPU as one slot, and takes a larger number without a word.
        return ["--num_gpus", str(host.slots)]
    return ["--include", f"{host.name}:{','.join(str(device) for device in host.devices)}"]


def _rendezvous(options: LauncherOptions, world: World, port: int) -> list[str]:
    """Given an address, the launcher asks no host for one. It is the name of the first host; the ranks meet
    where the coordinator sees rank 0."""
    address = options.master_addr or (LOOPBACK if world.is_local else world.hosts[0].name.rpartition("@")[2])
    # The hosts have been checked, all of them and with a time limit; the launcher's check has neither.
    check = [] if options.no_ssh else ["--no_ssh_check"] if world.hostfile is not None else []
    return ["--master_port", str(port), "--master_addr", address, *check]


def _passed_on(options: LauncherOptions) -> list[str]:
    arguments = ["--no_ssh"] if options.no_ssh else []
    for name in ("node_rank", "launcher", "ssh_port"):
        value = getattr(options, name)
        if value is not None:
            arguments += [f"--{name}", str(value)]
    if options.launcher_args is not None:
        arguments.append(f"--launcher_args={options.launcher_args}")  # it begins with a dash
    return arguments


def _environment(world: World, environment: Mapping[str, str], inherited: bool) -> dict[str, str]:
    result = launcher_environment(environment, inherited)
    if world.device == "cpu" and world.is_local:
        # The launcher sets CUDA_VISIBLE_DEVICES for every rank. Without this, an empty one, which hid the
        # GPUs from the check, would not hide them from the ranks.
        result["DS_ACCELERATOR"] = "cpu"
        # torch takes all cores in each rank otherwise, and the ranks wait for each other.
        result.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // world.size)))
    return result
