"""One start: what each agent is handed, where they meet, the launcher's process, and how it all ended.

The launcher's exit code does not tell how a run ended (`pipeline.cluster.outcome`). With a coordinator the
ranks report it there, whatever hosts they are on; with a launch on each host (`--no_ssh`) they write it to
the output folder.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pipeline.base.command import say
from pipeline.base.problems import EXIT_STOPPED, EXIT_WRONG_JOB
from pipeline.base.user_input import home_folder
from pipeline.base.words import counted
from pipeline.cluster.agent.coordinator import Coordinator
from pipeline.cluster.agent.handshake import key_in_memory, new_key
from pipeline.cluster.agent.host_inquiry import Inquiry
from pipeline.cluster.agent.launch_spec import CoordinatorSettings, LaunchSpec
from pipeline.cluster.agent.rank_table import signal_name
from pipeline.cluster.forwarded_environment import deepspeed_env, forwarded, on_interface
from pipeline.cluster.history import record_end
from pipeline.cluster.launcher_options import LauncherOptions, words_of
from pipeline.cluster.outcome import Outcome, clear_outcome, read_outcome, write_outcome
from pipeline.job.world import World
from pipeline.launch.host_check.ask import remote_shell
from pipeline.launch.host_check.host_check import NoAddress, launch_address
from pipeline.launch.key_delivery import NotDelivered, deliver_key, withdraw_key
from pipeline.launch.launcher_command import SCRIPT, Launch, launch_program, plan_launch
from pipeline.launch.launcher_process import LauncherExit, LauncherProcess


def start_once(
    world: World,
    output_dir: str,
    options: LauncherOptions,
    job_arguments: Sequence[str],
    batch: tuple[int, ...] = (),
    inquiry: Inquiry | None = None,
    script: str | Path = SCRIPT,
) -> Outcome:
    """One start of `script` on every rank of `world`. `batch`: as in a spec; `inquiry`: before ranks start.

    Raises:
        NoAddress: the coordinator has no address that the ranks could use, or a host cannot be given the key.
    """
    spec = LaunchSpec(
        hosts=tuple((host.name, host.slots) for host in world.hosts),
        failure_timeout=options.failure_timeout,
        step_timeout=options.step_timeout,
        batch=batch,
        command=(launch_program(), *words_of(options)),
    )
    with contextlib.ExitStack() as stack:
        coordinator, where, environment = None, "", dict(os.environ)
        if options.no_ssh:
            environment |= dict(rank_variables(os.environ, is_local=True))  # nobody else hands them out
        else:
            address = launch_address(world, options)
            coordinator = _coordinator(world, options, job_arguments, inquiry)
            stack.enter_context(contextlib.closing(coordinator))
            key_file = stack.enter_context(_key_file(world, options, coordinator))
            spec = replace(spec, address=address, port=coordinator.port, key_file=key_file)
            where = "" if world.is_local else f"; their agents connect to {address}:{spec.port}"
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
    shell = remote_shell(options.launcher, options.ssh_port)
    try:
        path = deliver_key(world.hosts, shell, coordinator.key)
    except NotDelivered as error:
        raise NoAddress(str(error)) from error
    try:
        yield path
    finally:
        if not coordinator.world_is_here:  # the agents would have removed it then
            withdraw_key(world.hosts, shell, path)


def _coordinator(
    world: World, options: LauncherOptions, job_arguments: Sequence[str], inquiry: Inquiry | None
) -> Coordinator:
    variables = rank_variables(os.environ, world.is_local)
    settings = CoordinatorSettings(
        world_size=world.size,
        key=new_key(),
        failure_timeout=options.failure_timeout,
        step_timeout=options.step_timeout,
        master_addr=options.master_addr,
        master_port=options.master_port,
        environment=(*variables, *on_interface(world.interface, dict(variables)).items()),
        arguments=tuple(job_arguments),
        inquiry=inquiry,
    )
    return Coordinator(settings, everywhere=not world.is_local)


def rank_variables(environ: Mapping[str, str], is_local: bool) -> tuple[tuple[str, str], ...]:
    """What the ranks get beside what they find on their host: the ``.deepspeed_env`` files (which have been
    checked), and on other hosts the variables that are passed on."""
    files, _ = deepspeed_env(home_folder(), Path(), environ)
    return forwarded({} if is_local else environ, files)


def run_launch(
    launch: Launch,
    output_dir: str | Path,
    stop_timeout: float,
    coordinator: Coordinator | None = None,
    is_first_host: bool = True,
) -> Outcome:
    """Start the launcher, wait, and tell how it ended.

    Args:
        is_first_host: Only the first forgets the outcome of an earlier start, because other hosts may start
            after this one's outcome has been written.
    """
    if is_first_host:
        clear_outcome(output_dir)
    ended = LauncherProcess(stop_timeout, coordinator).run(launch.command, launch.environment)
    if coordinator is None:
        outcome = read_outcome(output_dir, launch.master_port)
    else:
        outcome = coordinator.outcome
        _keep(outcome, output_dir)
    is_told = outcome is not None
    outcome = conclude(outcome, ended, is_told_by_code=coordinator is None)
    if is_first_host and not is_told:
        with contextlib.suppress(OSError):  # the next start says that nobody has
            record_end(Path(output_dir), outcome.status, "no rank has reported", outcome.exit_code)
    return replace(outcome, on_request=ended.stopped_by is not None)


def _keep(outcome: Outcome | None, output_dir: str | Path) -> None:
    """The first host has it in its folder, unless that host is gone. A folder that the job was refused, or
    that this machine does not share, is not written to."""
    if outcome is None or outcome.status == "wrong_job" or not Path(output_dir).is_dir():
        return
    with contextlib.suppress(OSError):  # a full disk: the exit code and the last line say it, too
        write_outcome(output_dir, outcome, is_final=True)


def conclude(outcome: Outcome | None, ended: LauncherExit, is_told_by_code: bool = False) -> Outcome:
    """How the start ended, after a line about anything but success: finished only where the ranks report it.

    Args:
        is_told_by_code: No coordinator hears the agents of this host, which exit with the code for a wrong
            job where ranks had no output folder yet to write it to.
    """
    # Agents exit with that code, too, where ranks had no output folder yet.
    early = ended.before_ranks or ended.return_code == EXIT_STOPPED
    if outcome is None and early and not ended.killed and ended.stopped_by is not None:
        say(f"Stopped before the first step ({ended.stopped_by.name}): this start had nothing to save.")
        return Outcome("stopped", 0)
    if outcome is None and is_told_by_code and ended.return_code == EXIT_WRONG_JOB and not ended.killed:
        say("The job was refused before the first step, for the reason above.")
        return Outcome("wrong_job", 0)
    if outcome is None:
        say(
            f"The job exited without reporting a result: {_describe(ended)}. "
            "Nothing was saved since the last checkpoint."
        )
        return Outcome("failed", 0)
    if outcome.status == "finished" and ended.return_code != 0:
        say(f"The job finished, then its launcher failed: {_describe(ended)}.")
    elif outcome.status != "finished":
        # A coordinator has told the failure already.
        reason = f": {outcome.message}" if outcome.message and outcome.failure is None else ""
        say(f"{outcome.words.capitalize()} (rank {outcome.rank}){reason}")
    return outcome


def _describe(ended: LauncherExit) -> str:
    if ended.stopped_by is not None:
        return f"{ended.stopped_by.name} {'and then a kill' if ended.killed else 'before it could save'}"
    if ended.return_code < 0:
        return f"its launcher was killed by {signal_name(-ended.return_code)}"
    # The launcher exits with its rank's negative code for a signal, of which eight bits arrive.
    if ended.return_code > 256 - signal.NSIG:
        return f"a rank was killed by {signal_name(256 - ended.return_code)}"
    return f"its launcher returned {ended.return_code}"
