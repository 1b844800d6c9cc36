"""From a checked job to its exit code: what each rank is handed, where they meet, and the start itself."""

from __future__ import annotations

import os
import resource
import secrets
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.cluster.deepspeed_env import deepspeed_env
from pipeline.cluster.forwarded import forwarded
from pipeline.cluster.hub import Hub
from pipeline.cluster.hub_settings import HubSettings
from pipeline.cluster.launcher_command import SCRIPT, plan_launch
from pipeline.cluster.launcher_options import LauncherOptions
from pipeline.cluster.run import Result, run_launch
from pipeline.cluster.supervise import say
from pipeline.cluster.ticket import Ticket
from pipeline.cluster.wire import route_address
from pipeline.cluster.world import World, is_this_machine

_SSH_SECONDS = 10


class NoWay(Exception):
    """This machine does not know how the first host reaches it; the message has the remedy."""


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
        NoWay: the hub has no address that the ranks could use.
    """
    hub = None if options.no_ssh else _hub(world, options)
    address = launch_address(world, options) if hub is not None else ""
    ticket = Ticket(
        arguments=tuple(job_arguments),
        hosts=tuple((host.name, host.slots) for host in world.hosts),
        address=address,
        port=hub.port if hub is not None else 0,
        token=hub.token if hub is not None else "",
        failure_timeout=options.failure_timeout,
        step_timeout=options.step_timeout,
        batch=batch,
    )
    launch = plan_launch(options, world, ticket, os.environ, script)
    where = f"; their guards report to {address}:{ticket.port}" if hub is not None else ""
    say(f"Starting {world.size} ranks{where}.")
    return run_launch(launch, output_dir, options.stop_timeout, hub, options.is_first_host)


def _hub(world: World, options: LauncherOptions) -> Hub:
    # A connection for each rank; the usual soft limit is 1,024 open files.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    settings = HubSettings(
        world_size=world.size,
        token=secrets.token_urlsafe(16),
        failure_timeout=options.failure_timeout,
        step_timeout=options.step_timeout,
        master_addr=options.master_addr,
        master_port=options.master_port,
        environment=rank_variables(os.environ, world.is_local),
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
    """The address that ssh's configuration has for a host."""
    done = subprocess.run(
        ["ssh", "-G", name], capture_output=True, text=True, timeout=_SSH_SECONDS, check=False
    )
    found = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("hostname ")]
    return found[0] if found else name
