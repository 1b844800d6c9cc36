"""The world of a job: which hosts, how many ranks on each, and what they compute with.

The launch and the check find it in the hostfile or on this machine; a rank finds it in its environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pipeline.base.problems import JobError, Problem, job_error
from pipeline.base.words import did_you_mean
from pipeline.cluster.devices import BF16_CAPABILITY, visible_gpus
from pipeline.cluster.hostfile import MAX_SLOTS, read_hostfile, select_hosts
from pipeline.cluster.rank_environment import RankEnvironment
from pipeline.job.world import LOCALHOST, Host, World, devices_by_name, is_this_machine

# Ranks on a machine without GPUs when none are asked for: enough to see data parallelism at work.
DEFAULT_CPU_RANKS = 2
# DeepSpeed reads this file when no hostfile is named; so does this project, or the two would disagree.
DEFAULT_HOSTFILE = "/job/hostfile"
_LOOPBACK_NAME = re.compile(r"localhost(\..*)?|127(\.\d+){3}", re.IGNORECASE)
# Largest world that is checked on paper.
MAX_WORLD = 65536
_NOT_ASKED = "--hosts asks them, --device names another"


@dataclass(frozen=True)
class Paper:
    """What a check is told instead of looking. Of the first two, one at most.

    Attributes:
        world_size: Ranks on one host.
        hosts_like: ``HOSTSxSLOTS``, such as ``2048x8``: equal hosts.
        device: What ranks compute with: a name of `devices_by_name`, or ``cpu``.
    """

    world_size: int | None = None
    hosts_like: str | None = None
    device: str | None = None

    @property
    def has_ranks(self) -> bool:
        """Whether the ranks are on paper, too, and not only what they compute with."""
        return self.world_size is not None or self.hosts_like is not None


def resolve_world(
    hostfile: str | None = None,
    include: str = "",
    exclude: str = "",
    num_nodes: int | None = None,
    num_gpus: int | None = None,
    paper: Paper | None = None,
) -> World:
    """The world that the launcher's options describe, or `paper` in place of what this machine has.

    Raises:
        JobError: with every problem of the hostfile, the filters and the devices.
    """
    paper = paper or Paper()
    if paper.has_ranks:
        return _imagined_world(paper, hostfile, include, exclude, num_nodes, num_gpus)
    if hostfile is None and Path(DEFAULT_HOSTFILE).is_file():
        hostfile = DEFAULT_HOSTFILE
    filters = (include, exclude, num_nodes, num_gpus)
    if paper.device is None:
        return local_world(*filters) if hostfile is None else world_from_hostfile(hostfile, *filters)
    if hostfile is None:
        rule = "says what ranks compute with, and not how many there are"
        remedy = "Add --world_size N, --hosts_like HOSTSxSLOTS or --hostfile FILE"
        raise job_error("device", paper.device, rule, remedy)
    device = _device_like(paper.device)
    return device.under(World(_hosts_of(hostfile, *filters), "cpu", hostfile=hostfile))


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
            raise job_error("num_gpus", num_gpus, rule, "Give such a number")
        host = Host(LOCALHOST, num_gpus)
    else:
        host = Host(LOCALHOST, min(DEFAULT_CPU_RANKS, available_cores()))
    hosts, problems = select_hosts((host,), include, exclude, num_nodes, num_gpus)
    if problems:
        raise JobError(problems)
    return device.under(World(hosts, "cpu", host_memory=host_memory()))


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
    hosts = _hosts_of(path, include, exclude, num_nodes, num_gpus)
    if not all(is_this_machine(host.name) for host in hosts):
        return World(hosts, "cuda", None, True, path, assumed=_NOT_ASKED)
    device = _local_device(environ)
    if device.gpus is not None and (missing := set(hosts[0].devices) - set(device.gpus)):
        rule = f"this machine has {len(device.gpus)} usable GPUs, not number {min(missing)}"
        remedy = "Lower slots in the hostfile, or see CUDA_VISIBLE_DEVICES"
        raise job_error(path, f"{hosts[0].name} slots={hosts[0].slots}", rule, remedy)
    return device.under(World(hosts, "cpu", hostfile=path, host_memory=host_memory()))


def _hosts_of(
    path: str, include: str, exclude: str, num_nodes: int | None, num_gpus: int | None
) -> tuple[Host, ...]:
    hosts, problems = read_hostfile(path)
    if not problems:
        hosts, problems = select_hosts(hosts, include, exclude, num_nodes, num_gpus)
    if not problems:
        problems = _loopback_among_others(hosts, path) or _names_of_this_machine(hosts, path)
    if problems:
        raise JobError(problems)
    return hosts


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
        raise job_error("LOCAL_SIZE", local_size, rule, remedy)
    slots = [min(local_size, size - first) for first in range(0, size, local_size)]
    names = [LOCALHOST] if len(slots) == 1 else [f"host{number}" for number in range(len(slots))]
    hosts = tuple(Host(name, count) for name, count in zip(names, slots, strict=True))
    return device.under(World(hosts, "cpu"))


def available_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_memory() -> int | None:
    """Bytes of memory of this machine; None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):  # a system without these names
        return None


