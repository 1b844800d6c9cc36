"""The world of a job: which hosts, how many ranks on each, and what they compute with.

The launch and the check find it in the hostfile or on this machine; a rank finds it in its environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.base.problems import JobError, Problem
from pipeline.cluster.devices import BF16_CAPABILITY, visible_gpus
from pipeline.cluster.hostfile import MAX_SLOTS, read_hostfile, select_hosts
from pipeline.cluster.rank_environment import RankEnvironment
from pipeline.job.world import LOCALHOST, Host, World, is_this_machine

# Ranks on a machine without GPUs when none are asked for: enough to see data parallelism at work.
DEFAULT_CPU_RANKS = 2
# DeepSpeed reads this file when no hostfile is named; so does this project, or the two would disagree.
DEFAULT_HOSTFILE = "/job/hostfile"
_LOOPBACK_NAME = re.compile(r"localhost(\..*)?|127(\.\d+){3}", re.IGNORECASE)
# Largest world that is checked on paper.
MAX_WORLD = 65536


def resolve_world(
    hostfile: str | None = None,
    include: str = "",
    exclude: str = "",
    num_nodes: int | None = None,
    num_gpus: int | None = None,
    world_size: int | None = None,
) -> World:
    """The world that the launcher's options describe; `world_size` replaces it for a check on paper.

    Raises:
        JobError: with every problem of the hostfile, the filters and this machine's devices.
    """
    if world_size is not None:
        return _imagined_world(world_size, hostfile, include, exclude, num_nodes, num_gpus)
    if hostfile is None and Path(DEFAULT_HOSTFILE).is_file():
        hostfile = DEFAULT_HOSTFILE
    if hostfile is None:
        return local_world(include, exclude, num_nodes, num_gpus)
    return world_from_hostfile(hostfile, include, exclude, num_nodes, num_gpus)


def local_world(
    include: str = "",
    exclude: str = "",
    num_nodes: int | None = None,
    num_gpus: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> World:
    """This machine: all its GPUs, else two CPU ranks (one on a single core).

    `num_gpus` without GPUs is the number of CPU ranks; it may exceed the cores.

    Raises:
        JobError: a filter that does not fit, or a GPU driver that does not work.
    """
    device = _local_device(environ)
    if device.gpus is not None:
        host = Host(LOCALHOST, len(device.gpus), device.gpus)
    elif num_gpus is not None:
        if not 0 < num_gpus <= MAX_SLOTS:
            rule = f"must be from 1 to {MAX_SLOTS} CPU ranks"
            raise JobError([Problem("num_gpus", num_gpus, rule, "Give such a number")])
        host = Host(LOCALHOST, num_gpus)
    else:
        host = Host(LOCALHOST, min(DEFAULT_CPU_RANKS, available_cores()))
    hosts, problems = select_hosts((host,), include, exclude, num_nodes, num_gpus)
    if problems:
        raise JobError(problems)
    return World(hosts, device.kind, device.name, device.bf16_native)


def world_from_hostfile(
    path: str,
    include: str = "",
    exclude: str = "",
    num_nodes: int | None = None,
    num_gpus: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> World:
    """The hosts of a file after the filters.

    The devices of other machines are not asked here: they are taken to be GPUs with bf16, and each rank
    checks its own when it starts.

    Raises:
        JobError: with every problem of the file, then of the filters, then of this machine's devices.
    """
    hosts, problems = read_hostfile(path)
    if not problems:
        hosts, problems = select_hosts(hosts, include, exclude, num_nodes, num_gpus)
    if not problems:
        problems = _loopback_among_others(hosts, path) or _names_of_this_machine(hosts, path)
    if problems:
        raise JobError(problems)
    if not all(is_this_machine(host.name) for host in hosts):
        return World(hosts, "cuda", None, True, path)
    device = _local_device(environ)
    if device.gpus is not None and (missing := set(hosts[0].devices) - set(device.gpus)):
        rule = f"this machine has {len(device.gpus)} usable GPUs, not number {min(missing)}"
        remedy = "Lower slots in the hostfile, or see CUDA_VISIBLE_DEVICES"
        raise JobError([Problem(path, f"{hosts[0].name} slots={hosts[0].slots}", rule, remedy)])
    return World(hosts, device.kind, device.name, device.bf16_native, path)


def world_from_environment(environment: RankEnvironment, environ: Mapping[str, str] = os.environ) -> World:
    """The world as one rank sees it: hosts as large as its own, with its own devices.

    Raises:
        JobError: fewer GPUs than ranks on this host, or a GPU driver that does not work.
    """
    device = _local_device(environ)
    size, local_size = environment.world_size, environment.local_size
    if device.gpus is not None and len(device.gpus) < local_size:
        rule = f"{local_size} ranks on this host need as many GPUs, {len(device.gpus)} are visible"
        remedy = "Start fewer ranks, or set DS_ACCELERATOR=cpu to train on the CPU"
        raise JobError([Problem("LOCAL_SIZE", local_size, rule, remedy)])
    slots = [min(local_size, size - first) for first in range(0, size, local_size)]
    names = [LOCALHOST] if len(slots) == 1 else [f"host{number}" for number in range(len(slots))]
    hosts = tuple(Host(name, count) for name, count in zip(names, slots, strict=True))
    return World(hosts, device.kind, device.name, device.bf16_native)


def available_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class _Device:
    kind: Literal["cpu", "cuda"]
    name: str | None
    bf16_native: bool
    gpus: tuple[int, ...] | None  # device numbers; None on CPU


def _local_device(environ: Mapping[str, str]) -> _Device:
    # DS_ACCELERATOR is DeepSpeed's own switch: its launcher and engine follow it, so this must, too.
    chosen = environ.get("DS_ACCELERATOR")
    if chosen == "cpu":
        return _Device("cpu", None, False, None)
    if chosen not in (None, "cuda"):
        rule = "the devices supported here are cuda and cpu"
        raise JobError([Problem("DS_ACCELERATOR", chosen, rule, "Set it to one of these, or unset it")])
    gpus, problems = visible_gpus(environ)
    if problems:
        raise JobError(problems)
    if chosen == "cuda" and not gpus:
        rule = "there is no usable GPU on this machine"
        raise JobError([Problem("DS_ACCELERATOR", chosen, rule, "Unset it to train on the CPU")])
    if not gpus:
        return _Device("cpu", None, False, None)
    names = " + ".join(sorted({gpu.name for gpu in gpus}))
    bf16_native = min(gpu.capability for gpu in gpus) >= BF16_CAPABILITY
    return _Device("cuda", names, bf16_native, tuple(gpu.index for gpu in gpus))


def _loopback_among_others(hosts: tuple[Host, ...], path: str) -> tuple[Problem, ...]:
    """Each host of a cluster would take such a name for itself."""
    loopback = [host.name for host in hosts if _LOOPBACK_NAME.fullmatch(host.name.rpartition("@")[2])]
    if not loopback or len(hosts) == 1:
        return ()
    rule = "means another machine on every host, so it cannot be listed with other hosts"
    return (Problem(path, loopback[0], rule, "Write the name or address by which the others reach it"),)


def _names_of_this_machine(hosts: tuple[Host, ...], path: str) -> tuple[Problem, ...]:
    """One machine cannot be two hosts: their ranks would want the same devices."""
    mine = [host.name for host in hosts if is_this_machine(host.name.rpartition("@")[2])]
    if len(mine) < 2:
        return ()
    rule = f"is this machine, as {mine[0]} is"
    return (Problem(path, mine[1], rule, "Keep one line for it, with the sum of the slots"),)


def _imagined_world(size: int, hostfile: str | None, *filters: object) -> World:
    problems = []
    if not 1 <= size <= MAX_WORLD:
        rule = f"must be from 1 to {MAX_WORLD}"
        problems.append(Problem("world_size", size, rule, "Give the number of ranks"))
    if hostfile is not None or any(value not in (None, "") for value in filters):
        rule = "replaces the world of a hostfile and the launcher's filters"
        problems.append(Problem("world_size", size, rule, "Give one or the other"))
    if problems:
        raise JobError(problems)
    device = _local_device(os.environ)
    return World((Host(LOCALHOST, size),), device.kind, device.name, device.bf16_native)
