"""A program on a host of the job that is exchanged lines with: over ssh, as the launcher does, or locally.

Nothing here ever asks the user: ssh gets BatchMode, so that it fails where it would prompt, and no option
that accepts a host key. Which keys are trusted is the user's own configuration. Why a host could
not be reached is found in what ssh printed, with the remedy for each cause.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from pipeline.cluster.agent.connection import make_room

CONNECT_SECONDS = 10
# A peer that answers nothing for 2 x 5 seconds is gone.
_SSH = (
    "ssh", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}",
    "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=2", "-o", "ControlPath=none",
)  # fmt: skip
_MOST_KEPT = 64 * 1024
_GRACE_SECONDS = 3.0
# Open files of this process for each program that runs: three pipes, and while it is started three more.
_DESCRIPTORS = 6
_DESCRIPTORS_BESIDE = 128


@dataclass(frozen=True)
class Output:
    """What a program has printed beside its answers.

    Attributes:
        noise: Standard output that was no answer, such as the words of a shell's start-up file.
        errors: Standard error.
        return_code: None if it had to be ended. ssh returns 255 for its own failures.
    """

    noise: str
    errors: str
    return_code: int | None


class Session:
    """One running program whose standard input and output are lines; answers begin with `mark`.

    The program must end when its standard input does: that is how a lost connection, and a caller that is
    killed, end it.

    Raises:
        OSError: the command cannot be started, as when there is no ssh.
    """

    def __init__(self, command: Sequence[str], mark: str) -> None:
        self._mark = mark
        self._answers: queue.Queue[tuple[str, float] | None] = queue.Queue()
        self._noise: list[str] = []
        self._errors: list[str] = []
        self._unsent: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._ended = False
        # A session of its own: the terminal's Ctrl-C reaches the caller, which then closes this.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        self._readers = [
            threading.Thread(target=self._read_answers, args=(self._process.stdout,), daemon=True),
            threading.Thread(target=self._read_errors, args=(self._process.stderr,), daemon=True),
        ]
        writer = threading.Thread(target=self._write_lines, args=(self._process.stdin,), daemon=True)
        for thread in (*self._readers, writer):
            thread.start()

    def _write_lines(self, stream: IO[str]) -> None:
        # A broken pipe: the program's end is seen where the next answer is missed.
        with contextlib.suppress(OSError), stream:
            while (line := self._unsent.get()) is not None:
                stream.write(line + "\n")
                stream.flush()

    def _read_answers(self, stream: IO[str]) -> None:
        kept = 0
        for line in stream:
            before, mark, answer = line.partition(self._mark)
            if mark:
                self._answers.put((answer.strip(), time.time()))
            if before.strip() and kept < _MOST_KEPT:
                kept += len(before)
                self._noise.append(before)
        self._answers.put(None)

    def _read_errors(self, stream: IO[str]) -> None:
        for line in stream:
            if sum(map(len, self._errors)) < _MOST_KEPT:
                self._errors.append(line)

    def answer(self, deadline: float) -> tuple[str, float] | None:
        """The next answer and the time it came at (of time.time).

        None if the program ended, or `deadline` (of time.monotonic) passed, without one.
        """
        try:
            found = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return None
        self._ended = self._ended or found is None
        return found

    @property
    def ended(self) -> bool:
        """Whether all of its output has been read, and there will be no more."""
        return self._ended

    def send(self, line: str) -> None:
        """Send one line, of any length. Never blocks: lines to a host that does not read are queued, those
        to a program that has ended are dropped."""
        self._unsent.put(line)

    def end_input(self) -> None:
        """Ask for its end."""
        self._unsent.put(None)

    def await_end(self, deadline: float) -> None:
        """Wait until `deadline` (of time.monotonic), and kill what is left on this side."""
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def output(self, deadline: float) -> Output:
        """What it has printed, once it has ended; a child that holds its output open is waited for until
        `deadline`."""
        self._process.wait()
        for reader in self._readers:
            reader.join(max(0.0, deadline - time.monotonic()))
        code = self._process.returncode if self._ended else None
        return Output("".join(self._noise), "".join(self._errors), code)


def remote_command(host: str, script: str, ssh_port: int | None = None) -> list[str]:
    """The ssh command that runs a script of sh, of one line, on `host`, whatever its login shell is."""
    port = [] if ssh_port is None else ["-p", str(ssh_port)]
    return [*_SSH, *port, "--", host, f"exec sh -c {shlex.quote(script)}"]


def srun_command(host: str, script: str) -> list[str]:
    """The same through Slurm, inside an allocation: for clusters whose hosts take no ssh logins."""
    where = ["--nodes=1", "--ntasks=1", "--overlap", "--quiet", f"--nodelist={host.rpartition('@')[2]}"]
    # srun passes the caller's environment on, and that login was not this host's.
    return ["srun", *where, "sh", "-c", f"unset SSH_CONNECTION; {script}"]


def local_command(script: str) -> list[str]:
    """The same on this machine."""
    return ["sh", "-c", script]


def close_all(sessions: Sequence[Session]) -> list[Output]:
    """End their input, wait shortly for their end, and kill those that are left. All have the same time: a
    hundred that hang take no longer than one."""
    for session in sessions:
        session.end_input()
    deadline = time.monotonic() + _GRACE_SECONDS
    for session in sessions:
        session.await_end(deadline)
    deadline = time.monotonic() + _GRACE_SECONDS
    return [session.output(deadline) for session in sessions]


def room_for(sessions: int) -> None:
    """Raise the limit of open files so that this many can run at once."""
    make_room(_DESCRIPTORS * sessions + _DESCRIPTORS_BESIDE)


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
            "unknown key", "its ssh host key is not known here, and a start asks no questions",
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
            "asks", "it would ask for a password, and a start asks no questions",
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


def failure_of(output: Output) -> Failure:
    """The cause of a missing answer."""
    if output.return_code is None:
        return NO_ANSWER
    last = output.errors.strip().splitlines()[-1:] or output.noise.strip().splitlines()[-1:] or ["nothing"]
    if slurm := re.search(r"srun: error: (.+)", output.errors):
        remedy = "See sinfo and squeue: the host must be up, and free or in this allocation"
        return Failure("srun failed", f"Slurm starts nothing there ({slurm[1][:200]})", remedy)
    if output.return_code != _SSH_FAILED:
        rule = f"the login works, but the check does not run there (it printed: {last[0].strip()[:200]})"
        return Failure("no check", rule, "Try `ssh {host} python3 -V`; its shell must run commands")
    for pattern, failure in _CAUSES:
        if re.search(pattern, output.errors):
            return failure
    return Failure("ssh failed", f"ssh failed (it printed: {last[0].strip()[:200]})", "Try `ssh {host} true`")