@dataclass(frozen=True)
class _Device:
    kind: Literal["cpu", "cuda"]
    name: str | None
    bf16_native: bool
    gpus: tuple[int, ...] | None  # device numbers; None on CPU
    memory: int | None = None
    assumed: str = ""

    def under(self, world: World) -> World:
        """The world whose ranks compute on this."""
        return replace(
            world, device=self.kind, device_name=self.name, bf16_native=self.bf16_native,
            device_memory=self.memory, assumed=self.assumed,
        )  # fmt: skip


def _local_device(environ: Mapping[str, str]) -> _Device:
    # DS_ACCELERATOR is DeepSpeed's own switch: its launcher and engine follow it, so this must, too.
    chosen = environ.get("DS_ACCELERATOR")
    if chosen == "cpu":
        return _Device("cpu", None, False, None)
    if chosen not in (None, "cuda"):
        rule = "the devices supported here are cuda and cpu"
        raise job_error("DS_ACCELERATOR", chosen, rule, "Set it to one of these, or unset it")
    gpus, problems = visible_gpus(environ)
    if problems:
        raise JobError(problems)
    if chosen == "cuda" and not gpus:
        rule = "there is no usable GPU on this machine"
        raise job_error("DS_ACCELERATOR", chosen, rule, "Unset it to train on the CPU")
    if not gpus:
        return _Device("cpu", None, False, None)
    names = " + ".join(sorted({gpu.name for gpu in gpus}))
    bf16_native = min(gpu.capability for gpu in gpus) >= BF16_CAPABILITY
    sizes = [gpu.memory for gpu in gpus]
    memory = None if None in sizes else min(sizes)
    return _Device("cuda", names, bf16_native, tuple(gpu.index for gpu in gpus), memory)


def _device_like(given: str) -> _Device:
    """The device of that name, ``cpu`` included.

    Raises:
        JobError: no such device is known.
    """
    name, assumed = given.lower(), "--device"
    if name == "cpu":
        return _Device("cpu", None, False, None, assumed=assumed)
    kinds = devices_by_name()
    if name not in kinds:
        sized = [each for each in kinds if each.startswith(f"{name}-")]
        remedy = f"Use {' or '.join(sized)}" if sized else did_you_mean(name, ["cpu", *kinds])
        raise job_error("device", given, "is the name of no device that is known here", remedy)
    kind, memory = kinds[name]
    shown = f"{kind.name.upper()} {memory >> 30}GB"
    return _Device("cuda", shown, kind.bf16, (), memory, assumed)


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


def _imagined_world(paper: Paper, hostfile: str | None, *filters: object) -> World:
    key = "hosts_like" if paper.world_size is None else "world_size"
    value = getattr(paper, key)
    problems = []
    if paper.world_size is not None and paper.hosts_like is not None:
        rule = "says how many ranks there are, and so does --hosts_like"
        problems.append(Problem(key, value, rule, "Give one of them"))
    if hostfile is not None or any(value not in (None, "") for value in filters):
        rule = "replaces the world of a hostfile and the launcher's filters"
        problems.append(Problem(key, value, rule, "Give one or the other"))
    hosts: tuple[Host, ...] = ()
    device = None
    try:
        hosts = _imagined_hosts(paper)
        device = _local_device(os.environ) if paper.device is None else _device_like(paper.device)
    except JobError as error:
        problems += error.problems
    if problems or device is None:
        raise JobError(problems)
    if paper.device is None:
        device = replace(device, assumed="as here; --device names another")
    return device.under(World(hosts, "cpu"))


def _imagined_hosts(paper: Paper) -> tuple[Host, ...]:
    if paper.world_size is not None:
        if not 1 <= paper.world_size <= MAX_WORLD:
            rule = f"must be from 1 to {MAX_WORLD}"
            raise job_error("world_size", paper.world_size, rule, "Give the number of ranks")
        return (Host(LOCALHOST, paper.world_size),)
    found = re.fullmatch(r"(\d{1,9})x(\d{1,9})", str(paper.hosts_like))
    hosts, slots = map(int, found.groups()) if found else (0, 0)
    if not (hosts * slots and slots <= MAX_SLOTS and hosts * slots <= MAX_WORLD):
        rule = f"must be HOSTSxSLOTS, with 1 to {MAX_SLOTS} slots and at most {MAX_WORLD} ranks"
        raise job_error("hosts_like", paper.hosts_like, rule, "Write 4x8 for 4 hosts of 8 GPUs")
    return tuple(Host(f"node{number}", slots) for number in range(1, hosts + 1))
