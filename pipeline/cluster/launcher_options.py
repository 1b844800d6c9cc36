"""Which of a command line's options are the launcher's and which the job's, and how a job was started."""

from __future__ import annotations

import argparse
import contextlib
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar

import psutil

from pipeline.base.fields import Limits, fields_of
from pipeline.base.option_help import Group, Help, other_names
from pipeline.base.problems import Problem
from pipeline.base.user_input import expanded, is_file
from pipeline.cluster.hostfile import address_rule

# Below 5 s of failure time-out, a host that swaps is taken for one that is gone.
LEAST_SECONDS = {"stop_timeout": 0.001, "failure_timeout": 5.0, "step_timeout": 1.0}
# The job's script, and the part of DeepSpeed's launcher that is started on each host.
_SCRIPT, _BEHIND_SSH = "pretrain.py", "deepspeed.launcher.launch"
LAUNCHERS = ("pdsh", "openmpi", "mpich", "impi", "mvapich", "slurm")


@dataclass(frozen=True)
class LauncherOptions:
    """The options of the ``deepspeed`` launcher that this project passes on, and its own. None: not given."""

    HELP: ClassVar[Help] = Help(
        (
            Group("resume", "max_restarts"),
            Group("hosts", "hostfile include exclude num_nodes num_gpus", "allow_fewer_hosts no_ssh_check"),
            Group(
                "launcher",
                "launcher no_ssh",
                "node_rank master_addr master_port launcher_args ssh_port launch_addr stop_timeout "
                "failure_timeout step_timeout",
            ),
        )
    )

    hostfile: Annotated[str, Limits(path=True), "-H", "FILE"] | None = None
    """Hosts and their slots. None: this machine."""
    include: Annotated[str, "-i", "HOSTS"] = ""
    """Use only these: h1@h2:0,2 is all of h1, and slots 0 and 2 of h2. It may be given several times."""
    exclude: Annotated[str, "-e", "HOSTS"] = ""
    """Leave these out, written as for --include."""
    num_nodes: int | None = None
    """Use the first N hosts."""
    num_gpus: Annotated[int, "--num_accelerators"] | None = None
    """Use the first N GPUs of each host; without GPUs, start N ranks. None: all GPUs, or 2 ranks."""
    master_addr: Annotated[str, "HOST"] | None = None
    """Address of the first host, as the others reach it."""
    master_port: Annotated[int, "PORT"] | None = None
    """Port of the rendezvous. None: a free one."""
    launcher: Annotated[str, Limits(choices=LAUNCHERS)] | None = None
    """How other hosts are reached. None: pdsh."""
    launcher_args: Annotated[str, "ARGS"] | None = None
    """Arguments for that launcher, quoted as one."""
    ssh_port: Annotated[int, "PORT"] | None = None
    """Port of the ssh servers."""
    no_ssh_check: bool = False
    """Do not go to the hosts for a check before the start."""
    no_ssh: bool = False
    """Start this host's ranks only, and be run on each host with --node_rank and --master_addr."""
    node_rank: int | None = None
    """With --no_ssh: this host's place in the hostfile."""
    stop_timeout: Annotated[float, "SECONDS"] = 300.0
    """How long ranks may take to save after a first Ctrl-C or SIGTERM."""
    launch_addr: Annotated[str, "HOST"] | None = None
    """Address of this machine, as the first host reaches it."""
    failure_timeout: Annotated[float, "SECONDS"] = 60.0
    """When a rank, a host or this command is gone, all ranks end within this time."""
    step_timeout: Annotated[float, "SECONDS"] | None = None
    """A step after the first that takes longer is hung. Start-up, evaluations and saves always have 1800.
    None: 20 times the longest of the last 50, at least 300."""
    max_restarts: int = 0
    """Start again after a failure, from the newest checkpoint, until N starts in a row have brought no new
    one."""
    allow_fewer_hosts: int | None = None
    """Leave out hosts that fail their check, as long as N are left; a step stays what it was."""

    @property
    def is_first_host(self) -> bool:
        """Whether this launch is the only one, or with --no_ssh the one that starts rank 0."""
        return self.node_rank in (None, 0)


def launcher_parser(program: str = "./launch.sh") -> argparse.ArgumentParser:
    """The launcher's half of the command line of `program`, with DeepSpeed's spelling."""
    parser = argparse.ArgumentParser(
        prog=program,
        usage="%(prog)s [options]",
        add_help=False,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    for name, field in fields_of(LauncherOptions).items():
        form = field.forms[0]
        names = sorted({f"--{name}", *other_names(field)}, key=len)
        if form.kind is bool:
            parser.add_argument(*names, action="store_true")
        elif name in ("include", "exclude"):
            parser.add_argument(*names, action=_Joined)
        else:
            kind = _path if field.is_path else form.kind
            parser.add_argument(*names, dest=name, type=kind, choices=field.choices or None)
    return parser


class _Joined(argparse.Action):
    """A list of hosts, which may be given in several parts."""

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: Any, option: object = None
    ) -> None:
        before = getattr(namespace, self.dest, None)
        vars(namespace)[self.dest] = f"{before}@{values}" if before else values


