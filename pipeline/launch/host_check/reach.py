"""Why a host could not be reached, told from what ssh said, with the remedy for each cause."""

from __future__ import annotations

import re
import shlex
import subprocess
from dataclasses import dataclass

from pipeline.cluster.agent.connection import route_address
from pipeline.cluster.launcher_options import LauncherOptions
from pipeline.job.world import World, is_this_machine
from pipeline.launch.host_check.session import Said

_SSH_SECONDS = 10

_SSH_FAILED = 255


@dataclass(frozen=True)
class Failure:
    """Why there is no answer from a host.

    Attributes:
        kind: One word for it, for the table.
        rule: What went wrong, in words.
        remedy: What to do; ``{host}`` stands for the host.
    """

    kind: str
    rule: str
    remedy: str


NO_ANSWER = Failure(
    "no answer",
    "the login worked, or hangs, and nothing answered in time",
    "Try `ssh {host} true`: a start-up file of its shell may wait for input, or a file system may hang",
)
_CAUSES = (
    (
        r"Could not resolve hostname",
        Failure(
            "unknown name", "its name cannot be resolved",
            "Correct the hostfile, or add {host} to /etc/hosts or ~/.ssh/config",
        ),
    ),
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED|Offending .* key in",
        Failure(
            "key changed", "its ssh host key is not the one in known_hosts",
            "If the host was installed anew: ssh-keygen -R {host}, then log in once by hand",
        ),
    ),
    (
        r"Host key verification failed|No .* host key is known",
        Failure(
            "unknown key", "its ssh host key is not known here, and nobody is asked during a start",
            "Log in once by hand (ssh {host}) and compare the fingerprint",
        ),
    ),
    (
        r"UNPROTECTED PRIVATE KEY FILE|Bad owner or permissions",
        Failure(
            "key file open", "ssh refuses a key or configuration file that others may read or write",
            "chmod -R go= ~/.ssh",
        ),
    ),
    (
        r"Permission denied \([^)]*(password|keyboard-interactive)[^)]*\)",
        Failure(
            "asks", "it would ask for a password, and nobody can answer during a start",
            "Give it your key: ssh-copy-id {host}; a key with a passphrase needs ssh-agent",
        ),
    ),
    (
        r"Permission denied|Too many authentication failures",
        Failure(
            "denied", "it accepts none of your ssh keys",
            "Put your public key into ~/.ssh/authorized_keys there; a key with a passphrase needs ssh-agent",
        ),
    ),
    (
        r"No route to host|Network is unreachable",
        Failure("no route", "no network leads to it", "See that it is switched on, and its address right"),
    ),
    (
        r"Connection refused",
        Failure(
            "refused", "it is there, but no ssh server listens",
            "Start sshd on {host}, or give its port with --ssh_port",
        ),
    ),
    (
        r"timed out|Timeout, server .* not responding",
        Failure(
            "timed out", "it does not answer: it is down, or a firewall drops the packets",
            "Leave it out with --exclude {host}, or bring it back",
        ),
    ),
    (
        r"kex_exchange_identification|Connection (reset|closed) by|banner",
        Failure(
            "hung up", "its ssh server ends the connection before the login",
            "See its log: access rules, a pending reboot, or MaxStartups",
        ),
    ),
)  # fmt: skip


def no_client(program: str, error: OSError) -> Failure:
    """This machine cannot start the program that reaches hosts."""
    if isinstance(error, FileNotFoundError):
        return Failure(f"no {program}", f"there is no {program} on this machine", f"Install {program} here")
    remedy = f"See to the limits of this machine (ulimit -a), and to {program}"
    return Failure(f"no {program}", f"this machine cannot start {program}: {error.strerror}", remedy)


def failure_of(said: Said) -> Failure:
    """The cause of a missing answer."""
    if said.return_code is None:
        return NO_ANSWER
    last = said.errors.strip().splitlines()[-1:] or said.noise.strip().splitlines()[-1:] or ["nothing"]
    if slurm := re.search(r"srun: error: (.+)", said.errors):
        remedy = "See sinfo and squeue: the host must be up, and free or in this allocation"
        return Failure("srun failed", f"Slurm starts nothing there ({slurm[1][:200]})", remedy)
    if said.return_code != _SSH_FAILED:
        rule = f"the login works, but the check does not run there (it says: {last[0].strip()[:200]})"
        return Failure("no check", rule, "Try `ssh {host} python3 -V`; its shell must run commands")
    for pattern, failure in _CAUSES:
        if re.search(pattern, said.errors):
            return failure
    return Failure("ssh failed", f"ssh failed (it says: {last[0].strip()[:200]})", "Try `ssh {host} true`")


class NoWay(Exception):
    """This machine and the hosts do not find each other; the message has the remedy."""


def launch_address(world: World, options: LauncherOptions) -> str:
    """Where the coordinator is, as the hosts of `world` reach it: by the way to the first other host.

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
