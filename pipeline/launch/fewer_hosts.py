"""A job on fewer hosts than it was meant for, with the same steps.

The data-parallel size shrinks; pipeline, tensor and sequence sizes stay. Each replica takes more
micro-batches, so that a step has as many sequences as before and the loss curve stays what it was.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import IO

from pipeline.base.problems import Problem
from pipeline.base.words import few
from pipeline.cluster.agent.owned_process import new_file_in_memory
from pipeline.cluster.launcher_options import LauncherOptions
from pipeline.job.job import Batch, Job
from pipeline.job.resolve import Draft
from pipeline.job.world import Host, World

# Draft of a job on these hosts with these batch sizes (train, micro, accumulation steps).
Check = Callable[[World, tuple[int, ...]], Draft]


@dataclass(frozen=True)
class Plan:
    """A start on some of the hosts.

    Attributes:
        job: With the layout of these hosts.
        batch: Sizes for the ranks, in place of the JSON's.
        left_out: Names of the other hosts.
    """

    job: Job
    batch: tuple[int, ...]
    left_out: tuple[str, ...]


def plan_fewer(full: Job, usable: Sequence[Host], least: int, check: Check) -> Plan | list[Problem]:
    """The largest number of the usable hosts, in their order, on which the job is legal; or why none is.

    Args:
        full: The job on all its hosts.
        least: Fewest hosts that the user wants.
    """
    problems: list[Problem] = []
    for count in range(len(usable), least - 1, -1):
        hosts = tuple(usable[:count])
        world = replace(full.world, hosts=hosts)
        batch = same_step(full, world.size)
        if isinstance(batch, Problem):
            problems.append(batch)
            continue
        draft = check(world, batch)
        if draft.job is not None:
            names = {host.name for host in hosts}
            left_out = tuple(host.name for host in full.world.hosts if host.name not in names)
            return Plan(draft.job, batch, left_out)
        problems += draft.errors
    if len(usable) < least:
        rule = f"{len(usable)} of {len(full.world.hosts)} hosts can be used"
        problems.append(Problem("allow_fewer_hosts", least, rule, "Repair the hosts, or allow fewer"))
    return problems


def separate_folders(launcher: LauncherOptions, file_systems: Sequence[Sequence[str]]) -> list[Problem]:
    """Known before the first start: on fewer hosts, a checkpoint whose parts lie on each could not be read.

    Args:
        file_systems: Hosts whose output folder is one file system, group by group.
    """
    if launcher.allow_fewer_hosts is None or not launcher.max_restarts or len(file_systems) < 2:
        return []
    rule = "each host has an output folder of its own, so that a restart without one cannot read a checkpoint"
    remedy = "Give --output_dir a file system that all hosts share"
    return [Problem("allow_fewer_hosts", launcher.allow_fewer_hosts, rule, remedy, "warning")]


def same_step(full: Job, world_size: int) -> tuple[int, ...] | Problem:
    """(train batch, micro-batch, accumulation steps) of the same step on a smaller world; the micro-batch
    does not grow, because it has to fit the device."""
    mesh, batch = full.mesh, full.batch
    model = mesh.pipeline * mesh.sequence * mesh.tensor
    data, rest = divmod(world_size, model)
    if rest or data == 0:
        rule = f"{world_size} ranks are not a multiple of the {model} that hold one replica"
        return Problem("allow_fewer_hosts", world_size, rule, "Repair the hosts")
    replica, rest = divmod(batch.train_batch_size, data)
    if rest:
        rule = f"a step's {batch.train_batch_size} sequences do not divide by {data} replicas"
        return Problem("allow_fewer_hosts", world_size, rule, "Repair the hosts, or choose another batch")
    micro = max(size for size in range(1, batch.micro_batch_size + 1) if replica % size == 0)
    return batch.train_batch_size, micro, replica // micro


def describe_fewer(full: Job, plan: Plan, why: str) -> str:
    """What changes, in one paragraph."""
    after, mesh = plan.job.batch, plan.job.mesh
    hosts, all_hosts = len(plan.job.world.hosts), len(full.world.hosts)
    ranks = f"{plan.job.world.size} of {full.world.size} ranks"
    kept = f"pipeline {mesh.pipeline}, sequence {mesh.sequence} and tensor {mesh.tensor} stay"
    return (
        f"Left out: {few(plan.left_out)} ({why}). The job runs on {hosts} of {all_hosts} hosts, "
        f"{ranks}: data-parallel size {mesh.data} instead of {full.mesh.data}; {kept}. "
        f"A step still takes {after.train_batch_size} sequences, with {_sizes(after)} instead of "
        f"{_sizes(full.batch)}. A checkpoint of the other layout is converted when it is loaded. The next "
        f"restart uses every host again that passes its check."
    )


def describe_return(before: Job, after: Job) -> str:
    """What changes in one paragraph where hosts that had been left out are used again; else nothing."""
    names = {host.name for host in before.world.hosts}
    back = [host.name for host in after.world.hosts if host.name not in names]
    if not back:
        return ""
    hosts, ranks = len(after.world.hosts), after.world.size
    return (
        f"Used again: {few(back)}. The job runs on {hosts} hosts, {ranks} ranks instead of "
        f"{before.world.size}: data-parallel size {after.mesh.data} instead of {before.mesh.data}. A step "
        f"still takes {after.batch.train_batch_size} sequences, with {_sizes(after.batch)} instead of "
        f"{_sizes(before.batch)}. A checkpoint of the other layout is converted when it is loaded."
    )


def _sizes(batch: Batch) -> str:
    count = batch.accumulation_steps
    return f"{count} micro-batch{'es' if count > 1 else ''} of {batch.micro_batch_size} per replica"


def on_hosts(options: LauncherOptions, world: World) -> tuple[LauncherOptions, World, IO[bytes]]:
    """The launcher's options for exactly these hosts: a hostfile of their own, with a filter only where slots
    in the middle are not used.

    The file has no place on a disk, and is there for the launcher until it is closed or this process ends.
    """
    unused = {host.name: sorted(set(range(max(host.devices))) - set(host.devices)) for host in world.hosts}
    file = new_file_in_memory("hostfile")
    file.writelines(f"{host.name} slots={max(host.devices) + 1}\n".encode() for host in world.hosts)
    file.flush()
    path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
    # No list of what is used: the launcher cannot read user@host there, and all hosts would be in it.
    exclude = "@".join(f"{name}:{','.join(map(str, slots))}" for name, slots in unused.items() if slots)
    options = replace(options, hostfile=path, include="", exclude=exclude, num_nodes=None, num_gpus=None)
    return options, replace(world, hostfile=path), file