def _path(text: str) -> str:
    try:
        return expanded(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}. Write the path in full.") from error


def split_arguments(
    arguments: Sequence[str], program: str = "./launch.sh"
) -> tuple[LauncherOptions, list[str]]:
    """The launcher's options, and everything else in its order: the job refuses what it does not know.

    Raises:
        SystemExit: code 2 after a message, for a value of the wrong type.
    """
    parsed, rest = launcher_parser(program).parse_known_args(list(arguments))
    return LauncherOptions(**vars(parsed)), rest


def words_of(options: LauncherOptions) -> list[str]:
    """The command line that gives these options."""
    words = []
    for field in fields(options):
        value = getattr(options, field.name)
        if value is True:
            words.append(f"--{field.name}")
        elif value != field.default:
            text = f"{value:g}" if isinstance(value, float) else str(value)
            # argparse takes what begins with a hyphen for the next option.
            words += [f"--{field.name}={text}"] if text.startswith("-") else [f"--{field.name}", text]
    return words


def start_command(world_size: int) -> tuple[str, ...]:
    """What started this rank without ./launch.sh, up to and with the script, as the processes above it show;
    empty where they do not: across ssh, and under srun.

    Args:
        world_size: A process that nothing else has started is a whole job only if it has one rank.
    """
    above = []
    with contextlib.suppress(psutil.Error):
        above = [process.cmdline() for process in psutil.Process().parents()]
    # The outermost is what somebody typed; the innermost is this rank's agent.
    starts = [words for words in above if any(map(_is_script, words))]
    if not starts or _BEHIND_SSH in starts[-1] or (len(starts) == 1 and world_size > 1):
        return ()
    last = next(index for index, word in enumerate(starts[-1]) if _is_script(word))
    words = starts[-1][: last + 1]
    name = Path(words[1]).name
    # As typed: "deepspeed" is a script that its first line starts Python for.
    return (name, *words[2:]) if len(words) > 2 and shutil.which(name) == words[1] else tuple(words)


def _is_script(word: str) -> bool:
    """Whether a word of a command line names the script. A shell's ``cd project && deepspeed pretrain.py`` is
    one word, too, which options behind it would not reach."""
    return Path(word).name == _SCRIPT and is_file(word)


def launcher_problems(options: LauncherOptions) -> list[Problem]:
    """Values out of range, and options that need each other."""
    problems = []
    for key in ("master_port", "ssh_port"):
        port = getattr(options, key)
        if port is not None and not 1 <= port <= 65535:
            problems.append(Problem(key, port, "a port is from 1 to 65535", "Give another port"))
    for key in ("master_addr", "launch_addr"):
        address = getattr(options, key)
        if address is not None and (rule := address_rule(address)):
            problems.append(Problem(key, address, rule, "Give a host's name or address"))
    for key, least in LEAST_SECONDS.items():
        seconds = getattr(options, key)
        if seconds is not None and not least <= seconds < math.inf:  # nor is NaN a time
            rule = f"must be a number of seconds, at least {least:g}"
            problems.append(Problem(key, seconds, rule, "Give a number of seconds"))
    problems += _restart_problems(options)
    if options.no_ssh and (options.node_rank is None or options.master_addr is None):
        rule = "each host must know its place and the first host's address"
        problems.append(Problem("no_ssh", True, rule, "Add --node_rank N and --master_addr HOST"))
    if options.node_rank is not None and options.node_rank < 0:
        rule = "hosts are counted from 0"
        problems.append(
            Problem("node_rank", options.node_rank, rule, "Give the host's place in the hostfile")
        )
    if options.node_rank is not None and not options.no_ssh:
        rule = "has a meaning with --no_ssh only"
        problems.append(Problem("node_rank", options.node_rank, rule, "Add --no_ssh, or leave it out"))
    return problems


def _restart_problems(options: LauncherOptions) -> list[Problem]:
    problems = []
    if options.max_restarts < 0:
        rule = "must be at least 0"
        problems.append(Problem("max_restarts", options.max_restarts, rule, "Give a number of restarts"))
    if options.max_restarts and options.no_ssh:
        rule = "needs a launch that starts every host; with --no_ssh each host has one of its own"
        problems.append(Problem("max_restarts", options.max_restarts, rule, "Leave one of them out"))
    least = options.allow_fewer_hosts
    if least is not None and least < 1:
        problems.append(Problem("allow_fewer_hosts", least, "must be at least 1", "Give a number of hosts"))
    if least is not None and (options.no_ssh or options.no_ssh_check or options.hostfile is None):
        rule = "needs the hosts of a hostfile, and their check before each start"
        remedy = "Give --hostfile, and leave --no_ssh and --no_ssh_check out"
        problems.append(Problem("allow_fewer_hosts", least, rule, remedy))
    return problems
