"""From a checked job to its exit code: what each rank is handed, where they meet, and the start itself."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pipeline.base.words import counted
from pipeline.cluster.agent.coordinator import Coordinator
from pipeline.cluster.agent.coordinator_settings import CoordinatorSettings
from pipeline.cluster.agent.credential import key_in_memory, new_key
from pipeline.cluster.agent.launch_spec import LaunchSpec
from pipeline.cluster.forwarded_environment import deepspeed_env, forwarded
from pipeline.cluster.launcher_options import LauncherOptions
from pipeline.job.world import World
from pipeline.launch.host_check.ask import way_to_hosts
from pipeline.launch.host_check.reach import NoWay, launch_address
from pipeline.launch.key_delivery import NotDelivered, deliver_key, withdraw_key
from pipeline.launch.launcher_command import SCRIPT, plan_launch
from pipeline.launch.launcher_process import say
from pipeline.launch.run import Result, run_launch


def start_once(
    world: World,
    output_dir: str,
    options: LauncherOptions,
    job_arguments: Sequence[str],
    batch: tuple[int, ...] = (),
    script: str | Path = SCRIPT,
) -> Result:
    """One start of `script` on every rank of `world`. `batch`: as in a spec.

    Raises:
        NoWay: the coordinator has no address that the ranks could use, or a host cannot be given the key.
    """
    spec = LaunchSpec(
        hosts=tuple((host.name, host.slots) for host in world.hosts),
        failure_timeout=options.failure_timeout,
        step_timeout=options.step_timeout,
        batch=batch,
    )
    with contextlib.ExitStack() as stack:
        coordinator, where, environment = None, "", dict(os.environ)
        if options.no_ssh:
            environment |= dict(rank_variables(os.environ, is_local=True))  # nobody else hands them out
        else:
            address = launch_address(world, options)
            coordinator = stack.enter_context(contextlib.closing(_coordinator(world, options, job_arguments)))
            key_file = stack.enter_context(_key_file(world, options, coordinator))
            spec = replace(spec, address=address, port=coordinator.port, key_file=key_file)
            where = f"; their agents report to {address}:{spec.port}"
        launch = plan_launch(options, world, spec, environment, job_arguments, script)
        say(f"Starting {counted(world.size, 'rank')}{where}.")
        return run_launch(launch, output_dir, options.stop_timeout, coordinator, options.is_first_host)


@contextlib.contextmanager
def _key_file(world: World, options: LauncherOptions, coordinator: Coordinator) -> Iterator[str]:
    """Where the agents find the key, on every host."""
    if world.is_local:
        with key_in_memory(coordinator.key) as path:
            yield path
        return
    way = way_to_hosts(options.launcher, options.ssh_port)
    try:
        path = deliver_key(world.hosts, way, coordinator.key)
    except NotDelivered as error:
        raise NoWay(str(error)) from error
    try:
        yield path
    finally:
        if not coordinator.world_is_here:  # the agents would have removed it then
            withdraw_key(world.hosts, way, path)


def _coordinator(world: World, options: LauncherOptions, job_arguments: Sequence[str]) -> Coordinator:
    settings = CoordinatorSettings(
        world_size=world.size,
        key=new_key(),
        failure_timeout=options.failure_timeout,
        step_timeout=options.step_timeout,
        master_addr=options.master_addr,
        master_port=options.master_port,
        environment=rank_variables(os.environ, world.is_local),
        arguments=tuple(job_arguments),
    )
    return Coordinator(settings, say, everywhere=not world.is_local)


def rank_variables(environ: Mapping[str, str], is_local: bool) -> tuple[tuple[str, str], ...]:
    """What the ranks get beside what they find on their host: the ``.deepspeed_env`` files (which have been
    checked), and on other hosts the variables that are passed on."""
    files, _ = deepspeed_env(Path.home(), Path(), environ)
    return forwarded({} if is_local else environ, files)
