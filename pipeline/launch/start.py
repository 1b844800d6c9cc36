"""From a checked job to its exit code: what each rank is handed, where they meet, and the start itself."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pipeline.base.words import counted
from pipeline.cluster.agent.credential import key_in_memory, new_key
from pipeline.cluster.agent.hub import Hub
from pipeline.cluster.agent.hub_settings import HubSettings
from pipeline.cluster.agent.ticket import Ticket
from pipeline.cluster.agent.wire import route_address
from pipeline.cluster.deepspeed_env import deepspeed_env
from pipeline.cluster.forwarded import forwarded
from pipeline.cluster.launcher_options import LauncherOptions
from pipeline.cluster.world import World, is_this_machine
from pipeline.launch.host_check.ask import way_to_hosts
from pipeline.launch.key_delivery import NotDelivered, deliver_key, withdraw_key
from pipeline.launch.launcher_command import SCRIPT, plan_launch
from pipeline.launch.run import Result, run_launch
from pipeline.launch.supervise import say

_SSH_SECONDS = 10


class NoWay(Exception):
    """This machine and the hosts do not find each other; the message has the remedy."""


def start_once(
    world: World,
    output_dir: str,
    options: LauncherOptions,
    job_arguments: Sequence[str],
    batch: tuple[int, ...] = (),
    script: str | Path = SCRIPT,
) -> Result:
    """One start of `script` on every rank of `world`. `batch`: as in a ticket.

    Raises:
        NoWay: the hub has no address that the ranks could use, or a host cannot be given the key.
    """
    ticket = Ticket(
        hosts=tuple((host.name, host.slots) for host in world.hosts),
        failure_timeout=options.failure_timeout,
        step_timeout=options.step_timeout,
        batch=batch,
    )
    with contextlib.ExitStack() as stack:
        hub, where, environment = None, "", dict(os.environ)
        if options.no_ssh:
            environment |= dict(rank_variables(os.environ, is_local=True))  # nobody else hands them out
        else:
            address = launch_address(world, options)
            hub = stack.enter_context(contextlib.closing(_hub(world, options, job_arguments)))
            key_file = stack.enter_context(_key_file(world, options, hub))
            ticket = replace(ticket, address=address, port=hub.port, key_file=key_file)
            where = f"; their guards report to {address}:{ticket.port}"
        launch = plan_launch(options, world, ticket, environment, job_arguments, script)
        say(f"Starting {counted(world.size, 'rank')}{where}.")
        return run_launch(launch, output_dir, options.stop_timeout, hub, options.is_first_host)


@contextlib.contextmanager
def _key_file(world: World, options: LauncherOptions, hub: Hub) -> Iterator[str]:
    """Where the guards find the key, on every host."""
    if world.is_local:
        with key_in_memory(hub.key) as path:
            yield path
        return
    way = way_to_hosts(options.launcher, options.ssh_port)
    try:
        path = deliver_key(world.hosts, way, hub.key)
    except NotDelivered as error:
        raise NoWay(str(error)) from error
    try:
        yield path
    finally:
        if not hub.world_is_here:  # the guards would have removed it then
            withdraw_key(world.hosts, way, path)


def _hub(world: World, options: LauncherOptions, job_arguments: Sequence[str]) -> Hub:
    settings = HubSettings(
        world_size=world.size,
        key=new_key(),
        failure_timeout=options.failure_timeout,
        step_timeout=options.step_timeout,
        master_addr=options.master_addr,
        master_port=options.master_port,
        environment=rank_variables(os.environ, world.is_local),
        arguments=tuple(job_arguments),
    )
    return Hub(settings, say, everywhere=not world.is_local)


def rank_variables(environ: Mapping[str, str], is_local: bool) -> tuple[tuple[str, str], ...]:
    """What the ranks get beside what they find on their host: the ``.deepspeed_env`` files (which have been
    checked), and on other hosts the variables that are passed on."""
    files, _ = deepspeed_env(Path.home(), Path(), environ)
    return forwarded({} if is_local else environ, files)


def launch_address(world: World, options: LauncherOptions) -> str:
    """Where the hub is, as the hosts of `world` reach it: by the way to the first other host.

    Raises:
        NoWay: its name is unknown here, and ssh has no address for it.
    """
    if options.launch_addr is not None:
        return options.launch_addr
    if world.is_local:
        return "127.0.0.1"
    name = next(host.name for host in world.hosts if not is_this_machine(host.name)).rpartition("@")[2]
    try:
        return route_address(name)
    except OSError:
        pass  # a name that only ssh knows
    try:
        return route_address(_ssh_address(name))
    except OSError as error:
        raise NoWay(
            f"{name} has no address here ({error.strerror or error}): give --launch_addr, this machine's "
            "address as that host reaches it"
        ) from error


def _ssh_address(name: str) -> str:
    """The address that ssh's configuration has for a host.

    Raises:
        OSError: there is no ssh, or it does not say (its configuration may run commands).
    """
    command = ["ssh", "-G", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SSH_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{shlex.join(command)} takes more than {_SSH_SECONDS} s") from error
    found = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("hostname ")]
    return found[0] if found else name
